from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fakes.drafter_play import ask_of, drafts_of, key, require_valid
from outrider.drafter_service.engine.drafter import Ask
from outrider.drafter_service.engine.paged_drafter import PagedDrafter
from outrider.drafter_service.engine.tree_growth import TreeConfig
from outrider.drafter_service.head_drafters.head_runner import HeadRunner
from outrider.drafter_service.heads.head_layer import DraftHead
from outrider.drafter_service.heads.switched import SwitchedHeads
from outrider.verifier_service.messages.draft import ROOT, Draft
from tiny.drafters import eagle_drafter
from tiny.heads import VOCAB_SIZE, eagle3_head, eagle_head, greedy_chain, mtp_head, states_of
from tiny.played_graphs import played_backend

PROMPT = [5, 17, 3, 40, 22, 9, 31]


def drafter_of(*heads: DraftHead, num_blocks: int = 64, **options: Any) -> PagedDrafter[Any]:
    runner = HeadRunner(SwitchedHeads(heads), num_blocks=num_blocks, block_size=4, max_model_len=64)
    return eagle_drafter(runner, torch.Generator().manual_seed(0), **options)


class Sessions:
    """Asks a drafter over a head, with the target's states."""

    def __init__(self, drafter: PagedDrafter[Any], head: DraftHead) -> None:
        self._drafter, self._head, self._ask_ids = drafter, head, itertools.count(1)

    def ask(self, tokens: Sequence[int], length: int, name: str = "r", **fields: object) -> Ask:
        states = states_of(tokens, self._head)
        return ask_of(
            list(tokens), length=length, **{"key": key(name), "ask_id": next(self._ask_ids), "states": states, **fields}
        )

    def run(self, *asks: Ask, budget: int = 64) -> list[Draft]:
        drafts = drafts_of(self._drafter, *asks, budget=budget)
        for ask, draft in zip(asks, drafts, strict=True):
            require_valid(ask, draft, VOCAB_SIZE)
        return drafts


HEADS = {
    "eagle": lambda: eagle_head(),
    "eagle3": lambda: eagle3_head(),
    "eagle3_variants": lambda: eagle3_head(norm_before_residual=True, fc_norm=True, norm_output=True),
    "mtp": lambda: mtp_head(),
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_captured_head_drafts_what_an_eager_one_does(kind: str) -> None:
    """Chains and trees side by side, and again after more tokens: a played graph for every step."""
    head = HEADS[kind]()
    runner = HeadRunner(SwitchedHeads([head]), num_blocks=64, block_size=4, max_model_len=64, backend=played_backend())
    answers = []
    for drafter in (drafter_of(head), eagle_drafter(runner, torch.Generator().manual_seed(0))):
        sessions = Sessions(drafter, head)
        first = sessions.run(sessions.ask(PROMPT, 4), sessions.ask(PROMPT[::-1], 3, "tree", max_nodes=8))
        tokens = [*PROMPT, *first[0].token_ids[:2], 12]
        answers.append([*first, *sessions.run(sessions.ask(tokens, 4), sessions.ask(PROMPT[::-1], 2, "tree"))])
    for eager, captured in zip(*answers, strict=True):
        assert (captured.token_ids, captured.parents) == (eager.token_ids, eager.parents)
    assert runner.graph_counts.num_replayed > 5
    assert not runner.graph_counts.eager


def test_it_starts_after_a_gap_and_goes_on_from_there() -> None:
    head = eagle3_head()
    sessions = Sessions(drafter_of(head), head)
    for tokens in (PROMPT, [*PROMPT, 33, 34, 35]):
        states = states_of(tokens, head, first=3)
        (result,) = sessions.run(sessions.ask(tokens, 4, states=states))
        assert list(result.token_ids) == greedy_chain([head], tokens, states, 4)
    whole = states_of(PROMPT, head)
    assert greedy_chain([head], PROMPT, whole, 4) != greedy_chain([head], PROMPT, states_of(PROMPT, head, first=3), 4)


def test_a_session_whose_first_states_went_missing_later_keeps_its_kv() -> None:
    head = eagle3_head()
    sessions = Sessions(drafter_of(head), head)
    sessions.run(sessions.ask(PROMPT, 2))
    tokens = [*PROMPT, 33]
    (result,) = sessions.run(sessions.ask(tokens, 4, states=states_of(tokens, head, first=3)))
    assert list(result.token_ids) == greedy_chain([head], tokens, states_of(tokens, head), 4)
    tokens = [*PROMPT, 33, 34, 35, 36]
    behind = states_of(tokens, head, first=9)  # beyond what is kept: begin again
    (result,) = sessions.run(sessions.ask(tokens, 4, states=behind))
    assert list(result.token_ids) == greedy_chain([head], tokens, behind, 4)


@pytest.mark.parametrize("num_known", [1, 3, 5])
def test_states_that_are_late_are_bridged_by_its_own(num_known: int) -> None:
    head = eagle3_head()
    sessions = Sessions(drafter_of(head), head)
    known = states_of(PROMPT, head)[:num_known]
    (result,) = sessions.run(sessions.ask(PROMPT, 4, states=known))
    assert list(result.token_ids) == greedy_chain([head], PROMPT, known, 4)
    (result,) = sessions.run(sessions.ask(PROMPT, 4))  # now they are all here: nothing of its own is kept
    assert list(result.token_ids) == greedy_chain([head], PROMPT, states_of(PROMPT, head), 4)


# trees


def test_a_draft_that_lost_its_kv_half_way_goes_on_as_if_nothing_had_been() -> None:
    """An older ask takes the pool; the younger one's stem and committed pairs are computed again."""
    head = eagle3_head()
    for max_nodes, forced in ((8, (50,)), (8, ())):
        drafter = drafter_of(head, num_blocks=4, trees=TreeConfig(branching=2))
        sessions = Sessions(drafter, head)
        older = sessions.ask([1, 2, 3], 2, name="older")
        drafter.draft([older], max_num_tokens=64)
        young = sessions.ask(PROMPT, 4, name="young", max_nodes=max_nodes, forced_ids=forced)
        for _ in range(3):
            assert drafter.draft([young], max_num_tokens=64) == []
        tokens = [*range(14)]
        older = sessions.ask(tokens, 2, name="older")
        drafter.draft([older, young], max_num_tokens=64)
        taken, result = sessions.run(older, young)
        assert list(taken.token_ids) == greedy_chain([head], tokens, states_of(tokens, head), 2)
        alone = Sessions(drafter_of(head, trees=TreeConfig(branching=2)), head)
        (expected,) = alone.run(alone.ask(PROMPT, 4, max_nodes=max_nodes, forced_ids=forced))
        assert (result.token_ids, result.parents) == (expected.token_ids, expected.parents)


def test_a_draft_whose_kv_was_just_taken_waits_though_there_is_room_for_its_next_pair() -> None:
    head = eagle3_head()
    older_tokens = [(5 * i + 2) % VOCAB_SIZE for i in range(17)]  # 16 pairs: four blocks, the fifth is the young one's
    for max_nodes in (0, 6):
        sessions = Sessions(drafter_of(head, num_blocks=6), head)
        older = sessions.ask(older_tokens, 4, name="older")
        young = sessions.ask(PROMPT, 6, name="young", max_nodes=max_nodes)
        first, second = sessions.run(older, young)
        assert list(first.token_ids) == greedy_chain([head], older_tokens, states_of(older_tokens, head), 4)
        alone = Sessions(drafter_of(head), head)
        (expected,) = alone.run(alone.ask(PROMPT, 6, max_nodes=max_nodes))
        assert second.token_ids == expected.token_ids
        if max_nodes == 0:
            assert list(second.token_ids) == greedy_chain([head], PROMPT, states_of(PROMPT, head), 6)


# parameter switching


def test_switched_sessions_at_different_positions_advance_together() -> None:
    heads = [eagle3_head(seed) for seed in (1, 2)]
    drafter = drafter_of(*heads)
    sessions = Sessions(drafter, heads[0])
    early = sessions.ask(PROMPT, 5, name="early")
    assert drafter.draft([early], max_num_tokens=64) == []
    late = sessions.ask([9, 8, 7], 5, name="late")
    results = sessions.run(early, late)
    for tokens, result in zip((PROMPT, [9, 8, 7]), results, strict=True):
        assert list(result.token_ids) == greedy_chain(heads, tokens, states_of(tokens, heads[0]), 5)


def test_switched_heads_answer_a_tree_ask_with_a_chain() -> None:
    heads = [eagle3_head(seed) for seed in (1, 2)]
    sessions = Sessions(drafter_of(*heads), heads[0])
    (result,) = sessions.run(sessions.ask(PROMPT, 5, max_nodes=3))
    assert result.parents == (ROOT, 0, 1)
    assert list(result.token_ids) == greedy_chain(heads, PROMPT, states_of(PROMPT, heads[0]), 3)


@pytest.mark.parametrize("make", [eagle_head, eagle3_head])
def test_a_session_that_loses_its_kv_does_not_begin_in_states_that_are_gone(make: Callable[[], DraftHead]):
    """Said again without its first states it keeps what it had of them, until an older ask takes its KV."""
    head = make()
    drafter = drafter_of(head, num_blocks=10)
    sessions = Sessions(drafter, head)
    short, long = [*PROMPT, 8, 30], [(7 * index) % 50 + 2 for index in range(36)]
    (expected,) = sessions.run(sessions.ask(short, 3, "clean"))
    drafter.release(key("clean"))
    sessions.run(sessions.ask(short, 3, "gap"))
    older = sessions.ask(long, 3, "older")
    sessions.run(older, sessions.ask(short, 3, "gap", states=states_of(short, head, 6)))
    for name in ("gap", "older"):
        drafter.release(key(name))
    assert sessions.run(sessions.ask(short, 3, "clean"))[0].token_ids == expected.token_ids


@pytest.mark.parametrize("make", [eagle_head, eagle3_head])
@pytest.mark.parametrize("scale", [1e5, 3e8])
def test_states_that_overflow_spoil_no_other_session(make: Callable[[], DraftHead], scale: float):
    """Freed blocks go to the next session; half precision ends at 65504."""
    head = make().to(torch.float16)
    drafter = drafter_of(head, num_blocks=8)
    sessions = Sessions(drafter, head)
    (expected,) = sessions.run(sessions.ask(PROMPT, 4, "clean"))
    drafter.release(key("clean"))
    sessions.run(sessions.ask(PROMPT, 4, "bad", states=scale * states_of(PROMPT, head).float()))
    drafter.release(key("bad"))
    (after,) = sessions.run(sessions.ask(PROMPT, 4, "clean"))
    assert after.token_ids == expected.token_ids
