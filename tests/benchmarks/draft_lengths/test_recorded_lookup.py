"""What vLLM's prompt lookup copied, and what our drafter would have thought of it."""

from __future__ import annotations

from benchmarks.draft_lengths.recorded_lookup import recorded_kinds
from outrider.drafter_service.lookup.ngram_index import AGAIN, AGAINST, ONCE


def test_the_first_place_of_the_longest_n_gram_is_copied() -> None:
    #          v                    v
    prompt = [1, 2, 3, 4, 50, 51, 1, 2, 3, 4, 60, 61, 2, 3, 4]
    (kinds,) = recorded_kinds(prompt, [0], 2)
    assert kinds == [(1, AGAINST, AGAINST, AGAINST), (2, ONCE, ONCE, ONCE)]  # 50: the last time it was 60; 51
    (kinds,) = recorded_kinds([*prompt[:-3], *prompt[:4]], [0], 2)
    assert [length for length, *_ in kinds] == [2, 2]  # 1, 2, 3, 4 matched


def test_there_is_a_list_for_each_generated_position_and_none_without_a_match_of_three() -> None:
    kinds = list(recorded_kinds([1, 2], [3, 1, 2, 3], 4))
    assert kinds == [[], [], [], []]
    *before, last = recorded_kinds([1, 2], [3, 1, 2, 3, 1], 4)
    assert before == [[], [], [], []]
    assert last == [(1, ONCE, ONCE, ONCE), (2, AGAIN, ONCE, ONCE), (2, AGAIN, AGAIN, ONCE), (3, ONCE, ONCE, ONCE)]
