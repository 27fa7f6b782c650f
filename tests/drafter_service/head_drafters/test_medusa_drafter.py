from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from exactness.law import p_value
from outrider.drafter_service.engine.draft_sampler import Children
from outrider.drafter_service.engine.drafter import Ask, DraftEngineConfig, SessionKey
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.engine.product_tree import best_of_product
from outrider.drafter_service.head_drafters.medusa_drafter import MedusaDrafter
from outrider.drafter_service.heads.medusa import MedusaHeads
from outrider.verifier_service.messages.draft import (
    DRAFT_PROB_SCALE,
    FINAL_TAP,
    ROOT,
    Commit,
    Draft,
    DraftSampling,
    Open,
    States,
    check_draft,
)
from outrider.verifier_service.sampling.coupled_sampler import coupled_choice, gumbel_noise
from outrider.verifier_service.sampling.sparse_rows import quantised_rows
from tiny.verified import target_probs

HIDDEN_SIZE, VOCAB_SIZE, NUM_HEADS = 8, 12, 3
GREEDY = DraftSampling(temperature=0.0)
SEEDED = DraftSampling(temperature=0.9, top_k=8, seed=5, choice_index=1)
SAMPLED = DraftSampling(temperature=0.9, top_p=0.95)
MODES = [pytest.param(mode, id=name) for name, mode in (("greedy", GREEDY), ("seeded", SEEDED), ("sampled", SAMPLED))]


def make_heads(vocab_size: int = VOCAB_SIZE, **options: Any) -> MedusaHeads:
    torch.manual_seed(0)
    return MedusaHeads(hidden_size=HIDDEN_SIZE, vocab_size=vocab_size, num_heads=NUM_HEADS, **options).eval()


def make_drafter(heads: MedusaHeads | None = None, *, vocab_size: int = VOCAB_SIZE, **options: Any) -> MedusaDrafter:
    rng = torch.Generator().manual_seed(1)
    return MedusaDrafter(heads or make_heads(), vocab_size=vocab_size, max_model_len=64, rng=rng, **options)


def make_ask(index: int = 0, *, sampling: DraftSampling = GREEDY, length: int = NUM_HEADS, **options: Any) -> Ask:
    state = torch.randn(1, HIDDEN_SIZE, generator=torch.Generator().manual_seed(index)) * 3
    values: dict[str, Any] = {"token_ids": [1, 2, 3, 4 + index], "states": state, **options}
    return Ask(key=SessionKey("v", str(index)), ask_id=index + 7, sampling=sampling, length=length, **values)


def draft_one(ask: Ask, drafter: MedusaDrafter | None = None) -> Draft:
    (result,) = (drafter or make_drafter()).draft([ask], max_num_tokens=64)
    assert (result.request_id, result.round_id) == (ask.key.request_id, ask.ask_id)
    return result


def head_logits(ask: Ask, heads: MedusaHeads | None = None) -> torch.Tensor:
    """[num_heads, vocab_size]"""
    with torch.inference_mode():
        return (heads or make_heads())(ask.states[0])


def head_probs(ask: Ask) -> torch.Tensor:
    return target_probs(head_logits(ask), [ask.sampling] * NUM_HEADS)


def require_valid(result: Draft, ask: Ask) -> None:
    draft = Draft(
        request_id="r",
        round_id=1,
        position=len(ask.token_ids),
        token_ids=result.token_ids,
        draft_probs=result.draft_probs,
        parents=result.parents,
        confidences=result.confidences,
    )
    problem = check_draft(draft, draft_vocab_size=VOCAB_SIZE, max_length=ask.length, max_nodes=ask.max_nodes)
    assert problem is None, problem


def test_it_needs_the_final_state_of_the_last_token_alone():
    needs = make_drafter().needs
    assert (needs.taps, needs.last_state_only, needs.predictions) == ((FINAL_TAP,), True, False)


# --- chains ---


def test_a_greedy_chain_is_each_heads_best_token():
    ask = make_ask()
    result = draft_one(ask)
    assert result.token_ids == tuple(head_logits(ask).argmax(dim=1).tolist())
    assert (result.draft_probs, result.parents) == (None, None)
    expected = head_logits(ask).softmax(dim=1).amax(dim=1).tolist()
    assert result.confidences == pytest.approx(expected)


def test_a_seeded_chain_is_chosen_under_the_noise_of_its_own_positions():
    ask = make_ask(sampling=SEEDED)
    noise = gumbel_noise(5, 1, torch.arange(4, 4 + NUM_HEADS), VOCAB_SIZE, "cpu")  # four tokens are committed
    assert draft_one(ask).token_ids == tuple(coupled_choice(head_probs(ask), noise).tolist())
    assert draft_one(ask).draft_probs is None


def test_a_sampled_chain_is_drawn_from_the_rows_that_it_carries():
    ask = make_ask(sampling=SAMPLED)
    ids, weights = quantised_rows(head_probs(ask), top_n=4)
    laws = np.zeros((NUM_HEADS, VOCAB_SIZE))
    np.put_along_axis(laws, ids.numpy(), weights.numpy() / DRAFT_PROB_SCALE, axis=1)
    drafter = make_drafter(top_n=4)
    counts = np.zeros((VOCAB_SIZE,) * NUM_HEADS)
    asks = [replace(ask, ask_id=index) for index in range(3000)]
    for result in drafter.draft(asks, max_num_tokens=NUM_HEADS * len(asks)):
        counts[result.token_ids] += 1
    require_valid(result, ask)
    for row, law in zip(result.draft_probs, laws, strict=True):
        assert dict(zip(row.token_ids, row.weights, strict=True)) == {
            token_id: round(prob * DRAFT_PROB_SCALE) for token_id, prob in enumerate(law) if prob
        }
    assert p_value(counts, np.einsum("i,j,k->ijk", *laws)) > 1e-4
    assert result.confidences == pytest.approx([law.max() for law in laws]), "functions of the rows, not of the draw"


@pytest.mark.parametrize("sampling", MODES)
def test_drafts_are_no_longer_than_asked_for_nor_than_there_are_heads(sampling: DraftSampling):
    for length in (1, 2, NUM_HEADS, NUM_HEADS + 4):
        ask = make_ask(sampling=sampling, length=length)
        result = draft_one(ask)
        assert len(result.token_ids) == min(length, NUM_HEADS)
        require_valid(result, ask)


def test_only_the_last_of_several_states_counts():
    ask = make_ask()
    longer = make_ask(states=torch.cat([torch.randn(3, HIDDEN_SIZE), ask.states]))
    assert draft_one(longer).token_ids == draft_one(ask).token_ids


# --- trees ---


def all_paths(levels: list[list[tuple[int, float]]]) -> dict[tuple[int, ...], float]:
    """Every path of the Cartesian product, with its score."""
    paths = {}
    for depth in range(1, len(levels) + 1):
        for path in itertools.product(*levels[:depth]):
            paths[tuple(token_id for token_id, _ in path)] = float(np.prod([prob for _, prob in path]))
    return paths


def paths_of(result: Draft) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token_id, parent in zip(result.token_ids, result.parents, strict=True):
        paths.append((() if parent == ROOT else paths[parent]) + (token_id,))
    return paths


@pytest.mark.parametrize("max_nodes", [1, 2, 7, 40])
@pytest.mark.parametrize("length", [1, 2, NUM_HEADS])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_tree_is_the_best_part_of_the_product(sampling: DraftSampling, length: int, max_nodes: int):
    ask = make_ask(sampling=sampling, length=length, max_nodes=max_nodes)
    probs = head_logits(ask).softmax(dim=1) if sampling is GREEDY else head_probs(ask)
    levels = [[(token_id, prob) for token_id, prob in enumerate(row) if prob] for row in probs[:length].tolist()]
    scores = all_paths(levels)
    best = sorted(scores, key=scores.__getitem__, reverse=True)[:max_nodes]
    result = draft_one(ask, make_drafter(branching=VOCAB_SIZE))
    require_valid(result, ask)
    assert result.draft_probs is None
    assert set(paths_of(result)) == set(best)
    for path, confidence in zip(paths_of(result), result.confidences, strict=True):
        assert confidence == pytest.approx(dict(levels[len(path) - 1])[path[-1]])


def test_a_seeded_tree_holds_the_seeded_chain():
    chain = draft_one(make_ask(sampling=SEEDED)).token_ids
    tree = draft_one(make_ask(sampling=SEEDED, max_nodes=12))
    paths = paths_of(tree)
    for depth in range(1, NUM_HEADS + 1):
        siblings = [path for path in paths if path[:-1] == chain[: depth - 1]]
        assert siblings[0] == chain[:depth], "the target's likeliest choice is tried first"


def test_a_node_has_no_more_children_than_branching():
    result = draft_one(make_ask(max_nodes=30), make_drafter(branching=2))
    assert len(result.token_ids) == 2 + 4 + 8
    require_valid(result, make_ask(max_nodes=30))


def test_the_product_is_never_made():
    flat = Children(token_ids=tuple(range(1000)), probs=(0.001,) * 1000)
    sharp = Children(token_ids=tuple(range(1000)), probs=(0.9, *[0.1 / 999] * 999))
    chosen = best_of_product([sharp] * 20 + [flat] * 20, (), max_nodes=60)  # 1000^40 leaves
    assert len(chosen.token_ids) == 60
    assert chosen.token_ids[:20] == (0,) * 20


# --- what may be missing, what is forced ---


def test_without_a_state_there_is_no_draft():
    for states in (None, torch.zeros(0, HIDDEN_SIZE), torch.zeros(1, HIDDEN_SIZE + 1)):
        for max_nodes in (0, 4):
            result = draft_one(make_ask(states=states, max_nodes=max_nodes))
            assert (result.token_ids, result.draft_probs) == ((), None)


@pytest.mark.parametrize("max_nodes", [0, 6])
@pytest.mark.parametrize("sampling", MODES)
def test_forced_tokens_come_first(sampling: DraftSampling, max_nodes: int):
    free = draft_one(make_ask(max_nodes=max_nodes))
    for forced in ((9,), (9, 8), (9, 8, 7, 6)):
        ask = make_ask(sampling=sampling, length=4, max_nodes=max_nodes, forced_ids=forced)
        result = draft_one(ask)
        require_valid(result, ask)
        assert result.token_ids[: len(forced)] == forced
        assert (result.draft_probs is not None) == (sampling is SAMPLED and not max_nodes)
        if sampling is GREEDY and not max_nodes:  # the heads go on where they would have been
            assert result.token_ids[len(forced) :] == free.token_ids[len(forced) :]
    assert draft_one(make_ask(length=2, forced_ids=(9, 8, 7))).token_ids == (9, 8)
    assert draft_one(make_ask(length=2, forced_ids=(9,), states=None)).token_ids == (9,)


@pytest.mark.parametrize("max_nodes", [0, 30])
@pytest.mark.parametrize("sampling", MODES)
def test_only_the_targets_ids_are_proposed(sampling: DraftSampling, max_nodes: int):
    for heads in (make_heads(20), make_heads(5), make_heads(20, token_map=torch.tensor([3, 17, 5]))):
        result = draft_one(make_ask(sampling=sampling, max_nodes=max_nodes), make_drafter(heads, vocab_size=9))
        assert result.token_ids
        assert max(result.token_ids) < min(9, heads.vocab_size)
        rows = result.draft_probs or ()
        assert all(max(row.token_ids) < 9 for row in rows)
        if heads.token_map is not None:
            assert set(result.token_ids) <= {3, 5}


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="no id of the heads' token_map is below 3"):
        make_drafter(make_heads(20, token_map=torch.tensor([3, 17, 5])), vocab_size=3)
    with pytest.raises(ValueError, match="branching must be positive"):
        make_drafter(branching=0)


# --- batches ---


def test_asks_of_all_kinds_share_one_forward():
    asks = [
        make_ask(0),
        make_ask(1, max_nodes=6),
        make_ask(2, sampling=SEEDED, length=2),
        make_ask(3, states=None),
        make_ask(4, sampling=SEEDED, max_nodes=9, forced_ids=(2,)),
        make_ask(5, length=1),
        make_ask(6, sampling=SAMPLED, max_nodes=5),
    ]
    heads = make_heads()
    shapes: list[torch.Size] = []
    heads.register_forward_hook(lambda module, args, output: shapes.append(output.shape))
    together = make_drafter(heads).draft(asks, max_num_tokens=64)
    assert shapes == [(NUM_HEADS, 6, VOCAB_SIZE)]
    for ask, result in zip(asks, together, strict=True):
        alone = draft_one(ask)
        assert (result.request_id, result.round_id) == (ask.key.request_id, ask.ask_id)
        assert (result.token_ids, result.parents) == (alone.token_ids, alone.parents)


def test_the_budget_holds_back_younger_asks():
    asks = [make_ask(index) for index in range(4)]
    drafter = make_drafter()
    assert [result.round_id for result in drafter.draft(asks, max_num_tokens=2 * NUM_HEADS)] == [7, 8]
    assert [result.round_id for result in drafter.draft(asks, max_num_tokens=1)] == [7], "every call makes progress"


# --- the shift ---


def test_the_first_head_guesses_the_token_after_the_last_committed_one():
    """A target that counts up, and heads that know it: head k adds k + 2 to the token whose state they read."""
    heads = MedusaHeads(hidden_size=VOCAB_SIZE, vocab_size=VOCAB_SIZE, num_heads=NUM_HEADS, num_layers=0)
    with torch.no_grad():
        for index, lm_head in enumerate(heads.lm_heads):
            lm_head.weight.copy_(torch.eye(VOCAB_SIZE).roll(index + 2, dims=0) * 9)
    engine = DraftEngine(make_drafter(heads), clock=lambda: 0.0, config=DraftEngineConfig())
    engine.handle("v", Open(request_id="r", sampling=GREEDY, token_ids=(3, 4, 5, 6)))
    state = torch.eye(VOCAB_SIZE)[[5]]  # of token 5: the target has not computed token 6 yet
    message = States(
        request_id="r", position=2, dtype="float32", width=VOCAB_SIZE, data=state.numpy().astype("<f4").tobytes()
    )
    engine.handle("v", message)
    engine.handle("v", Commit(request_id="r", round_id=1, position=4, token_ids=(), max_length=NUM_HEADS))
    ((_, draft),) = engine.step()
    assert draft.token_ids == (7, 8, 9)
    engine.check_integrity()
