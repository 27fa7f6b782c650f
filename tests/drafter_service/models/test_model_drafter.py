from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exactness.small_engines import load
from fakes.drafter_play import DRAWN, GREEDY, SEEDED, ask_of, drafts_of, key
from fakes.runner import FakeRunner, NoisyRunner, continuation, noisy_row
from outrider.drafter_service.engine.drafter import Ask
from outrider.drafter_service.engine.kv_budget import num_common, share_budget
from outrider.drafter_service.engine.paged_drafter import PagedDrafter
from outrider.drafter_service.engine.tree_growth import TreeConfig
from outrider.verifier_service.gpu.transfers import CopyBack
from outrider.verifier_service.messages.draft import (
    ROOT,
    Draft,
    DraftSampling,
)
from tiny.drafters import model_drafter
from tiny.drafting.methods import CASES, grown_by_hand, require_rows
from tiny.models import full_logits, make_model, random_sequences


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_catching_up_and_drafting_are_one_batch():
    runner = FakeRunner()
    drafting, late = ask_of([1], length=6), ask_of(list(range(20)), length=1, key=key("late"))
    for ask, draft in zip(
        (drafting, late), drafts_of(model_drafter(runner, generator()), drafting, late, budget=8), strict=True
    ):
        assert draft.token_ids == continuation(ask.token_ids, ask.length, runner.vocab_size)
    assert [batch.query_lengths for batch in runner.batches] == [[1, 7], [1, 7], [1, 6], *[[1]] * 3]


def test_of_another_text_only_what_differs_is_computed():
    runner = FakeRunner()
    drafter = model_drafter(runner, generator())
    drafts_of(drafter, ask_of([1, 2, 3, 4, 5, 6], length=2))
    runner.batches.clear()
    (draft,) = drafts_of(drafter, ask_of([1, 2, 3, 9, 9], length=2, ask_id=2))
    assert draft.token_ids == continuation([1, 2, 3, 9, 9], 2, runner.vocab_size)
    assert runner.batches[0].num_tokens == 2


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
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
    runner = tree_runner()
    drafter = model_drafter(runner, generator(), read_back=read_back)
    (*found,) = drafter.draft(asks, max_num_tokens=64)
    assert [len(result.token_ids) for result in found] == [5, 3, 1]
    assert len(reads) == 1
    assert [batch.num_tokens for batch in runner.batches] == [9, 2, 2, 1, 1]
    drafter.check_integrity({ask.key for ask in asks})
    tree = tree_ask([7, 8], length=5, max_nodes=6, name="tree")
    beside = answers(drafter_over(tree_runner()), [*asks, tree])
    for ask_, result in zip(asks, found, strict=True):
        if sampling.temperature:
            assert_rows_are_right(ask_, result)
        else:
            assert beside[ask_.key.request_id].token_ids == result.token_ids


def test_a_chain_goes_level_by_level_where_the_pool_has_no_room_for_all_of_it():
    runner = tree_runner(num_blocks=2, block_size=4)
    drafter = drafter_over(runner)
    ask_ = tree_ask([1, 2, 3, 4, 5, 6], length=3, max_nodes=0)
    result = answers(drafter, [ask_])["r"]
    assert_point_masses_are_right(ask_, result, TreeConfig(branching=1))
    assert len(runner.batches) == 3
    drafter.release(ask_.key)
    other = tree_ask([1, 2, 3, 4, 5, 6, 7, 8], length=3, max_nodes=0, name="s")  # computes up to a tenth token
    assert answers(drafter, [other])["s"].token_ids == ()


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


def logits_after(context: Sequence[int]) -> torch.Tensor:
    """Return what the noisy model says after a whole context: float32 [VOCAB_SIZE]."""
    return noisy_row(context, VOCAB_SIZE)


def tree_runner(**sizes: int) -> NoisyRunner:
    return NoisyRunner(vocab_size=VOCAB_SIZE, **sizes)


def drafter_over(runner: NoisyRunner, method: str = "top_k", branching: int = 3) -> PagedDrafter[Any]:
    trees = TreeConfig(method=method, branching=branching)
    return model_drafter(runner, generator(), trees=trees)


def tree_ask(tokens: Sequence[int], *, length: int, max_nodes: int, name: str = "r", **more: Any) -> Ask:
    return ask_of(tokens, length=length, max_nodes=max_nodes, key=key(name), **more)


def answers(drafter: PagedDrafter[Any], asks: Sequence[Ask], budget: int = 64) -> dict[str, Draft]:
    return {draft.request_id: draft for draft in drafts_of(drafter, *asks, budget=budget)}


def assert_point_masses_are_right(ask: Ask, result: Draft, trees: TreeConfig) -> None:
    expected = grown_by_hand(ask, trees, logits_after, VOCAB_SIZE).chosen()
    assert result.token_ids == expected.token_ids
    assert result.parents == (expected.parents if ask.max_nodes else None)
    assert result.confidences == pytest.approx(expected.confidences, abs=1e-6)
    assert result.draft_probs is None


def assert_rows_are_right(ask: Ask, result: Draft) -> None:
    require_rows(replace(CASES["draft_model"], top_n=32), ask, result, VOCAB_SIZE)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])  # full attention, and a window of 8
def test_trees_of_a_real_model_are_those_of_its_whole_sequences(architecture: str, tmp_path):
    model = make_model(architecture)
    drafter = model_drafter(load(model, tmp_path), generator())
    [prompt] = random_sequences((21,))
    ask_ = tree_ask(prompt, length=3, max_nodes=10)
    result = answers(drafter, [ask_, tree_ask(prompt[:9], length=4, max_nodes=0, name="chain", ask_id=2)], 16)["r"]
    trees = TreeConfig()
    expected = grown_by_hand(ask_, trees, lambda context: full_logits(model, context)[-1], model.config.vocab_size)
    assert result.token_ids == expected.chosen().token_ids
    assert result.parents == expected.chosen().parents


def test_a_draft_forced_from_end_to_end_needs_no_forward():
    runner = tree_runner()
    forced = tree_ask([1, 2], length=2, max_nodes=0, forced_ids=(9, 8, 7))
    found = answers(drafter_over(runner), [forced])
    assert (found["r"].token_ids, runner.batches) == ((9, 8), [])
    unknown = tree_ask([1, 2], length=2, max_nodes=0, forced_ids=(9, 99))
    assert_point_masses_are_right(unknown, answers(drafter_over(runner), [unknown])["r"], TreeConfig())


def test_a_tree_that_outgrows_the_pool_stops_at_a_level():
    runner = tree_runner(num_blocks=2)  # 8 tokens
    ask_ = tree_ask([1, 2, 3, 4, 5], length=4, max_nodes=12)
    drafter = drafter_over(runner)
    result = answers(drafter, [ask_])["r"]
    full = grown_by_hand(replace(ask_, length=2), TreeConfig(branching=3), logits_after, VOCAB_SIZE).chosen()
    assert result.token_ids == full.token_ids, "two levels: six nodes under the first three do not fit"
    never = tree_ask(list(range(9)), length=4, max_nodes=12, ask_id=2)
    assert answers(drafter, [never])["r"].token_ids == ()


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
    drafter = drafter_over(tree_runner(num_blocks=num_blocks, block_size=3, max_model_len=40), trees.method)
    kinds = {"a": GREEDY, "b": SEEDED, "c": DRAWN}
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
            is_drawn = kinds[name] is DRAWN and (not ask_.max_nodes or method)
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
