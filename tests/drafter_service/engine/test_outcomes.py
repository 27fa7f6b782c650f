from __future__ import annotations

import pytest

from outrider.drafter_service.engine.outcomes import (
    LikelyOutcome,
    Pace,
    Place,
    acceptance_by_confidence,
    bin_of,
    length_worth_waiting_for,
    likely_outcomes,
)


def place(token_id: int, confidence: float, *others: tuple[int, float]) -> Place:
    return Place(token_id, confidence, ((token_id, confidence), *others))


def keys(outcomes: list[LikelyOutcome]) -> list[tuple[int, int]]:
    return [(outcome.num_accepted, outcome.next_token_id) for outcome in outcomes]


def test_what_replaces_a_token_is_another_one():
    assert place(7, 0.5, (1, 0.25), (2, 0.125)).others == [(1, 0.5), (2, 0.25)]
    assert place(7, 1.0).others == []
    assert Place(7, 0.4, ((1, 0.4), (2, 0.2))).others == [(1, 0.4), (2, 0.2)], "a drawn token need not be a likely one"


def test_outcomes_come_by_their_chance():
    places = [place(7, 0.5, (1, 0.4), (2, 0.1)), place(8, 0.5, (3, 0.5))]
    after = place(9, 0.6, (4, 0.4))
    outcomes = likely_outcomes(places, after, acceptance_by_confidence(), 10)
    # rejected at once: 1/2, of which 4/5 and 1/5; then 1/4, all of it token 3; all accepted: 1/4
    assert keys(outcomes) == [(0, 1), (1, 3), (2, 9), (0, 2), (2, 4)]
    assert [outcome.chance for outcome in outcomes] == pytest.approx([0.4, 0.25, 0.15, 0.1, 0.1])
    assert keys(likely_outcomes(places, after, acceptance_by_confidence(), 2)) == [(0, 1), (1, 3)]


def test_what_follows_the_draft_is_guessed_as_its_tokens_are():
    after = place(9, 0.25, (4, 0.5), (5, 0.25))
    assert after.guesses(0.9) == [(9, 0.9), (4, pytest.approx(0.1 * 2 / 3)), (5, pytest.approx(0.1 / 3))]
    drawn = Place(9, 0.5, ((4, 0.5), (9, 0.25)), is_drawn=True)
    assert drawn.guesses(0.9) == [(4, 0.5), (9, 0.25)], "what one draws says little of what the other will draw"
    known = acceptance_by_confidence()
    for _ in range(50):
        known.observe(bin_of(0.25), is_accepted=True)
    assert keys(likely_outcomes([], after, known, 1)) == [(0, 9)]


def test_equal_acceptance_gives_a_falling_series_of_guesses_and_more_at_the_end():
    guesses = tuple((token_id, 0.5**token_id) for token_id in range(1, 9))
    places = [Place(0, 0.7, guesses) for _ in range(4)]
    outcomes = likely_outcomes(places, Place(0, 0.7, guesses, is_drawn=True), acceptance_by_confidence(), 12)
    numbers = [sum(outcome.num_accepted == k for outcome in outcomes) for k in range(5)]
    assert numbers[:4] == sorted(numbers[:4], reverse=True)
    assert numbers[3] < numbers[0]
    assert numbers[4] > numbers[3]


def test_an_empty_draft_has_outcomes_too():
    assert keys(likely_outcomes([], place(9, 0.6, (4, 0.4)), acceptance_by_confidence(), 3)) == [(0, 9), (0, 4)]


def test_acceptance_is_learned_by_confidence():
    known = acceptance_by_confidence()
    assert known.rate(bin_of(0.9), 0.9) == pytest.approx(0.9)
    for _ in range(100):
        known.observe(bin_of(0.95), is_accepted=False)
        known.observe(bin_of(0.25), is_accepted=True)
    assert known.rate(bin_of(0.95), 0.95) < 0.1
    assert known.rate(bin_of(0.25), 0.25) > 0.9
    assert known.rate(bin_of(0.55), 0.55) == pytest.approx(0.55), "another bin"
    assert known.overall == pytest.approx(0.5)


def test_what_is_long_past_is_forgotten():
    known = acceptance_by_confidence()
    for _ in range(1000):
        known.observe(bin_of(0.5), is_accepted=True)
    for _ in range(600):
        known.observe(bin_of(0.5), is_accepted=False)
    assert known.rate(bin_of(0.5), 0.5) < 0.1


@pytest.mark.parametrize(
    ("step_s", "acceptance", "expected"),
    [
        (0.0, 0.5, 4),  # drafting costs nothing
        (0.001, 0.9, 4),
        (0.1, 0.5, 2),  # 1.5 tokens in 1.1 s, 1.75 in 1.2, 1.875 in 1.3
        (0.4, 0.5, 1),  # 1.5 in 1.4, 1.75 in 1.8
        (0.6, 0.5, 0),  # 1.5 tokens in 1.6 s are fewer than 1 in 1
        (0.6, 0.05, 0),
    ],
)
def test_a_miss_is_worth_as_much_as_it_brings(step_s: float, acceptance: float, expected: int):
    assert length_worth_waiting_for(4, acceptance, Pace(step_s=step_s, round_s=1.0)) == expected


def test_where_nothing_is_measured_all_is_drafted():
    assert length_worth_waiting_for(4, 0.01, None) == 4
    assert length_worth_waiting_for(4, 0.5, Pace(step_s=0.0, round_s=0.0)) == 4
