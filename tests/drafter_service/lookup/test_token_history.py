from __future__ import annotations

import pytest

from outrider.drafter_service.engine.acceptance import AcceptanceEstimate
from outrider.drafter_service.lookup.token_history import Guesses, GuessTree, TokenHistory
from outrider.verifier_service.messages.draft import ROOT


class CountingList(list):
    """Counts the elements that are read from it."""

    num_read = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(index, slice) else 1
        return found


def test_a_growing_list_is_not_read_again():
    source = CountingList(range(10_000))
    history = TokenHistory()
    assert history.is_continued_by(source)
    assert history.extend_to(source) == list(range(10_000))
    source.num_read = 0
    source.extend([7, 8])
    assert history.is_continued_by(source)
    assert history.extend_to(source) == [7, 8]
    assert source.num_read < 10
    assert history.token_ids == source


@pytest.mark.parametrize(
    ("token_ids", "is_continued"),
    [([1, 2, 3], True), ((1, 2, 3, 4), True), ([1, 2], False), ([1, 9, 3, 4], False), ([1, 2, 9], False)],
)
def test_another_object_is_compared(token_ids, is_continued):
    history = TokenHistory()
    history.extend_to([1, 2, 3])
    assert history.is_continued_by(token_ids) is is_continued


def test_a_list_that_was_rewritten_at_its_end_is_noticed():
    source = [1, 2, 3]
    history = TokenHistory()
    history.extend_to(source)
    source[2:] = [9, 9]
    assert not history.is_continued_by(source)


def test_a_rate_moves_from_its_prior_to_what_was_seen():
    estimate = AcceptanceEstimate(prior_weight=4)
    assert estimate.rate("kind", 0.25) == 0.25
    for _ in range(4):
        estimate.observe("kind", is_accepted=True)
    assert estimate.rate("kind", 0.25) == (4 + 1) / 8
    assert estimate.rate("another", 0.25) == 0.25


def test_a_rate_forgets():
    estimate = AcceptanceEstimate(memory=64)
    for is_accepted in [True] * 1000 + [False] * 200:
        estimate.observe("kind", is_accepted=is_accepted)
    assert estimate.rate("kind", 0.5) < 0.1


def outcomes(guesses: Guesses, new_ids: list[int]) -> dict[str, tuple[float, float]]:
    estimate = AcceptanceEstimate(prior_weight=0)
    guesses.teach(estimate, new_ids)
    return estimate._outcomes


def test_a_chain_is_judged_to_its_first_wrong_token():
    guesses = Guesses([5, 6, 7, 8], None, ["a", "b", "c", "d"])
    assert outcomes(guesses, [5, 6, 9, 8]) == {"a": (1, 1), "b": (1, 1), "c": (0, 1)}


def test_a_chain_is_judged_no_further_than_tokens_were_committed():
    guesses = Guesses([5, 6, 7], None, ["a", "b", "c"])
    assert outcomes(guesses, [5]) == {"a": (1, 1)}
    assert outcomes(guesses, []) == {}


def test_a_tree_is_judged_along_the_committed_path():
    #  root -> 5 -> 6 ; root -> 9 -> 6 ; 5 -> 7 -> 1
    guesses = Guesses([5, 9, 6, 6, 7, 1], [ROOT, ROOT, 0, 1, 0, 4], ["5", "9", "56", "96", "57", "571"])
    assert outcomes(guesses, [5, 7]) == {"5": (1, 1), "9": (0, 1), "56": (0, 1), "57": (1, 1)}


def test_guesses_of_one_path_are_one_node_and_share_what_is_left():
    tree = GuessTree()
    first = tree.add(ROOT, 5, 0.6, "a")
    assert tree.add(ROOT, 5, 0.9, "b") == first
    second = tree.add(ROOT, 6, 0.9, "c")
    assert tree.add(first, 6, 0.5, "d") not in (first, second)
    assert len(tree) == 3
    assert tree.free(ROOT) == pytest.approx(0.0)
    assert tree.free(first) == 0.5
    assert tree.best(3).confidences == pytest.approx((0.6, 0.4, 0.5))
    assert tree.first(2).token_ids == (5, 6)
    assert tree.guesses().kinds == ["a", "c", "d"]
