from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.drafter_service.engine.drafter import Ask, SessionKey
from outrider.drafter_service.engine.paged_drafter import PagedDrafter
from outrider.drafter_service.engine.tree_growth import TreeConfig
from outrider.drafter_service.head_drafters.head_runner import HeadRunner
from outrider.drafter_service.heads.head_layer import DraftHead
from outrider.drafter_service.heads.switched import SwitchedHeads
from outrider.verifier_service.gpu.transfers import CopyBack
from outrider.verifier_service.messages.draft import FINAL_TAP, ROOT, Draft, DraftSampling, check_draft
from outrider.verifier_service.sampling.coupled_sampler import coupled_choice, gumbel_noise
from tiny.drafters import eagle_drafter
from tiny.heads import VOCAB_SIZE, SlowDrafting, eagle3_head, eagle_head, greedy_chain, mtp_head, states_of
from tiny.played_graphs import played_backend
from tiny.verified import target_probs

GREEDY = DraftSampling(temperature=0.0)
PROMPT = [5, 17, 3, 40, 22, 9, 31]


def drafter_of(*heads: DraftHead, num_blocks: int = 64, **options: Any) -> PagedDrafter[Any]:
    runner = HeadRunner(SwitchedHeads(heads), num_blocks=num_blocks, block_size=4, max_model_len=64)
    return eagle_drafter(runner, torch.Generator().manual_seed(0), **options)


class Sessions:
    """Asks a drafter until it has answered, checking its books after every step."""

    def __init__(self, drafter: PagedDrafter[Any], head: DraftHead) -> None:
        self._drafter, self._head, self._num_asks = drafter, head, 0
        self._keys: set[SessionKey] = set()

    def ask(self, tokens: Sequence[int], length: int, name: str = "r", **fields: object) -> Ask:
        self._num_asks += 1
        key = SessionKey("v", name)
        self._keys.add(key)
        ask = Ask(
            key=key,
            ask_id=self._num_asks,
            token_ids=list(tokens),
            sampling=GREEDY,
            length=length,
            states=states_of(tokens, self._head),
        )
        return replace(ask, **fields)

    def run(self, *asks: Ask, budget: int = 64, max_steps: int = 400) -> list[Draft]:
        """Return the answers in the order of the asks."""
        waiting, results = list(asks), {}
        for _ in range(max_steps):
            for result in self._drafter.draft(waiting, max_num_tokens=budget):
                results[result.round_id] = result
            self._drafter.check_integrity(self._keys)
            waiting = [ask for ask in waiting if ask.ask_id not in results]
            if not waiting:
                return [results[ask.ask_id] for ask in asks]
        raise AssertionError("drafts do not become complete")


def problem_of(result: Draft, length: int, max_nodes: int) -> str | None:
    draft = Draft(
        request_id="r",
        round_id=1,
        position=7,
        token_ids=result.token_ids,
        draft_probs=result.draft_probs,
        parents=result.parents,
        confidences=result.confidences,
    )
    return check_draft(draft, draft_vocab_size=VOCAB_SIZE, max_length=length, max_nodes=max_nodes)


HEADS = {
    "eagle": lambda: eagle_head(),
    "eagle3": lambda: eagle3_head(),
    "eagle3_variants": lambda: eagle3_head(norm_before_residual=True, fc_norm=True, norm_output=True),
    "mtp": lambda: mtp_head(),
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_greedy_chain_is_the_references(kind: str) -> None:
    head = HEADS[kind]()
    sessions = Sessions(drafter_of(head), head)
    (result,) = sessions.run(sessions.ask(PROMPT, 6))
    assert list(result.token_ids) == greedy_chain([head], PROMPT, states_of(PROMPT, head), 6)
    assert result.parents is None
    assert result.draft_probs is None


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


def test_it_asks_for_the_states_its_head_reads() -> None:
    assert drafter_of(eagle3_head()).needs.taps == (1, 3, 4)
    assert drafter_of(eagle_head()).needs.taps == drafter_of(mtp_head()).needs.taps == (FINAL_TAP,)


@pytest.mark.parametrize("budget", [1, 3, 64])
def test_long_prompts_come_in_chunks(budget: int) -> None:
    head = eagle3_head()
    sessions = Sessions(drafter_of(head), head)
    prompt = [(7 * i + 3) % VOCAB_SIZE for i in range(40)]
    (result,) = sessions.run(sessions.ask(prompt, 4), budget=budget)
    assert list(result.token_ids) == greedy_chain([head], prompt, states_of(prompt, head), 4)


@pytest.mark.parametrize("num_accepted", [0, 1, 3, 4])
def test_after_a_verification_the_targets_states_replace_its_own(num_accepted: int) -> None:
    head = eagle3_head()
    runner = HeadRunner(SwitchedHeads([head]), num_blocks=64, block_size=4, max_model_len=64)
    drafter = eagle_drafter(runner, torch.Generator().manual_seed(0))
    sessions = Sessions(drafter, head)
    (first,) = sessions.run(sessions.ask(PROMPT, 4))
    grown = [*PROMPT, *first.token_ids[:num_accepted], 1]
    executed = count_pairs(runner)
    (second,) = sessions.run(sessions.ask(grown, 3))
    assert list(second.token_ids) == greedy_chain([head], grown, states_of(grown, head), 3)
    assert executed[0] == num_accepted + 1, "only pairs that had no state of the target before are computed"


def test_a_chain_is_read_once() -> None:
    reads: list[torch.Tensor] = []

    def read_back(values: torch.Tensor) -> CopyBack:
        reads.append(values)
        return CopyBack(values)

    head = eagle3_head()
    drafter = drafter_of(head, read_back=read_back)
    counts = count_pairs(drafter._forward._runner)
    sessions = Sessions(drafter, head)
    (result,) = drafter.draft([sessions.ask(PROMPT, 4)], max_num_tokens=64)
    assert list(result.token_ids) == greedy_chain([head], PROMPT, states_of(PROMPT, head), 4)
    assert counts == [len(PROMPT) - 1, 1, 1, 1]
    assert len(reads) == 1


def count_pairs(runner: HeadRunner) -> list[int]:
    counts: list[int] = []
    execute = runner.execute

    def counting(batch, *args, **options):
        counts.append(batch.num_tokens)
        return execute(batch, *args, **options)

    runner.execute = counting  # type: ignore[method-assign]
    return counts


def test_asking_again_and_asking_for_another_continuation() -> None:
    head = eagle3_head()
    sessions = Sessions(drafter_of(head), head)
    for tokens in (PROMPT, PROMPT, [*PROMPT[:4], 50, 51], [8, 9], PROMPT):
        (result,) = sessions.run(sessions.ask(tokens, 3))
        assert list(result.token_ids) == greedy_chain([head], tokens, states_of(tokens, head), 3)


def test_a_superseded_ask_leaves_no_trace() -> None:
    head = eagle3_head()
    drafter = drafter_of(head)
    sessions = Sessions(drafter, head)
    tokens = list(PROMPT)
    for max_nodes, num_steps in ((40, 2), (40, 1)):
        abandoned = sessions.ask(tokens, 8, max_nodes=max_nodes)
        for _ in range(num_steps):
            assert drafter.draft([abandoned], max_num_tokens=256) == []
        tokens.append(12)
        (result,) = sessions.run(sessions.ask(tokens, 5))
        assert list(result.token_ids) == greedy_chain([head], tokens, states_of(tokens, head), 5)


@pytest.mark.parametrize("num_blocks", [64, 5])
def test_sessions_share_forwards_and_a_pool_that_is_too_small(num_blocks: int) -> None:
    head = eagle3_head()
    sessions = Sessions(drafter_of(head, num_blocks=num_blocks), head)
    prompts = [[i + 1, 2 * i + 3, 7, i + 9, 11, 13][: 3 + i] for i in range(4)]
    for _ in range(2):
        asks = [sessions.ask(prompt, 3 + i, name=str(i)) for i, prompt in enumerate(prompts)]
        results = sessions.run(*asks)
        for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
            assert list(result.token_ids) == greedy_chain([head], prompt, states_of(prompt, head), 3 + i)
        prompts = [[*prompt, 20 + i] for i, prompt in enumerate(prompts)]


def test_what_never_fits_is_answered_by_an_empty_draft() -> None:
    head = eagle3_head()
    sessions = Sessions(drafter_of(head, num_blocks=2), head)
    (too_long, fits) = sessions.run(sessions.ask(list(range(20)), 3, name="long"), sessions.ask([1, 2, 3], 3))
    assert too_long.token_ids == ()
    assert len(fits.token_ids) == 3


@pytest.mark.parametrize("max_nodes", [0, 6])
def test_without_states_there_is_no_draft(max_nodes: int) -> None:
    head = eagle3_head()
    sessions = Sessions(drafter_of(head), head)
    width = head.state_size
    missing = torch.full((len(PROMPT) - 1, width), float("nan"))
    unusable = [None, torch.zeros(0, width), missing, torch.zeros(len(PROMPT) - 1, width - 1)]
    for states in unusable:
        (result,) = sessions.run(sessions.ask(PROMPT, 3, states=states, max_nodes=max_nodes))
        assert result.token_ids == ()
    (result,) = sessions.run(sessions.ask([4], 3))
    assert result.token_ids == (), "the only token's state does not exist yet"


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


def test_a_seeded_chain_is_what_its_law_gives_under_the_shared_noise() -> None:
    head = eagle3_head()
    sessions = Sessions(drafter_of(head), head)
    sampling = DraftSampling(temperature=0.9, seed=1234, choice_index=1)
    (result,) = sessions.run(sessions.ask(PROMPT, 5, sampling=sampling))
    drafting = SlowDrafting([head], PROMPT, states_of(PROMPT, head))
    for depth, token_id in enumerate(result.token_ids):
        noise = gumbel_noise(1234, 1, torch.tensor([len(PROMPT) + depth]), VOCAB_SIZE, "cpu")
        assert token_id == int(coupled_choice(target_probs(drafting.logits[None], [sampling]), noise))
        drafting.step(token_id, drafting.feedback, len(PROMPT) - 1 + depth)
    assert result.draft_probs is None


def test_a_sampled_chain_comes_with_the_rows_it_was_drawn_from_in_the_targets_ids() -> None:
    head = eagle3_head()
    sessions = Sessions(drafter_of(head, top_n=8), head)
    sampling = DraftSampling(temperature=1.0)
    drafting = SlowDrafting([head], PROMPT, states_of(PROMPT, head))
    results = [sessions.run(sessions.ask(PROMPT, 3, sampling=sampling))[0] for _ in range(100)]
    assert head.target_ids is not None
    for result in results:
        assert problem_of(result, 3, 0) is None
        assert all(set(row.token_ids) <= set(head.target_ids.tolist()) for row in result.draft_probs)
    first = results[0].draft_probs[0]
    assert all(result.draft_probs[0] == first for result in results)
    law = drafting.logits.softmax(dim=0)
    expected = law[list(first.token_ids)] / law[list(first.token_ids)].sum()
    torch.testing.assert_close(torch.tensor(first.weights) / 65536, expected, atol=1e-4, rtol=0.0)
    shares = [sum(result.token_ids[0] == id_ for result in results) / 100 for id_ in first.token_ids]
    torch.testing.assert_close(torch.tensor(shares), expected, atol=0.16, rtol=0.0)


def test_ids_beyond_the_targets_vocabulary_are_never_drafted() -> None:
    head = mtp_head()
    drafter = drafter_of(head, vocab_size=10)
    sessions = Sessions(drafter, head)
    for max_nodes in (0, 8):
        (result,) = sessions.run(sessions.ask(PROMPT, 6, max_nodes=max_nodes))
        assert 0 <= max(result.token_ids) < 10


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
    assert problem_of(result, length, max_nodes) is None


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


@pytest.mark.parametrize("budget", [1, 8, 20])
def test_a_small_budget_makes_small_trees_but_always_answers(budget: int) -> None:
    head = eagle3_head()
    sessions = Sessions(drafter_of(head, trees=TreeConfig(branching=4)), head)
    asks = [sessions.ask(PROMPT, 4, name=name, max_nodes=30) for name in "abc"]
    for result in sessions.run(*asks, budget=budget):
        assert 1 <= len(result.token_ids) <= 30
        paths_of(result)


def test_a_seeded_tree_tries_what_the_shared_noise_favours_first() -> None:
    head = eagle3_head()
    sessions = Sessions(drafter_of(head, trees=TreeConfig(branching=4)), head)
    for seed in range(6):
        sampling = DraftSampling(temperature=1.0, seed=seed)
        chain, tree = sessions.run(
            sessions.ask(PROMPT, 3, name="chain", sampling=sampling),
            sessions.ask(PROMPT, 3, name="tree", sampling=sampling, max_nodes=60),
            budget=256,
        )
        paths = paths_of(tree)
        children = [path[0] for path in paths if len(path) == 1]
        assert children[0] == chain.token_ids[0], "the first child is what a coupled chain would draft"
        assert tuple(chain.token_ids) in paths
        assert tree.draft_probs is None


def test_trees_fit_a_pool_that_holds_few_of_them() -> None:
    head = eagle3_head()
    sessions = Sessions(drafter_of(head, num_blocks=6, trees=TreeConfig(branching=3)), head)
    asks = [sessions.ask(PROMPT, 4, name=name, max_nodes=9) for name in "abcd"]
    results = sessions.run(*asks, budget=256)
    assert all(paths_of(result).keys() == slow_tree(head, PROMPT, 4, 9, width=3).keys() for result in results)


def reference_after(head: DraftHead, path: Sequence[int]) -> SlowDrafting:
    """Return the reference after some drafted tokens."""
    drafting = SlowDrafting([head], PROMPT, states_of(PROMPT, head))
    for depth, token_id in enumerate(path):
        drafting.step(token_id, drafting.feedback, len(PROMPT) - 1 + depth)
    return drafting


def test_a_sampled_tree_comes_with_a_row_for_each_parent() -> None:
    head = eagle3_head()
    drafter = drafter_of(head, trees=TreeConfig(method="sampled", branching=3), top_n=6)
    sessions = Sessions(drafter, head)
    (result,) = sessions.run(sessions.ask(PROMPT, 3, sampling=DraftSampling(temperature=1.0), max_nodes=9))
    assert problem_of(result, 3, 9) is None
    assert result.parents is not None
    assert result.draft_probs is not None
    paths = list(paths_of(result))
    parents = [() if parent == ROOT else paths[parent] for parent in dict.fromkeys(result.parents)]
    assert len(parents) > 2
    for path, row in zip(parents, result.draft_probs, strict=True):
        law = reference_after(head, path).logits.softmax(dim=0)[list(row.token_ids)]
        torch.testing.assert_close(torch.tensor(row.weights) / 65536, law / law.sum(), atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("max_nodes", [0, 12])
def test_forced_tokens_come_first_and_the_head_goes_on_from_them(max_nodes: int) -> None:
    head = eagle3_head()
    sessions = Sessions(drafter_of(head), head)
    forced = (50, 4, 27)
    (result,) = sessions.run(sessions.ask(PROMPT, 5, forced_ids=forced, max_nodes=max_nodes))
    assert result.token_ids[:3] == forced
    assert result.token_ids[3] == int(reference_after(head, forced).logits.argmax())
    assert problem_of(result, 5, max_nodes) is None
    (result,) = sessions.run(sessions.ask(PROMPT, 2, forced_ids=forced, max_nodes=max_nodes))
    assert result.token_ids == forced[:2]


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


def test_each_position_of_a_draft_has_its_own_parameters() -> None:
    heads = [eagle3_head(seed) for seed in (1, 2, 3)]
    sessions = Sessions(drafter_of(*heads), heads[0])
    for tokens in (PROMPT, [*PROMPT, 44]):
        (result,) = sessions.run(sessions.ask(tokens, 6))
        expected = greedy_chain(heads, tokens, states_of(tokens, heads[0]), 6)
        assert list(result.token_ids) == expected
        assert expected != greedy_chain(heads[:1], tokens, states_of(tokens, heads[0]), 6)


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


def test_released_sessions_give_everything_back() -> None:
    head = eagle3_head()
    drafter = drafter_of(head)
    sessions = Sessions(drafter, head)
    sessions.run(sessions.ask(PROMPT, 3, name="a"), sessions.ask(PROMPT, 3, name="b", max_nodes=9))
    with pytest.raises(AssertionError, match="session that is gone"):
        drafter.check_integrity([])
    for name in "ab":
        drafter.release(SessionKey("v", name))
    drafter.check_integrity([])


@pytest.mark.parametrize("make", [eagle_head, eagle3_head])
def test_a_session_that_loses_its_kv_does_not_begin_in_states_that_are_gone(make: Callable[[], DraftHead]):
    """Said again without its first states it keeps what it had of them, until an older ask takes its KV."""
    head = make()
    drafter = drafter_of(head, num_blocks=10)
    sessions = Sessions(drafter, head)
    short, long = [*PROMPT, 8, 30], [(7 * index) % 50 + 2 for index in range(36)]
    (expected,) = sessions.run(sessions.ask(short, 3, "clean"))
    drafter.release(SessionKey("v", "clean"))
    sessions.run(sessions.ask(short, 3, "gap"))
    older = sessions.ask(long, 3, "older")
    sessions.run(older, sessions.ask(short, 3, "gap", states=states_of(short, head, 6)))
    for name in ("gap", "older"):
        drafter.release(SessionKey("v", name))
    assert sessions.run(sessions.ask(short, 3, "clean"))[0].token_ids == expected.token_ids


@pytest.mark.parametrize("make", [eagle_head, eagle3_head])
@pytest.mark.parametrize("scale", [1e5, 3e8])
def test_states_that_overflow_spoil_no_other_session(make: Callable[[], DraftHead], scale: float):
    """Freed blocks go to the next session; half precision ends at 65504."""
    head = make().to(torch.float16)
    drafter = drafter_of(head, num_blocks=8)
    sessions = Sessions(drafter, head)
    (expected,) = sessions.run(sessions.ask(PROMPT, 4, "clean"))
    drafter.release(SessionKey("v", "clean"))
    sessions.run(sessions.ask(PROMPT, 4, "bad", states=scale * states_of(PROMPT, head).float()))
    drafter.release(SessionKey("v", "bad"))
    (after,) = sessions.run(sessions.ask(PROMPT, 4, "clean"))
    assert problem_of(after, 4, 0) is None
    assert after.token_ids == expected.token_ids
