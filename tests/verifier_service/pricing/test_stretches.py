"""Texts that copy themselves in stretches: discounted positions lead to lengths that are better in the long run."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from outrider.verifier_service.pricing.stretches import MIN_DECAY, PRIOR_ROUNDS, Stretches
from outrider.verifier_service.pricing.token_worth import TokenWorth

BASE_S, TOKEN_S = 1.0, 0.08  # a lane's share of a step; each of its tokens
MAX_LENGTH = 16
NUM_TOKENS = 40_000


def text_in_stretches(goes_on: float, begins: float) -> list[int]:
    """Return for each position how many further tokens a draft there would get right."""
    rng, is_right, flags = random.Random(7), False, []
    for _ in range(NUM_TOKENS):
        is_right = rng.random() < (goes_on if is_right else begins)
        flags.append(is_right)
    right = [0] * (NUM_TOKENS + 1)
    for position in reversed(range(NUM_TOKENS)):
        right[position] = right[position + 1] + 1 if flags[position] else 0
    return right[:NUM_TOKENS]


def walk(right: list[int], length: int) -> list[int]:
    """Return what each step of a request would find right, one of drafts of `length` tokens."""
    found, position = [], 0
    while position < NUM_TOKENS:
        found.append(right[position])
        position += 1 + min(right[position], length)
    return found


def seconds(right: list[int], length: int) -> float:
    return len(walk(right, length)) * (BASE_S + TOKEN_S * (1 + length))


def settled_length(right: list[int], worth: TokenWorth) -> int:
    """Play the whole text, each time with the length that the last time's worths lead to."""
    length = 4
    for _ in range(12):
        found = walk(right, length)
        for num_right in found:
            worth.observe([("a", 1 + min(num_right, length), length)], price=0.3)
        survivals = [sum(num_right > place for num_right in found) / len(found) for place in range(MAX_LENGTH)]
        worths = worth.worths("a", survivals)
        step_s = BASE_S + TOKEN_S * (1 + length)
        price = TOKEN_S * (1.0 + sum(worths[:length])) / step_s
        length = sum(value > price for value in worths)
    return length


class AllAlike(TokenWorth):
    """Every position of a draft is worth the same: the planted defect."""

    def worths(self, request_id: str, survivals: Sequence[float]) -> Sequence[float]:
        return self.node_worths(request_id, survivals)


@pytest.mark.parametrize(("goes_on", "begins"), [(0.9, 0.2), (0.92, 0.3), (0.95, 0.05), (0.8, 0.1)])
def test_in_stretches_drafts_are_shorter_and_a_text_takes_less_time(goes_on: float, begins: float) -> None:
    right = text_in_stretches(goes_on, begins)
    least = min(seconds(right, length) for length in range(MAX_LENGTH))
    discounted, alike = (seconds(right, settled_length(right, kind())) for kind in (TokenWorth, AllAlike))
    assert discounted < 1.04 * least
    assert discounted < 0.98 * alike


@pytest.mark.parametrize(("goes_on", "begins"), [(0.6, 0.6), (0.7, 0.5)])
def test_without_stretches_nothing_is_discounted(goes_on: float, begins: float) -> None:
    right, worth = text_in_stretches(goes_on, begins), TokenWorth()
    length = settled_length(right, worth)
    assert length == settled_length(right, AllAlike())
    assert seconds(right, length) < 1.002 * min(seconds(right, length) for length in range(MAX_LENGTH))
    assert worth.worths("a", [0.5, 0.25]) == pytest.approx([0.5, 0.25], rel=0.02)


def test_factors_fall_and_accepted_tokens_keep_a_mean_of_one() -> None:
    stretches = Stretches()
    assert not stretches.are_seen
    for _ in range(4000):
        stretches.observe_next(num_tokens=3.0, num_usual=2.0, num_drafted=4)
        stretches.observe_accepted(4)
    assert stretches.are_seen
    factors = list(stretches.factors(5))
    assert factors == sorted(factors, reverse=True)
    assert sum(factors[:4]) == pytest.approx(4.0, rel=1e-3)
    assert factors[4] == pytest.approx(2.0 / 3.0, rel=1e-3), "one position more saves what steps there save"


def test_a_few_rounds_say_little_and_none_too_much() -> None:
    stretches = Stretches()
    stretches.observe_next(num_tokens=9.0, num_usual=1.0, num_drafted=1)
    assert stretches.factors(2)[1] > 1.0 / (1.0 + 9.0 / PRIOR_ROUNDS) - 1e-9
    for _ in range(4000):
        stretches.observe_next(num_tokens=9.0, num_usual=1.0, num_drafted=1)
    first, second = stretches.factors(2)
    assert second / first == MIN_DECAY
