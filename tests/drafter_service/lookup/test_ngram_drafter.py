from __future__ import annotations

import random

import pytest

from fakes.drafter_play import KEY, draft_after, paths_of, play
from outrider.drafter_service.engine.drafter import SessionKey
from outrider.drafter_service.lookup.ngram_drafter import NgramDrafter, copy_on
from outrider.verifier_service.messages.draft import ROOT


def make(smallest: int = 1, largest: int = 3) -> NgramDrafter:
    return NgramDrafter(vocab_size=100, prompt_lookup_min=smallest, prompt_lookup_max=largest)


def by_scanning(tokens: list[int], smallest: int, largest: int, length: int) -> list[int]:
    """The slow reference: look at every earlier place, longest n-gram and latest place first."""
    for size in range(largest, smallest - 1, -1):
        for begin in range(len(tokens) - 1, size - 1, -1):
            if tokens[begin - size : begin] == tokens[len(tokens) - size :]:
                text = list(tokens)
                for offset in range(length):
                    text.append(text[begin + offset])
                return text[len(tokens) :]
    return []


def test_nothing_is_drafted_without_a_match_of_the_least_size():
    tokens = [1, 2, 3, 4, 2]
    assert draft_after(make(2, 3), tokens).token_ids == ()
    assert draft_after(make(1, 3), tokens, key=SessionKey("p", "other")).token_ids[:2] == (3, 4)
    assert draft_after(make(), [7]).token_ids == ()


@pytest.mark.parametrize("sizes", [(1, 1), (1, 4), (2, 3), (3, 7)])
def test_it_drafts_what_a_scan_of_the_whole_text_finds(sizes: tuple[int, int]):
    rng = random.Random(sizes[1])
    drafter = make(*sizes)
    tokens: list[int] = [0]
    while len(tokens) < 400:
        found = draft_after(drafter, tokens, length=6).token_ids
        assert list(found) == by_scanning(tokens, *sizes, 6)
        drafter.check_integrity([KEY])
        copied = list(found[: rng.randrange(4)])
        tokens += copied + [rng.randrange(5) for _ in range(rng.randrange(3))]


def test_other_tokens_under_the_same_key_begin_anew():
    drafter = make()
    draft_after(drafter, [1, 2, 3, 1, 2])
    assert draft_after(drafter, [1, 2, 7, 1, 2], length=1).token_ids == (7,)
    drafter.check_integrity([KEY])


def test_forced_tokens_come_first_and_are_matched_on():
    tokens = [5, 6, 7, 8, 9, 1, 5]
    result = draft_after(make(), tokens, length=4, forced_ids=(6, 7))
    assert result.token_ids == (6, 7, 8, 9)
    assert result.confidences is not None
    assert result.confidences[:2] == (1.0, 1.0)
    assert draft_after(make(), tokens, length=1, forced_ids=(6, 7)).token_ids == (6,)
    tree = draft_after(make(), tokens, length=4, max_nodes=3, forced_ids=(6, 7))
    assert tree.token_ids == (6, 7, 8)


def test_a_tree_branches_where_longer_and_shorter_matches_differ():
    tokens = [1, 2, 3, 50, 51, 9, 3, 60, 61, 1, 2, 3]
    result = draft_after(make(), tokens, length=2, max_nodes=8)
    assert paths_of(result)[0] == [50]  # the longest match is the likeliest
    assert sorted(paths_of(result)) == [[50], [50, 51], [60], [60, 61]]
    assert len(draft_after(make(), tokens, length=2, max_nodes=3).token_ids) == 3
    assert result.parents is not None
    assert result.confidences is not None
    roots = [index for index, parent in enumerate(result.parents) if parent == ROOT]
    assert [result.confidences[index] for index in roots] == [0.5, 0.25]  # the second is right if the first is not


def test_confidences_follow_what_was_accepted():
    drafter = make()
    right = play(drafter, lambda tokens: (1, 2, 3)[len(tokens) % 3], [1, 2, 3, 1], 30, length=4)
    assert right.mean_acceptance_length > 4.5
    high = right.drafts[-1].confidences
    drafter.release(KEY)
    rng = random.Random(1)
    wrong = play(drafter, lambda _: rng.randrange(3), [1, 2, 0, 1], 300, length=4)
    low = [draft.confidences[0] for draft in wrong.drafts[-20:] if draft.confidences]
    assert high is not None
    assert min(high) > 0.8
    assert max(low) < 0.7
    assert sum(low) / len(low) < 0.45


def test_a_copy_that_shorter_contexts_speak_against_is_trusted_less_than_one_that_they_confirm():
    """After 1 comes 2 or 3 by turns, so the last time says nothing; after 7, 8 comes 9 every time."""
    drafter, tokens = make(1, 2), [0]
    for number in range(80):
        tokens += [1, 2 if number % 2 else 3, 7, 8, 9, 10 + number]
        for end in range(len(tokens) - 5, len(tokens) + 1):
            draft_after(drafter, tokens[:end], length=1)
    doubtful = draft_after(drafter, [*tokens, 1], length=1)
    sure = draft_after(drafter, [*tokens, 1, 3, 7, 8], length=1)
    assert (doubtful.token_ids, sure.token_ids) == ((2,), (9,))
    assert doubtful.confidences is not None
    assert sure.confidences is not None
    assert doubtful.confidences[0] < 0.2
    assert sure.confidences[0] > 0.9


def test_a_wrong_index_is_noticed():
    drafter = make()
    draft_after(drafter, [1, 2, 3])
    drafter._sessions[KEY].history.token_ids[0] = 7
    with pytest.raises(AssertionError, match="index"):
        drafter.check_integrity([KEY])


@pytest.mark.parametrize("sizes", [(0, 3), (4, 3)])
def test_sizes_that_make_no_sense_are_refused(sizes: tuple[int, int]):
    with pytest.raises(ValueError, match="prompt_lookup_min"):
        make(*sizes)


def test_a_copy_goes_on_with_the_forced_tokens_and_then_with_itself():
    assert copy_on([1, 2, 3, 4], [], 1, 2) == [2, 3]
    assert copy_on([1, 2, 3, 4], [8], 2, 7) == [3, 4, 8, 3, 4, 8, 3]
