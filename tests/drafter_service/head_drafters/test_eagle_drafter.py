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
from tiny.heads import VOCAB_SIZE, SlowDrafting, eagle3_head, eagle_head, greedy_chain, mtp_head, states_of
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


def slow_tree(
    head: DraftHead, tokens: Sequence[int], length: int, max_nodes: int, width: int
) -> dict[tuple[int, ...], float]:
    """Return the best paths by score: every level's best expanded, nothing pruned, nothing batched."""
    beam = max(width, -(-max_nodes // length))
    root = SlowDrafting([head], tokens, states_of(tokens, head))
    scores: dict[tuple[int, ...], float] = {}
    level: list[tuple[tuple[int, ...], float, SlowDrafting]] = [((), 1.0, root)]
    for depth in range(length):
        added = []
        for path, score, drafting in level:
            values, ids = drafting.logits.softmax(dim=0).topk(width)
            for value, token_id in zip(values.tolist(), ids.tolist(), strict=True):
                scores[*path, token_id] = score * value
                added.append(((*path, token_id), score * value, drafting))
        level = []
        for path, score, parent in sorted(added, key=lambda item: -item[1])[:beam]:
            drafting = parent.copy()
            drafting.step(path[-1], parent.feedback, len(tokens) - 1 + depth)
            level.append((path, score, drafting))
    best = sorted(scores.items(), key=lambda item: -item[1])[:max_nodes]
    return dict(best)


def paths_of(result: Draft) -> dict[tuple[int, ...], float]:
    assert result.parents is not None
    assert result.confidences is not None
    paths: list[tuple[int, ...]] = []
    scores: dict[tuple[int, ...], float] = {}
    for token_id, parent, confidence in zip(result.token_ids, result.parents, result.confidences, strict=True):
        above = () if parent == ROOT else paths[parent]
        paths.append((*above, token_id))
        scores[paths[-1]] = confidence * scores.get(above, 1.0)
    assert len(set(paths)) == len(paths), "a node twice"
    return scores


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(("length", "max_nodes"), [(1, 4), (4, 12), (3, 40), (5, 5)])
def test_a_tree_holds_the_best_paths_of_the_reference(kind: str, length: int, max_nodes: int) -> None:
    head = HEADS[kind]()
    sessions = Sessions(drafter_of(head, trees=TreeConfig(branching=4)), head)
    (result,) = sessions.run(sessions.ask(PROMPT, length, max_nodes=max_nodes), budget=256)
    expected = slow_tree(head, PROMPT, length, max_nodes, width=4)
    found = paths_of(result)
    assert found.keys() == expected.keys()
    for path, score in expected.items():
        assert found[path] == pytest.approx(score, abs=1e-5)


def test_trees_and_chains_of_several_sessions_share_forwards_and_leave_their_kv_alone() -> None:
    head = eagle3_head()
    sessions = Sessions(drafter_of(head, trees=TreeConfig(branching=4)), head)
    prompts = [PROMPT, [3, 1, 4, 1, 5], [*range(20, 40)]]
    for round_ in range(3):
        asks = [sessions.ask(prompt, 3, name=str(i), max_nodes=10 * (i != 1)) for i, prompt in enumerate(prompts)]
        tree, chain, late = sessions.run(*asks, budget=256)
        assert paths_of(tree).keys() == slow_tree(head, prompts[0], 3, 10, width=4).keys()
        assert list(chain.token_ids) == greedy_chain([head], prompts[1], states_of(prompts[1], head), 3)
        assert paths_of(late).keys() == slow_tree(head, prompts[2], 3, 10, width=4).keys()
        results = (tree, chain, late)
        prompts = [[*prompt, *result.token_ids[:1], round_] for prompt, result in zip(prompts, results, strict=True)]


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
