from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exactness.small_engines import load
from fakes.runner import FakeRunner, closed, continuation
from outrider.drafter_service.engine.draft_sampler import launch_children, read_children
from outrider.drafter_service.engine.draft_tree import DraftTree
from outrider.drafter_service.engine.drafter import Ask, DraftEngineConfig, SessionKey
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.engine.kv_budget import num_common, share_budget
from outrider.drafter_service.engine.paged_drafter import PagedDrafter
from outrider.drafter_service.engine.tree_growth import Growth, TreeConfig, start_growth
from outrider.verifier_service.gpu.transfers import CopyBack
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.draft import (
    DRAFT_PROB_SCALE,
    ROOT,
    Commit,
    Draft,
    DraftNeeds,
    DraftSampling,
    Open,
    SparseRow,
    check_draft,
)
from outrider.verifier_service.sampling.sparse_rows import quantised_rows
from tiny.drafters import model_drafter
from tiny.models import full_logits, make_model, random_sequences
from tiny.verified import target_probs

GREEDY = DraftSampling(temperature=0.0)


def engine_over(runner: FakeRunner, *, budget: int = 64) -> DraftEngine:
    drafter = model_drafter(runner, torch.Generator().manual_seed(0))
    config = DraftEngineConfig(max_num_batched_tokens=budget, max_draft_length=8)
    return DraftEngine(drafter, clock=lambda: 0.0, config=config)


def open_(engine: DraftEngine, tokens: Sequence[int], name: str = "r", sampling: DraftSampling = GREEDY) -> None:
    engine.handle("v", Open(request_id=name, sampling=sampling, token_ids=tuple(tokens)))


def ask(engine: DraftEngine, position: int, new: Sequence[int], *, length: int, name: str = "r", round_id: int = 1):
    message = Commit(request_id=name, round_id=round_id, position=position, token_ids=tuple(new), max_length=length)
    engine.handle("v", message)


def run(engine: DraftEngine, max_steps: int = 500) -> dict[str, Draft]:
    drafts: dict[str, Draft] = {}
    for _ in range(max_steps):
        if not engine.has_work():
            return drafts
        for _, message in engine.step():
            assert isinstance(message, Draft), message
            drafts[message.request_id] = message
        engine.check_integrity()
    raise AssertionError("drafts do not become complete")


def test_a_draft_is_the_models_greedy_continuation():
    runner = FakeRunner()
    engine = engine_over(runner)
    open_(engine, [1, 2, 3])
    ask(engine, 3, [], length=4)
    assert run(engine)["r"].token_ids == continuation([1, 2, 3], 4, runner.vocab_size)
    assert [batch.num_tokens for batch in runner.batches] == [3, 1, 1, 1], "the last drafted token is not computed"


def test_requests_of_two_verifiers_share_every_forward():
    runner = FakeRunner()
    engine = engine_over(runner)
    for peer in ("v1", "v2"):
        engine.handle(peer, Open(request_id="r", sampling=GREEDY, token_ids=(1, 2)))
        engine.handle(peer, Commit(request_id="r", round_id=1, position=2, token_ids=(), max_length=3))
    run(engine)
    assert [batch.query_lengths for batch in runner.batches] == [[2, 2], [1, 1], [1, 1]]


def test_catching_up_and_drafting_are_one_batch():
    runner = FakeRunner()
    engine = engine_over(runner, budget=8)
    open_(engine, [1], "drafting")
    ask(engine, 1, [], length=6, name="drafting")
    long_prompt = list(range(20))
    open_(engine, long_prompt, "late")
    ask(engine, 20, [], length=1, name="late")
    drafts = run(engine)
    assert drafts["drafting"].token_ids == continuation([1], 6, runner.vocab_size)
    assert drafts["late"].token_ids == continuation(long_prompt, 1, runner.vocab_size)
    assert [batch.query_lengths for batch in runner.batches] == [[1, 7], [1, 7], [1, 6], *[[1]] * 3]


@pytest.mark.parametrize("sampling", [DraftSampling(temperature=0.0), DraftSampling(temperature=1.0)])
def test_chains_go_on_where_they_are_and_are_read_once(sampling: DraftSampling):
    """Token for token as level by level: beside a tree each level is read."""
    reads: list[int] = []

    def read_back(values: torch.Tensor) -> CopyBack:
        reads.append(values.numel())
        return CopyBack(values)

    asks = [
        tree_ask([1, 2, 3], length=length, max_nodes=0, name=name, sampling=sampling)
        for name, length in (("a", 5), ("b", 3), ("c", 1))
    ]
    runner = TreeRunner()
    drafter = model_drafter(runner, torch.Generator().manual_seed(0), read_back=read_back)
    (*found,) = drafter.draft(asks, max_num_tokens=64)
    assert [len(result.token_ids) for result in found] == [5, 3, 1]
    assert len(reads) == 1
    assert [batch.num_tokens for batch in runner.batches] == [9, 2, 2, 1, 1]
    drafter.check_integrity({ask.key for ask in asks})
    tree = tree_ask([7, 8], length=5, max_nodes=6, name="tree")
    beside = answers(drafter_over(TreeRunner()), [*asks, tree])
    for ask_, result in zip(asks, found, strict=True):
        if sampling.temperature:
            assert_rows_are_right(ask_, result)
        else:
            assert beside[ask_.key.request_id].token_ids == result.token_ids


def test_a_chain_goes_level_by_level_where_the_pool_has_no_room_for_all_of_it():
    runner = TreeRunner(num_blocks=2, block_size=4)
    drafter = drafter_over(runner)
    ask_ = tree_ask([1, 2, 3, 4, 5, 6], length=3, max_nodes=0)
    result = answers(drafter, [ask_])["r"]
    assert_point_masses_are_right(ask_, result, TreeConfig(branching=1))
    assert len(runner.batches) == 3
    drafter.release(ask_.key)
    other = tree_ask([1, 2, 3, 4, 5, 6, 7, 8], length=3, max_nodes=0, name="s")  # computes up to a tenth token
    assert answers(drafter, [other])["s"].token_ids == ()


@pytest.mark.parametrize("num_accepted", [0, 1, 4, 5])
def test_accepted_tokens_keep_their_kv_and_rejected_ones_lose_it(num_accepted: int):
    runner = FakeRunner()
    engine = engine_over(runner)
    prompt = [5, 6, 7]
    open_(engine, prompt)
    ask(engine, 3, [], length=5)
    drafted = list(run(engine)["r"].token_ids)
    new = [*drafted[:num_accepted], (drafted[num_accepted] + 1) % 97 if num_accepted < 5 else 11]
    runner.batches.clear()
    ask(engine, 3, new, length=4, round_id=2)
    assert run(engine)["r"].token_ids == continuation(prompt + new, 4, runner.vocab_size)
    expected = 2 if num_accepted == 5 else 1  # the last drafted token was never computed
    assert runner.batches[0].num_tokens == expected


def test_asking_again_at_the_same_place_computes_the_last_token_again():
    runner = FakeRunner()
    engine = engine_over(runner)
    open_(engine, [5, 6, 7])
    for round_id in (1, 2):
        ask(engine, 3, [], length=3, round_id=round_id)
        assert run(engine)["r"].token_ids == continuation([5, 6, 7], 3, runner.vocab_size)
    ask(engine, 3, [], length=3, round_id=2)  # even under a round id used before
    assert run(engine)["r"].token_ids == continuation([5, 6, 7], 3, runner.vocab_size)


def test_a_superseded_round_half_drafted_leaves_no_trace():
    runner = FakeRunner()
    engine = engine_over(runner)
    open_(engine, [5, 6, 7])
    ask(engine, 3, [], length=8)
    engine.step()
    engine.step()
    ask(engine, 3, [1, 2], length=2, round_id=2)
    assert run(engine)["r"].token_ids == continuation([5, 6, 7, 1, 2], 2, runner.vocab_size)


def test_a_superseded_tree_leaves_no_nodes_to_the_chain_after_it():
    drafter = drafter_over(TreeRunner())
    tree = tree_ask([5, 6, 7], length=4, max_nodes=8)
    for _ in range(2):
        assert drafter.draft([tree], max_num_tokens=64) == []
    chain = tree_ask([5, 6, 7, 1], length=3, max_nodes=0, ask_id=2)
    assert_point_masses_are_right(chain, answers(drafter, [chain])["r"], TreeConfig(branching=1))


def test_opening_again_with_another_prefix_keeps_only_what_is_common():
    runner = FakeRunner()
    engine = engine_over(runner)
    open_(engine, [1, 2, 3, 4, 5, 6])
    ask(engine, 6, [], length=2)
    run(engine)
    runner.batches.clear()
    open_(engine, [1, 2, 3, 9, 9])
    ask(engine, 5, [], length=2)
    assert run(engine)["r"].token_ids == continuation([1, 2, 3, 9, 9], 2, runner.vocab_size)
    assert runner.batches[0].num_tokens == 2


def test_drafts_may_reach_one_token_beyond_the_context():
    runner = FakeRunner(max_model_len=6)
    engine = engine_over(runner)
    open_(engine, [1, 2, 3, 4, 5])
    ask(engine, 5, [], length=8)
    assert run(engine)["r"].token_ids == continuation([1, 2, 3, 4, 5], 2, runner.vocab_size)


def test_kv_of_idle_sessions_is_taken_and_computed_again():
    runner = FakeRunner(num_blocks=4)  # 16 tokens
    engine = engine_over(runner)
    for round_id, name in enumerate(["a", "b", "a", "b"]):
        prompt = [ord(name)] * 9
        if round_id < 2:
            open_(engine, [token % 97 for token in prompt], name)
        ask(engine, 9, [], length=3, name=name, round_id=round_id)
        assert run(engine)[name].token_ids == continuation([token % 97 for token in prompt], 3, runner.vocab_size)


def test_asks_that_do_not_fit_together_are_drafted_one_after_the_other():
    runner = FakeRunner(num_blocks=5)  # 20 tokens
    engine = engine_over(runner)
    prompts = {name: [index] * 12 for index, name in enumerate("abc")}
    for name, prompt in prompts.items():
        open_(engine, prompt, name)
        ask(engine, 12, [], length=7, name=name)
    drafts = run(engine)
    assert {name: draft.token_ids for name, draft in drafts.items()} == {
        name: continuation(prompt, 7, runner.vocab_size) for name, prompt in prompts.items()
    }


def test_an_ask_that_never_fits_gets_an_empty_draft_and_holds_nothing():
    runner = FakeRunner(num_blocks=2)
    engine = engine_over(runner, budget=4)
    open_(engine, list(range(12)), "big")
    ask(engine, 12, [], length=2, name="big")
    open_(engine, [1, 2], "small")
    ask(engine, 2, [], length=2, name="small")
    drafts = run(engine)
    assert drafts["big"].token_ids == ()
    assert drafts["small"].token_ids == continuation([1, 2], 2, runner.vocab_size)


def test_sampled_drafts_have_their_full_length_and_honest_rows():
    runner = FakeRunner()
    engine = engine_over(runner)
    open_(engine, [1, 2, 3], sampling=DraftSampling(temperature=1.0))
    ask(engine, 3, [], length=5)
    draft = run(engine)["r"]
    assert len(draft.token_ids) == len(draft.draft_probs or ()) == 5
    assert check_draft(draft, draft_vocab_size=runner.vocab_size, max_length=5) is None
    assert all(sum(row.weights) == DRAFT_PROB_SCALE for row in draft.draft_probs)


@given(st.integers(0, 1 << 30), st.sampled_from([4, 6, 40]), st.sampled_from([3, 64]))
def test_rollbacks_of_many_sessions_draft_as_fresh_ones_would(seed: int, num_blocks: int, budget: int):
    """Commit random prefixes of drafts for several sessions, with too few blocks, in too small steps."""
    rng = random.Random(seed)
    runner = FakeRunner(num_blocks=num_blocks, block_size=4, max_model_len=16)
    engine = engine_over(runner, budget=budget)
    known = {name: [rng.randrange(97) for _ in range(rng.randint(1, 6))] for name in "abc"}
    for name, tokens in known.items():
        open_(engine, tokens, name)
    last = dict.fromkeys(known, ())
    for round_id in range(3):
        for name, tokens in known.items():
            new = [*last[name][: rng.randint(0, len(last[name]))], rng.randrange(97)][: 16 - len(tokens)]
            ask(engine, len(tokens), new, length=4, name=name, round_id=round_id)
            tokens.extend(new)
        for name, draft in run(engine).items():
            last[name] = draft.token_ids
            length = min(4, 17 - len(known[name]))
            assert draft.token_ids == continuation(known[name], length, runner.vocab_size)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 40))
def test_shares_use_the_whole_budget_and_never_starve_the_oldest(num_pending: list[int], budget: int):
    shares = share_budget(num_pending, budget)
    assert sum(shares) == min(budget, sum(num_pending))
    assert shares[0] >= 1
    assert all(share <= pending for share, pending in zip(shares, num_pending, strict=True))


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)).filter(any), min_size=1, max_size=6), st.integers(6, 24)
)
def test_trees_are_computed_whole_or_not_at_all(asks: list[tuple[int, int]], budget: int):
    num_pending, together = [sum(each) for each in asks], [num_nodes for _, num_nodes in asks]
    shares = share_budget(num_pending, budget, together)
    assert sum(shares) <= budget
    assert shares[0] >= 1
    assert all(
        share == pending or share <= pending - nodes
        for share, pending, nodes in zip(shares, num_pending, together, strict=True)
    )


def test_short_asks_go_before_long_ones():
    assert share_budget([50, 1, 30, 2], 16) == [4, 1, 9, 2]


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_num_common_equals_a_plain_count(left: list[int], right: list[int]):
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    assert num_common(left, right) == count


# --- trees ---

VOCAB_SIZE = 13
SAMPLED = DraftSampling(temperature=1.0)
SEEDED = DraftSampling(temperature=1.0, seed=7)


def logits_after(context: Sequence[int]) -> torch.Tensor:
    """Return what the fake model says after a whole context: float32 [VOCAB_SIZE]."""
    generator = torch.Generator().manual_seed(hash(tuple(context)) & 0xFFFF_FFFF)
    return 2 * torch.randn(VOCAB_SIZE, generator=generator)


class TreeRunner(FakeRunner):
    """Reads each token's context through block tables and tree masks; every token has logits of its own."""

    def __init__(self, **options: int) -> None:
        super().__init__(vocab_size=VOCAB_SIZE, **options)

    def execute(self, batch: ScheduledBatch, chosen: torch.Tensor | None = None) -> torch.Tensor:
        batch = closed(batch, chosen)
        self.batches.append(batch)
        size = self.block_size
        for token_id, slot in zip(batch.token_ids, batch.slot_mapping, strict=True):
            self._kv[slot] = token_id
        contexts: list[list[int]] = []
        trees = batch.tree_parents or [[]] * len(batch.query_lengths)
        for query, context, table, parents in zip(
            batch.query_lengths, batch.context_lengths, batch.block_tables, trees, strict=True
        ):
            assert len(table) == -(-context // size), "table does not cover the context exactly"
            kv = [self._kv[table[i // size] * size + i % size] for i in range(context)]
            first = context - len(parents)
            contexts += [kv[: end + 1] for end in range(context - query, first)]
            paths: list[list[int]] = []
            for token_id, parent in zip(kv[first:], parents, strict=True):
                paths.append([*(kv[:first] if parent < 0 else paths[parent]), token_id])
            contexts += paths
        assert batch.positions == [len(context) - 1 for context in contexts], "positions"
        assert max(batch.positions) < self.max_model_len, "beyond the model's context"
        rows = [logits_after(contexts[index]) for index in batch.logits_indices]
        return torch.stack(rows) if rows else torch.zeros(0, VOCAB_SIZE)


def drafter_over(runner: TreeRunner, method: str = "top_k", branching: int = 3) -> PagedDrafter[Any]:
    trees = TreeConfig(method=method, branching=branching)
    return model_drafter(runner, torch.Generator().manual_seed(0), trees=trees)


def tree_ask(tokens: Sequence[int], *, length: int, max_nodes: int, name: str = "r", ask_id: int = 1, **more) -> Ask:
    more = {"sampling": GREEDY, **more}
    return Ask(key=SessionKey("v", name), ask_id=ask_id, token_ids=tokens, length=length, max_nodes=max_nodes, **more)


def answers(drafter: PagedDrafter[Any], asks: Sequence[Ask], budget: int = 64) -> dict[str, Draft]:
    """Let the drafter draft to the end."""
    open_asks = {ask.key: ask for ask in asks}
    found: dict[str, Draft] = {}
    for _ in range(500):
        if not open_asks:
            return found
        for result in drafter.draft(list(open_asks.values()), max_num_tokens=budget):
            assert open_asks.pop(SessionKey("v", result.request_id)).ask_id == result.round_id
            found[result.request_id] = result
        drafter.check_integrity({ask.key for ask in asks})
    raise AssertionError("drafts do not become complete")


def grown_by_hand(
    ask: Ask,
    trees: TreeConfig,
    logits_of: Callable[[list[int]], torch.Tensor] = logits_after,
    vocab_size: int = VOCAB_SIZE,
) -> Growth:
    """Grow the same draft with a model that computes every path from its beginning, one node at a time."""
    growth = start_growth(ask, trees, vocab_size=vocab_size)
    while growth.frontier:
        found = []
        for node in growth.frontier:
            context = [*ask.token_ids, *growth.tree.path(node)]
            launched = launch_children(
                logits_of(context)[None],
                [ask.sampling],
                [len(context)],
                torch.Generator().manual_seed(0),
                vocab_size=vocab_size,
                num_children=growth.num_children,
                sampled=growth.is_drawn,
            )
            found += read_children(launched)
        growth.grow(found)
    return growth


def assert_point_masses_are_right(ask: Ask, result: Draft, trees: TreeConfig) -> None:
    expected = grown_by_hand(ask, trees).chosen()
    assert result.token_ids == expected.token_ids
    assert result.parents == (expected.parents if ask.max_nodes else None)
    assert result.confidences == pytest.approx(expected.confidences, abs=1e-6)
    assert result.draft_probs is None


def assert_rows_are_right(ask: Ask, result: Draft) -> None:
    """Every row is the law after its path, every child is in its row, and none is missing."""
    parents = result.parents or tuple(range(-1, len(result.token_ids) - 1))
    assert result.draft_probs is not None
    with_children = list(dict.fromkeys(parents))
    tree = DraftTree()
    for token_id, parent in zip(result.token_ids, parents, strict=True):
        tree.add(parent, token_id, 1.0)
    for parent, row in zip(with_children, result.draft_probs, strict=True):
        children = [token for token, of in zip(result.token_ids, parents, strict=True) if of == parent]
        assert len(set(children)) == len(children)
        assert set(children) <= set(row.token_ids)
        law = target_probs(logits_after([*ask.token_ids, *tree.path(parent)])[None], [ask.sampling])
        ids, weights = quantised_rows(law, 32)
        expected = {id_: weight for id_, weight in zip(ids[0].tolist(), weights[0].tolist(), strict=True) if weight}
        forced_next = ask.forced_ids[len(tree.path(parent)) :][:1]
        assert dict(zip(row.token_ids, row.weights, strict=True)) == (
            {forced_next[0]: DRAFT_PROB_SCALE} if forced_next else expected
        )


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, SAMPLED])
def test_a_tree_is_what_computing_each_path_alone_would_grow(sampling: DraftSampling):
    runner = TreeRunner()
    ask_ = tree_ask([1, 2, 3], length=4, max_nodes=9, sampling=sampling)
    result = answers(drafter_over(runner), [ask_])["r"]
    assert_point_masses_are_right(ask_, result, TreeConfig(branching=3))
    assert len(result.token_ids) == 9
    assert len(set(result.parents)) < 9, "it forks"
    assert len(runner.batches) == 4, "one forward for each level"
    assert max(batch.num_tokens for batch in runner.batches) <= 9


def test_seeded_trees_hold_the_targets_own_choice():
    """The chain that plain coupled drafting gives is a path of the tree."""
    drafter = drafter_over(TreeRunner())
    chain = answers(drafter, [tree_ask([1, 2], length=3, max_nodes=0, sampling=SEEDED)])["r"]
    tree = answers(drafter, [tree_ask([1, 2], length=3, max_nodes=12, sampling=SEEDED, ask_id=2)])["r"]
    node = ROOT
    for token_id in chain.token_ids:
        [node] = [i for i, t in enumerate(tree.token_ids) if t == token_id and tree.parents[i] == node]


def test_sampled_trees_are_drawn_from_honest_rows():
    ask_ = tree_ask([1, 2, 3], length=3, max_nodes=8, sampling=SAMPLED)
    drafter = drafter_over(TreeRunner(), "sampled")
    for ask_id in range(30):
        result = answers(drafter, [dataclasses.replace(ask_, ask_id=ask_id)])["r"]
        assert_rows_are_right(ask_, result)
        assert result.parents == grown_by_hand(ask_, TreeConfig(method="sampled", branching=3)).chosen().parents


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_the_sampled_method_draws_nothing_without_need(sampling: DraftSampling):
    ask_ = tree_ask([1, 2, 3], length=3, max_nodes=8, sampling=sampling)
    found = [answers(drafter_over(TreeRunner(), method), [ask_])["r"] for method in ("sampled", "top_k")]
    assert found[0] == found[1]


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])  # full attention, and a window of 8
def test_trees_of_a_real_model_are_those_of_its_whole_sequences(architecture: str, tmp_path):
    model = make_model(architecture)
    drafter = model_drafter(load(model, tmp_path), torch.Generator().manual_seed(0))
    [prompt] = random_sequences((21,))
    ask_ = tree_ask(prompt, length=3, max_nodes=10)
    result = answers(drafter, [ask_, tree_ask(prompt[:9], length=4, max_nodes=0, name="chain", ask_id=2)], 16)["r"]
    trees = TreeConfig()
    expected = grown_by_hand(ask_, trees, lambda context: full_logits(model, context)[-1], model.config.vocab_size)
    assert result.token_ids == expected.chosen().token_ids
    assert result.parents == expected.chosen().parents


def test_chains_and_trees_share_every_forward():
    runner = TreeRunner()
    asks = [
        tree_ask([1, 2], length=3, max_nodes=0, name="chain"),
        tree_ask([3, 4], length=3, max_nodes=6, name="tree"),
    ]
    found = answers(drafter_over(runner), asks)
    assert len(runner.batches) == 3
    for each in asks:
        assert_point_masses_are_right(each, found[each.key.request_id], TreeConfig(branching=3))


def test_confidences_of_a_drawn_chain_do_not_depend_on_the_draw():
    drafter = drafter_over(TreeRunner())
    firsts = [
        answers(drafter, [tree_ask([1, 2], length=1, max_nodes=0, sampling=SAMPLED, ask_id=n)])["r"] for n in range(40)
    ]
    assert len({result.token_ids for result in firsts}) > 1
    [confidence] = {result.confidences for result in firsts}
    assert confidence == pytest.approx([float(logits_after([1, 2]).softmax(0).max())], abs=1e-4)


@pytest.mark.parametrize("max_nodes", [0, 7])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_forced_tokens_lead_and_the_model_goes_on_after_them(max_nodes: int, sampling: DraftSampling):
    runner = TreeRunner()
    drafter = drafter_over(runner, "sampled")
    ask_ = tree_ask([1, 2], length=4, max_nodes=max_nodes, sampling=sampling, forced_ids=(9, 8))
    result = answers(drafter, [ask_])["r"]
    assert result.token_ids[:2] == (9, 8)
    assert runner.batches[0].num_tokens == 4, "prompt and forced tokens in one go"
    if sampling is SAMPLED:
        assert_rows_are_right(ask_, result)
        assert result.draft_probs[:2] == tuple(
            SparseRow(token_ids=(token,), weights=(DRAFT_PROB_SCALE,)) for token in (9, 8)
        )
    else:
        assert_point_masses_are_right(ask_, result, TreeConfig(method="sampled", branching=3))


def test_a_draft_forced_from_end_to_end_needs_no_forward():
    runner = TreeRunner()
    forced = tree_ask([1, 2], length=2, max_nodes=0, forced_ids=(9, 8, 7))
    found = answers(drafter_over(runner), [forced])
    assert (found["r"].token_ids, runner.batches) == ((9, 8), [])
    unknown = tree_ask([1, 2], length=2, max_nodes=0, forced_ids=(9, 99))
    assert_point_masses_are_right(unknown, answers(drafter_over(runner), [unknown])["r"], TreeConfig())


def test_a_tree_that_outgrows_the_pool_stops_at_a_level():
    runner = TreeRunner(num_blocks=2)  # 8 tokens
    ask_ = tree_ask([1, 2, 3, 4, 5], length=4, max_nodes=12)
    drafter = drafter_over(runner)
    result = answers(drafter, [ask_])["r"]
    full = grown_by_hand(dataclasses.replace(ask_, length=2), TreeConfig(branching=3)).chosen()
    assert result.token_ids == full.token_ids, "two levels: six nodes under the first three do not fit"
    never = tree_ask(list(range(9)), length=4, max_nodes=12, ask_id=2)
    assert answers(drafter, [never])["r"].token_ids == ()


def test_trees_need_nothing_but_tokens():
    assert drafter_over(TreeRunner()).needs == DraftNeeds()


def test_options_that_make_no_sense_are_named():
    with pytest.raises(ValueError, match="method"):
        TreeConfig(method="best")
    with pytest.raises(ValueError, match="branching"):
        TreeConfig(branching=0)


@given(st.integers(0, 1 << 30), st.sampled_from([9, 12, 60]), st.sampled_from([6, 64]), st.sampled_from([0, 1]))
def test_mixed_asks_draft_as_each_would_alone(seed: int, num_blocks: int, budget: int, method: int):
    """Commit random prefixes of chains and trees for several sessions, with too few blocks, in too small steps."""
    rng = random.Random(seed)
    trees = TreeConfig(method=("top_k", "sampled")[method], branching=3)
    drafter = drafter_over(TreeRunner(num_blocks=num_blocks, block_size=3, max_model_len=40), trees.method)
    kinds = {"a": GREEDY, "b": SEEDED, "c": SAMPLED}
    known = {name: [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 5))] for name in kinds}
    for round_id in range(3):
        asks = [
            tree_ask(
                list(known[name]),
                length=rng.randint(1, 3),
                max_nodes=rng.choice((0, 5, 6)),
                sampling=kinds[name],
                name=name,
                ask_id=10 * round_id + index,
                forced_ids=tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((0, 0, 1)))),
            )
            for index, name in enumerate(kinds)
        ]
        for name, result in answers(drafter, asks, budget).items():
            ask_ = next(ask_ for ask_ in asks if ask_.key.request_id == name)
            is_drawn = kinds[name] is SAMPLED and (not ask_.max_nodes or method)
            if is_drawn:
                assert_rows_are_right(ask_, result)
            else:
                assert_point_masses_are_right(ask_, result, trees)
            known[name] += [*_a_path(result, rng), rng.randrange(VOCAB_SIZE)]


def _a_path(result: Draft, rng: random.Random) -> list[int]:
    """Return the tokens from the root to some node, or none."""
    parents = result.parents or tuple(range(-1, len(result.token_ids) - 1))
    node, path = rng.randrange(-1, len(result.token_ids)), []
    while node != ROOT:
        path.append(result.token_ids[node])
        node = parents[node]
    return path[::-1]
