"""What vLLM's prompt lookup copied, and what our drafter would have thought of it."""

from __future__ import annotations

from benchmarks.draft_lengths.recorded_lookup import recorded_kinds
from outrider.drafter_service.lookup.ngram_index import AGAIN, AGAINST, CHANGED, ONCE, UNSEEN


def test_the_first_place_of_the_longest_n_gram_is_copied() -> None:
    #          v                    v
    prompt = [1, 2, 3, 4, 50, 51, 1, 2, 3, 4, 60, 61, 2, 3, 4]
    (kinds,) = recorded_kinds(prompt, [0], 2)
    assert kinds == [(1, AGAINST, AGAINST, AGAINST), (2, ONCE, ONCE, ONCE)]  # 50: the last time it was 60; 51
    (kinds,) = recorded_kinds([*prompt[:-3], *prompt[:4]], [0], 2)
    assert [length for length, *_ in kinds] == [2, 2]  # 1, 2, 3, 4 matched


def test_a_copy_that_goes_on_as_it_did_the_last_times_is_of_a_better_kind() -> None:
    for followers, vote in [([7], ONCE), ([7, 7], AGAIN), ([7, 8], AGAINST), ([7, 8, 7], CHANGED)]:
        text = [token for number, follower in enumerate(followers) for token in (100 + number, 1, 2, 3, follower)]
        (kinds,) = recorded_kinds([*text, 0, 1, 2, 3], [9], 1)
        assert kinds == [(1, vote, vote, vote)]


def test_there_is_a_list_for_each_generated_position_and_none_without_a_match_of_three() -> None:
    kinds = list(recorded_kinds([1, 2], [3, 1, 2, 3], 4))
    assert kinds == [[], [], [], []]
    *before, last = recorded_kinds([1, 2], [3, 1, 2, 3, 1], 4)
    assert before == [[], [], [], []]
    assert last == [(1, ONCE, ONCE, ONCE), (2, AGAIN, ONCE, ONCE), (2, AGAIN, AGAIN, ONCE), (3, ONCE, ONCE, ONCE)]


def test_what_lies_ahead_is_not_looked_at() -> None:
    prompt = [1, 2, 3, 4, 1, 2, 3]
    (first,), (second, *_) = recorded_kinds(prompt, [4], 3), recorded_kinds(prompt, [9, 9, 9], 3)
    assert first == second
    assert UNSEEN not in [vote for _, *votes in first for vote in votes]
