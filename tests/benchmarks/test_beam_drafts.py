"""What a search's drafts would have saved: searches whose drafts are known."""

from __future__ import annotations

import pytest

from benchmarks.beam_drafts import bound, followers, hindsight, played, siblings

PROMPT = [1, 2, 3, 4, 1, 2]


def test_a_look_up_names_what_followed_the_longest_match_first():
    texts = [[9, 2, 7], [1, 2, 3, 1, 2]]
    assert followers(texts, [1, 2], (2, 1), 1) == {3}
    assert followers(texts, [1, 2], (2, 1), 2) == {3, 7}
    assert hindsight(texts, [8, 2]) == {3, 7}
    assert followers(texts, [6], (1,), 4) == set()


def test_a_step_is_saved_only_if_every_kept_beam_was_drafted():
    both = [[[*PROMPT, 5], [*PROMPT, 6]], [[*PROMPT, 5, 1], [*PROMPT, 6, 1]]]
    assert played(both, lambda texts, beam: {1}) == [1]
    assert played(both, lambda texts, beam: {1} if beam[-1] == 5 else {2}) == [0]


def test_drafts_go_on_as_long_as_they_are_right():
    text = [*PROMPT, 3, 4, 9]
    assert played([[text[:length]] for length in range(6, 10)], siblings) == [2], "3 and 4 follow, and then not 1"


def test_a_sibling_knows_what_a_beams_own_text_does_not():
    steps = [[[1, 2, 3, 4], [5, 6, 7, 3]], [[5, 6, 7, 3, 4], [5, 6, 7, 3, 4]]]
    assert (played(steps, siblings), played(steps, siblings, are_alone=True)) == ([1], [0])


def test_the_bound_weighs_saved_steps_by_the_rows_that_they_take():
    assert bound([1, 1], 2, lambda rows: 1.0) == pytest.approx(2.0)
    assert bound([1, 0], 2, lambda rows: float(rows)) == pytest.approx(1.0)
