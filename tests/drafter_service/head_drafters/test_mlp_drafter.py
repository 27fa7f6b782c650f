from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from exactness.law import p_value
from outrider.drafter_service.engine.drafter import Ask, DraftEngineConfig, SessionKey
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.head_drafters.mlp_drafter import MlpDrafter
from outrider.drafter_service.heads.mlp_speculator import MlpSpeculator
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

EMB_DIM, VOCAB_SIZE, N_PREDICT = 8, 7, 3
GREEDY = DraftSampling(temperature=0.0)
SEEDED = DraftSampling(temperature=0.9, top_k=6, seed=5, choice_index=1)
SAMPLED = DraftSampling(temperature=0.9, top_p=0.95)
MODES = [pytest.param(mode, id=name) for name, mode in (("greedy", GREEDY), ("seeded", SEEDED), ("sampled", SAMPLED))]


def make_speculator(vocab_size: int = VOCAB_SIZE, **options: Any) -> MlpSpeculator:
    torch.manual_seed(0)
    speculator = MlpSpeculator(emb_dim=EMB_DIM, inner_dim=6, vocab_size=vocab_size, n_predict=N_PREDICT, **options)
    with torch.no_grad():
        for head in speculator.head:
            head.weight.mul_(3)
    return speculator.eval()


def make_drafter(speculator: MlpSpeculator | None = None, *, vocab_size: int = VOCAB_SIZE, **options: Any):
    rng = torch.Generator().manual_seed(1)
    return MlpDrafter(speculator or make_speculator(), vocab_size=vocab_size, max_model_len=64, rng=rng, **options)


def make_ask(index: int = 0, *, sampling: DraftSampling = GREEDY, length: int = N_PREDICT, **options: Any) -> Ask:
    state = torch.randn(1, EMB_DIM, generator=torch.Generator().manual_seed(index)) * 2
    values: dict[str, Any] = {"token_ids": [1, 2, 3, index % VOCAB_SIZE], "states": state, **options}
    return Ask(key=SessionKey("v", str(index)), ask_id=index + 7, sampling=sampling, length=length, **values)


def draft_one(ask: Ask, drafter: MlpDrafter | None = None) -> Draft:
    (result,) = (drafter or make_drafter()).draft([ask], max_num_tokens=64)
    assert (result.request_id, result.round_id) == (ask.key.request_id, ask.ask_id)
    return result


@torch.inference_mode()
def logits_after(ask: Ask, path: tuple[int, ...], speculator: MlpSpeculator | None = None) -> torch.Tensor:
    """What follows the committed tokens and a path of drafted ones, read one token at a time: [vocab_size]."""
    speculator = speculator or make_speculator()
    state = speculator.start(ask.states[-1])
    for index, token_id in enumerate((ask.token_ids[-1], *path)):
        logits, state = speculator.step(index, state, torch.tensor(token_id))
    return logits


def probs_after(ask: Ask, path: tuple[int, ...]) -> torch.Tensor:
    logits = logits_after(ask, path)
    return logits.softmax(dim=0) if ask.sampling is GREEDY else target_probs(logits[None], [ask.sampling])[0]


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


@pytest.mark.parametrize("options", [{}, {"scale_input": True}, {"tie_weights": True}])
def test_a_greedy_chain_feeds_back_its_own_tokens(options: dict[str, bool]):
    speculator = make_speculator(**options)
    for index in range(4):
        ask = make_ask(index)
        result = draft_one(ask, make_drafter(speculator))
        for depth, token_id in enumerate(result.token_ids):
            logits = logits_after(ask, result.token_ids[:depth], speculator)
            assert token_id == int(logits.argmax())
            assert result.confidences[depth] == pytest.approx(float(logits.softmax(dim=0).amax()))
        assert (len(result.token_ids), result.draft_probs, result.parents) == (N_PREDICT, None, None)


def test_a_seeded_chain_is_chosen_under_the_noise_of_its_own_positions():
    ask = make_ask(sampling=SEEDED)
    result = draft_one(ask)
    noise = gumbel_noise(5, 1, torch.arange(4, 4 + N_PREDICT), VOCAB_SIZE, "cpu")  # four tokens are committed
    for depth, token_id in enumerate(result.token_ids):
        probs = probs_after(ask, result.token_ids[:depth])
        assert token_id == int(coupled_choice(probs[None], noise[depth : depth + 1]))
    assert len(result.token_ids) == N_PREDICT
    assert result.draft_probs is None


def test_a_sampled_chain_is_drawn_from_the_rows_that_it_carries():
    ask = make_ask(sampling=SAMPLED, length=2)
    drafter = make_drafter(top_n=3)
    counts = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
    rows: dict[tuple[int, ...], dict[int, int]] = {}
    asks = [replace(ask, ask_id=index) for index in range(3000)]
    for result in drafter.draft(asks, max_num_tokens=2 * len(asks)):
        counts[result.token_ids] += 1
        for depth, row in enumerate(result.draft_probs):
            held = dict(zip(row.token_ids, row.weights, strict=True))
            assert rows.setdefault(result.token_ids[:depth], held) == held
    require_valid(result, ask)
    law = np.zeros_like(counts)
    for first, weight in rows[()].items():
        for second, second_weight in rows[(first,)].items():
            law[first, second] = weight * second_weight / DRAFT_PROB_SCALE**2
    assert p_value(counts, law) > 1e-4
    for path, row in rows.items():
        ids, weights = quantised_rows(probs_after(ask, path)[None], top_n=3)
        expected = dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))
        assert row == pytest.approx({token_id: weight for token_id, weight in expected.items() if weight}, abs=1)


@pytest.mark.parametrize("sampling", MODES)
def test_drafts_are_no_longer_than_asked_for_nor_than_there_are_steps(sampling: DraftSampling):
    for length in (1, 2, N_PREDICT, N_PREDICT + 4):
        ask = make_ask(sampling=sampling, length=length)
        result = draft_one(ask)
        assert len(result.token_ids) == min(length, N_PREDICT)
        require_valid(result, ask)


# --- trees ---


def paths_of(result: Draft) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token_id, parent in zip(result.token_ids, result.parents, strict=True):
        paths.append((() if parent == ROOT else paths[parent]) + (token_id,))
    return paths


@functools.cache
def all_paths(
    sampling: DraftSampling, length: int
) -> tuple[dict[tuple[int, ...], float], dict[tuple[int, ...], float]]:
    """Every continuation of the first ask: its last token's chance given its parent, and its whole path's."""
    ask = make_ask(sampling=sampling)
    chances: dict[tuple[int, ...], float] = {}
    scores: dict[tuple[int, ...], float] = {(): 1.0}
    for path in itertools.chain.from_iterable(
        itertools.product(range(VOCAB_SIZE), repeat=depth) for depth in range(length)
    ):
        if path in scores:
            for token_id, prob in enumerate(probs_after(ask, path).tolist()):
                if prob:
                    chances[(*path, token_id)] = prob
                    scores[(*path, token_id)] = prob * scores[path]
    return chances, scores


@pytest.mark.parametrize("max_nodes", [1, 2, 7, 20])
@pytest.mark.parametrize("length", [1, 2, N_PREDICT])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_tree_is_the_best_part_of_all_continuations(sampling: DraftSampling, length: int, max_nodes: int):
    ask = make_ask(sampling=sampling, length=length, max_nodes=max_nodes)
    chances, scores = all_paths(sampling, length)
    best = sorted(chances, key=scores.__getitem__, reverse=True)[:max_nodes]
    result = draft_one(ask, make_drafter(branching=VOCAB_SIZE))
    require_valid(result, ask)
    assert result.draft_probs is None
    assert set(paths_of(result)) == set(best)
    for path, confidence in zip(paths_of(result), result.confidences, strict=True):
        assert confidence == pytest.approx(chances[path], rel=1e-4)


def test_a_seeded_tree_holds_the_seeded_chain():
    chain = draft_one(make_ask(sampling=SEEDED)).token_ids
    paths = paths_of(draft_one(make_ask(sampling=SEEDED, max_nodes=12)))
    for depth in range(1, N_PREDICT + 1):
        siblings = [path for path in paths if path[:-1] == chain[: depth - 1]]
        assert siblings[0] == chain[:depth], "the target's likeliest choice is tried first"


# --- what may be missing, what is forced ---


def test_without_a_state_there_is_no_draft():
    for states in (None, torch.zeros(0, EMB_DIM), torch.zeros(1, EMB_DIM + 1)):
        for max_nodes in (0, 4):
            result = draft_one(make_ask(states=states, max_nodes=max_nodes))
            assert (result.token_ids, result.draft_probs) == ((), None)


@pytest.mark.parametrize("max_nodes", [0, 6])
@pytest.mark.parametrize("sampling", MODES)
def test_forced_tokens_come_first_and_are_read(sampling: DraftSampling, max_nodes: int):
    for forced in ((5,), (5, 4), (5, 4, 3, 2)):
        ask = make_ask(sampling=sampling, length=4, max_nodes=max_nodes, forced_ids=forced)
        result = draft_one(ask)
        require_valid(result, ask)
        assert result.token_ids[: len(forced)] == forced
        assert (result.draft_probs is not None) == (sampling is SAMPLED and not max_nodes)
        if len(forced) < N_PREDICT and sampling is GREEDY:
            assert result.token_ids[len(forced)] == int(logits_after(ask, forced).argmax())
    assert draft_one(make_ask(length=2, forced_ids=(5, 4, 3))).token_ids == (5, 4)
    assert draft_one(make_ask(length=2, forced_ids=(5,), states=None)).token_ids == (5,)


@pytest.mark.parametrize("max_nodes", [0, 30])
@pytest.mark.parametrize("sampling", MODES)
def test_only_ids_that_both_know_are_proposed(sampling: DraftSampling, max_nodes: int):
    for num_known in (5, VOCAB_SIZE, 20):  # of a target with 6
        result = draft_one(
            make_ask(sampling=sampling, max_nodes=max_nodes), make_drafter(make_speculator(num_known), vocab_size=6)
        )
        assert result.token_ids
        assert max(result.token_ids) < min(6, num_known)
        assert all(max(row.token_ids) < min(6, num_known) for row in result.draft_probs or ())


@pytest.mark.parametrize("max_nodes", [0, 4])
def test_a_token_that_the_speculator_does_not_know_is_not_read(max_nodes: int):
    drafter = make_drafter(vocab_size=30)
    unknown = make_ask(token_ids=[1, VOCAB_SIZE], max_nodes=max_nodes)
    assert draft_one(unknown, drafter).token_ids == ()
    forced = make_ask(forced_ids=(VOCAB_SIZE + 1,), max_nodes=max_nodes)
    assert draft_one(forced, drafter).token_ids == (VOCAB_SIZE + 1,)
    earlier = make_ask(token_ids=[VOCAB_SIZE, 1], max_nodes=max_nodes)
    assert draft_one(earlier, drafter).token_ids


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="branching must be positive"):
        make_drafter(branching=0)


# --- batches ---


def test_asks_of_all_kinds_share_one_forward_per_level():
    asks = [
        make_ask(0),
        make_ask(1, max_nodes=6),
        make_ask(2, sampling=SEEDED, length=2),
        make_ask(3, states=None),
        make_ask(4, sampling=SEEDED, max_nodes=9, forced_ids=(2,)),
        make_ask(5, length=1),
        make_ask(6, sampling=SAMPLED, max_nodes=5),
        make_ask(7, forced_ids=(1, 1)),
    ]
    speculator = make_speculator()
    levels: list[int] = []
    for level, head in enumerate(speculator.head):
        head.register_forward_hook(lambda module, args, output, level=level: levels.append(level))
    together = make_drafter(speculator).draft(asks, max_num_tokens=64)
    assert levels == [0, 1, 2]
    for ask, result in zip(asks, together, strict=True):
        alone = draft_one(ask)
        assert (result.request_id, result.round_id) == (ask.key.request_id, ask.ask_id)
        assert (result.token_ids, result.parents) == (alone.token_ids, alone.parents)


def test_the_budget_holds_back_younger_asks():
    asks = [make_ask(0), make_ask(1, max_nodes=6), make_ask(2)]
    drafter = make_drafter()
    assert [result.round_id for result in drafter.draft(asks, max_num_tokens=N_PREDICT + 6)] == [7, 8]
    assert [result.round_id for result in drafter.draft(asks, max_num_tokens=1)] == [7], "every call makes progress"


# --- the shift ---


def test_it_reads_the_last_committed_token_and_the_state_of_the_one_before():
    ask = make_ask(3)
    engine = DraftEngine(make_drafter(), clock=lambda: 0.0, config=DraftEngineConfig())
    engine.handle("v", Open(request_id="r", sampling=GREEDY, token_ids=tuple(ask.token_ids)))
    data = ask.states.numpy().astype("<f4").tobytes()
    engine.handle("v", States(request_id="r", position=2, dtype="float32", width=EMB_DIM, data=data))
    engine.handle("v", Commit(request_id="r", round_id=1, position=4, token_ids=(), max_length=N_PREDICT))
    ((_, draft),) = engine.step()
    assert draft.token_ids == draft_one(ask).token_ids
    engine.check_integrity()
