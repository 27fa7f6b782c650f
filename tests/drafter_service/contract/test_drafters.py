"""What every drafter promises, by every method: `tests/tiny/drafting/methods.py` has the methods and their laws."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fakes.drafter_play import DRAWN, GREEDY, SEEDED, draft_of, drafts_of, key, paths_of, require_valid
from outrider.drafter_service.engine.drafter import Ask
from outrider.drafter_service.engine.tree_growth import TreeConfig
from outrider.verifier_service.messages.draft import (
    DRAFT_PROB_SCALE,
    Draft,
    DraftNeeds,
    DraftSampling,
    SparseRow,
)
from outrider.verifier_service.sampling.coupled_sampler import coupled_choice, gumbel_noise
from tiny.drafting.methods import CASES, WIDE, Case, grown_by_hand, probs_after, require_rows

SAMPLED = DraftSampling(temperature=0.9, top_p=0.95)
MODES = [pytest.param(mode, id=name) for name, mode in (("greedy", GREEDY), ("seeded", SEEDED), ("drawn", SAMPLED))]
FLAT = DraftSampling(temperature=3.0)
DRAWN_TREES = TreeConfig(method="sampled", branching=3)


def of(condition: Callable[[Case], object] = lambda case: True) -> Any:
    """Run a test for every method of a kind."""
    found = {name: case for name, case in CASES.items() if condition(case)}
    return pytest.mark.parametrize("case", found.values(), ids=found.keys())


def has_law(case: Case) -> bool:
    return case.law is not None


def holds_text(case: Case) -> bool:
    """Whether sessions can be of any text; the target's own are those of its engine."""
    return case.law is not None and (case.keeps_sessions or case.states is not None)


def limits_ids(case: Case) -> bool:
    """Whether there are ids that the target may lack; of shared tokens it lacks none."""
    if case is CASES["draft_model in shared tokens"]:
        return False
    return holds_text(case) or case is CASES["draft_model by text"]


# --- the law ---


def expected_token(case: Case, ask: Ask, path: Sequence[int], vocab_size: int) -> int:
    """Return the likeliest token after a drafted path, with a seed that under the target's own noise."""
    probs, sampling = probs_after(case, ask, path, vocab_size), ask.sampling
    if sampling.seed is None:
        return int(probs.argmax())
    at = torch.tensor([len(ask.token_ids) + len(path)])
    return int(coupled_choice(probs[None], gumbel_noise(sampling.seed, sampling.choice_index, at, vocab_size, "cpu")))


def expected_chain(case: Case, ask: Ask, vocab_size: int) -> tuple[int, ...]:
    chain = list(ask.forced_ids[: ask.length])
    while len(chain) < min(ask.length, case.num_guesses):
        chain.append(expected_token(case, ask, chain, vocab_size))
    return tuple(chain)


@pytest.mark.parametrize("forced", [(), (3, 5)], ids=["free", "forced"])
@pytest.mark.parametrize("sampling", MODES)
@of(has_law)
def test_a_chain_is_what_the_law_says(case: Case, sampling: DraftSampling, forced: tuple[int, ...]) -> None:
    for ask in case.asks(sampling=sampling, length=4, forced_ids=forced):
        drafter = case.make()
        draft = draft_of(drafter, ask)
        assert len(draft.token_ids) == min(4, max(case.num_guesses, len(forced)))
        assert draft.parents is None
        if sampling is SAMPLED:
            require_rows(case, ask, draft, drafter.vocab_size)
            continue
        assert draft.token_ids == expected_chain(case, ask, drafter.vocab_size)
        assert draft.draft_probs is None
        if sampling is GREEDY:
            paths = [draft.token_ids[:depth] for depth in range(len(forced), len(draft.token_ids))]
            chances = [float(probs_after(case, ask, path, drafter.vocab_size).max()) for path in paths]
            assert draft.confidences == pytest.approx((1.0,) * len(forced) + tuple(chances), abs=1e-4)


@pytest.mark.parametrize("max_nodes", [1, 5, 9])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "drawn"])
@of(lambda case: case.law and case.drafts_trees)
def test_a_tree_is_the_best_part_of_all_continuations(case: Case, sampling: DraftSampling, max_nodes: int) -> None:
    """Two deep, so that whoever prunes between levels has nothing to prune."""
    ask = case.asks(sampling=sampling, length=2, max_nodes=max_nodes)[0]
    drafter = case.make(trees=WIDE)
    draft = draft_of(drafter, ask)
    chances: dict[tuple[int, ...], float] = {}
    scores: dict[tuple[int, ...], float] = {(): 1.0}
    for path in itertools.chain([()], [(token_id,) for token_id in range(drafter.vocab_size)]):
        if path in scores:
            values, ids = probs_after(case, ask, path, drafter.vocab_size).topk(case.branching)
            for token_id, chance in zip(ids.tolist(), values.tolist(), strict=True):
                if chance:
                    chances[*path, token_id] = chance
                    scores[*path, token_id] = chance * scores[path]
    best = sorted(chances, key=scores.__getitem__, reverse=True)[:max_nodes]
    paths = [tuple(path) for path in paths_of(draft)]
    assert set(paths) == set(best)
    assert draft.confidences == pytest.approx([chances[path] for path in paths], abs=1e-4)
    assert draft.draft_probs is None


@pytest.mark.parametrize(("length", "max_nodes"), [(4, 9), (3, 6), (5, 5)])
@of(lambda case: case.law and case.draws_trees and case.branching == WIDE.branching)
def test_a_tree_is_what_computing_each_path_alone_would_grow(case: Case, length: int, max_nodes: int) -> None:
    ask = case.asks(length=length, max_nodes=max_nodes)[0]
    drafter = case.make(trees=WIDE)
    draft = draft_of(drafter, ask)

    def logits_after(context: list[int]) -> torch.Tensor:
        assert case.law is not None
        return case.law(ask, context[len(ask.token_ids) :])

    grown = grown_by_hand(ask, WIDE, logits_after, drafter.vocab_size).chosen()
    assert (draft.token_ids, draft.parents) == (grown.token_ids, grown.parents)
    assert draft.confidences == pytest.approx(grown.confidences, abs=1e-4)


@pytest.mark.parametrize("forced", [(), (3,)], ids=["free", "forced"])
@of(lambda case: case.law and case.draws_trees)
def test_a_drawn_tree_has_a_row_for_each_parent(case: Case, forced: tuple[int, ...]) -> None:
    ask = case.asks(sampling=FLAT, length=3, max_nodes=8, forced_ids=forced)[0]
    drafter = case.make(trees=DRAWN_TREES)
    for ask_id in range(6):
        draft = draft_of(drafter, replace(ask, ask_id=ask_id))
        require_rows(case, ask, draft, drafter.vocab_size)
        assert draft.parents is not None
        assert len(set(draft.parents)) < len(draft.parents), "it forks"
        assert len(draft.token_ids) == 8


@of(lambda case: case.law and case.drafts_trees)
def test_a_seeded_tree_tries_the_seeded_chain_first(case: Case) -> None:
    for trees in (WIDE, DRAWN_TREES):
        ask = case.asks(sampling=SEEDED, length=3)[0]
        chain = draft_of(case.make(trees=trees), ask).token_ids
        paths = [tuple(path) for path in paths_of(draft_of(case.make(trees=trees), replace(ask, max_nodes=9)))]
        assert chain[:1] in paths
        for depth in range(1, 4):
            siblings = [path for path in paths if path[:-1] == chain[: depth - 1]]
            assert siblings[:1] in ([chain[:depth]], []), "the target's likeliest choice is the first child"


@of(lambda case: not case.law and not case.draws_trees)
def test_point_masses_are_the_same_whatever_the_sampling(case: Case) -> None:
    found = [draft_of(case.make(), case.asks(sampling=mode)[0]) for mode in (GREEDY, SEEDED, SAMPLED)]
    assert found[0].token_ids
    assert [(draft.token_ids, draft.draft_probs) for draft in found] == [(found[0].token_ids, None)] * 3


# --- length, forced tokens, ids, states ---


@pytest.mark.parametrize("max_nodes", [0, 6])
@pytest.mark.parametrize("sampling", MODES)
@of()
def test_drafts_are_no_longer_than_was_asked(case: Case, sampling: DraftSampling, max_nodes: int) -> None:
    for length in (1, 2, 9):
        ask = case.asks(sampling=sampling, length=length, max_nodes=max_nodes)[0]
        draft = draft_of(case.make(trees=DRAWN_TREES), ask)
        if case.law and not max_nodes:
            assert len(draft.token_ids) == min(length, case.num_guesses)
        if case.law and case.drafts_trees and max_nodes and length > 1 and sampling is not SAMPLED:
            assert len(draft.token_ids) == 6


@pytest.mark.parametrize("max_nodes", [0, 6])
@pytest.mark.parametrize("sampling", MODES)
@of(lambda case: case is not CASES["plugin"])  # its own business
def test_forced_tokens_come_first(case: Case, sampling: DraftSampling, max_nodes: int) -> None:
    ask = case.asks(sampling=sampling, length=4, max_nodes=max_nodes)[0]
    for forced in ((5,), (5, 4), (5, 4, 3, 2)):
        draft = draft_of(case.make(trees=DRAWN_TREES), replace(ask, forced_ids=forced))
        assert draft.token_ids[: len(forced)] == forced
        if draft.draft_probs is not None:
            certain = [SparseRow(token_ids=(token_id,), weights=(DRAFT_PROB_SCALE,)) for token_id in forced]
            assert list(draft.draft_probs[: len(forced)]) == certain
        elif sampling is SAMPLED and case.law:
            assert max_nodes
    short = draft_of(case.make(), replace(ask, forced_ids=(5, 4, 3), length=2))
    assert short.token_ids == (5, 4)


@pytest.mark.parametrize("max_nodes", [0, 6])
@of(lambda case: case.states)
def test_without_states_there_are_forced_tokens_alone(case: Case, max_nodes: int) -> None:
    whole = case.asks()[0]
    assert whole.states is not None
    width, num_states = whole.states.shape[1], len(whole.states)
    sizes = [torch.zeros(0, width), torch.zeros(num_states, width - 1)]
    for states in (None, *sizes, *[torch.full((num_states, width), torch.nan)] * case.keeps_sessions):
        for forced in ((), (2, 3)):
            ask = replace(whole, states=states, max_nodes=max_nodes, forced_ids=forced)
            draft = draft_of(case.make(), ask)
            assert draft.token_ids == (forced if num_states == 1 or case.num_guesses < 99 else ())
            assert not draft.draft_probs


@of()
def test_it_needs_states_where_it_has_them(case: Case) -> None:
    needs = case.make().needs
    assert bool(needs.taps) == (case.states is not None)
    assert needs.last_state_only == (case.states is not None and not case.keeps_sessions)
    assert needs.predictions == (case is CASES["lookahead"])
    assert case.states or needs == DraftNeeds(predictions=needs.predictions)


@pytest.mark.parametrize("max_nodes", [0, 6])
@pytest.mark.parametrize("sampling", MODES)
@of(limits_ids)
def test_only_the_targets_ids_are_proposed(case: Case, sampling: DraftSampling, max_nodes: int) -> None:
    drafter = case.make(vocab_size=7, trees=DRAWN_TREES)
    for draft in drafts_of(drafter, *case.asks(sampling=sampling, max_nodes=max_nodes, length=3)):
        assert max(draft.token_ids, default=-1) < 7
        assert draft.token_ids or not case.law
        assert all(max(row.token_ids) < 7 for row in draft.draft_probs or ())


# --- many sessions, small steps, little memory ---


def mixed_asks(case: Case) -> list[Ask]:
    fields: list[dict[str, Any]] = [
        {"length": 3},
        {"length": 3, "sampling": SEEDED, "forced_ids": (2,)},
        {"length": 3, "max_nodes": 6},
        {"length": 2, "sampling": DRAWN},
    ]
    return [replace(ask, **each) for ask, each in zip(case.asks(), fields, strict=False)]


@of()
def test_asks_of_all_kinds_are_answered_together_as_alone(case: Case) -> None:
    asks = mixed_asks(case)
    together = drafts_of(case.make(trees=WIDE), *asks)
    for ask, draft in zip(asks, together, strict=True):
        alone = draft_of(case.make(trees=WIDE), ask)
        require_valid(ask, draft, case.make().vocab_size)
        if ask.max_nodes and case is CASES["lookahead"]:
            continue  # its window begins at random
        if ask.sampling is not DRAWN:
            assert (draft.token_ids, draft.parents) == (alone.token_ids, alone.parents)
        elif draft.draft_probs and alone.draft_probs:
            assert draft.draft_probs[0] == alone.draft_probs[0]


@pytest.mark.parametrize("budget", [1, 5])
@of()
def test_every_call_makes_progress_on_the_oldest(case: Case, budget: int) -> None:
    asks = [replace(ask, length=3) for ask in case.asks()]
    drafter, waiting, answered = case.make(), list(asks), list[Draft]()
    for _ in range(300):
        drafts = drafter.draft(waiting, max_num_tokens=budget)
        answered += drafts
        done = {draft.round_id for draft in drafts}
        waiting = [ask for ask in waiting if ask.ask_id not in done]
        if not waiting:
            break
    assert budget > 1 or answered[0].round_id == asks[0].ask_id
    assert sorted(draft.round_id for draft in answered) == [ask.ask_id for ask in asks]
    for ask, draft in zip(asks, sorted(answered, key=lambda draft: draft.round_id), strict=True):
        assert draft.token_ids == draft_of(case.make(), ask).token_ids


@of(holds_text)
def test_a_draft_follows_from_its_text_whatever_was_drafted_before(case: Case) -> None:
    drafter, ids = case.make(trees=WIDE), itertools.count(10)
    prompt = list(case.prompts()[0])

    def drafted(tokens: Sequence[int]) -> tuple[int, ...]:
        ask = case.ask(tokens, ask_id=next(ids), length=4)
        draft = draft_of(drafter, ask, budget=5)
        assert draft.token_ids == expected_chain(case, ask, drafter.vocab_size)
        return draft.token_ids

    for num_accepted in (0, 1, 3, 4):
        chain = drafted(prompt)
        if case.drafts_trees:  # whose nodes leave nothing behind
            draft_of(drafter, case.ask(prompt, ask_id=next(ids), length=3, max_nodes=6))
        prompt += [*chain[:num_accepted], 1]
    drafted(prompt)
    drafted(prompt)  # again, at the same place
    drafted([*prompt[:4], 6, 5])  # another text from here on
    drafted([6, 5, 6])
    for max_nodes in (0, 9):  # abandoned half way
        drafter.draft([case.ask(prompt, ask_id=next(ids), length=4, max_nodes=max_nodes)], max_num_tokens=2)
        prompt.append(2)
        drafted(prompt)


@of(lambda case: case.has_pool)
def test_a_pool_that_is_too_small_is_shared(case: Case) -> None:
    for max_nodes in (0, 6):
        asks = [replace(ask, length=3, max_nodes=max_nodes) for ask in case.asks()]
        drafter = case.make(num_blocks=5, trees=WIDE)
        for draft, ask in zip(drafts_of(drafter, *asks), asks, strict=True):
            if not max_nodes:
                assert draft.token_ids == expected_chain(case, ask, drafter.vocab_size)
            assert draft.token_ids
    tiny = case.make(num_blocks=2)
    never, fits = case.ask([1, 2] * 7, 0, length=3), case.ask([1, 2, 3], 1, length=3)
    too_long, short = drafts_of(tiny, never, fits)
    assert (too_long.token_ids, short.token_ids) == ((), expected_chain(case, fits, tiny.vocab_size))


@of()
def test_what_is_released_is_forgotten(case: Case) -> None:
    drafter = case.make()
    keys = [ask.key for ask in case.asks()]
    drafts_of(drafter, *mixed_asks(case))
    if case.keeps_sessions:
        with pytest.raises(AssertionError):
            drafter.check_integrity(keys[1:])
    for released in (*keys, *keys, key("unknown")):
        drafter.release(released)
    drafter.check_integrity([])
