"""How long drafts hold a verifier up: a part that does not depend on how long they are, and one that does.

Drafters work on the drafts of a step together, so what counts is the length of the longest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FADE = 0.95  # per step that waited for drafts
SMOOTHING = 0.1  # per step, of what positions are worth
PROPORTIONAL_WEIGHT = 0.05  # how firmly waiting is taken to be proportional to it, until lengths have varied


@dataclass(slots=True)
class DraftExposure:
    """Least squares of seconds over draft lengths, drawn towards a line through the origin; both parts at least 0.

    A drafter in the verifier's own process is all exposure and nearly proportional, one behind a link is a round trip,
    and one that drafts while another group is verified costs nothing.
    """

    _weight: float = 0.0
    _lengths: float = 0.0  # sums, that fade
    _squares: float = 0.0
    _seconds: float = 0.0
    _products: float = 0.0

    def observe(self, length: int, seconds: float) -> None:
        """Take in one step: how long a draft had been asked for at most, and how long it was held up."""
        self._weight = self._weight * FADE + 1.0
        self._lengths = self._lengths * FADE + length
        self._squares = self._squares * FADE + length * length
        self._seconds = self._seconds * FADE + seconds
        self._products = self._products * FADE + length * seconds

    def seconds(self, length: int) -> float:
        """Return how long drafting `length` tokens one after another is expected to hold a step up."""
        return self.fixed_s + length * self.level_s

    @property
    def level_s(self) -> float:
        """What each position adds."""
        if self._weight == 0.0:
            return 0.0
        length, seconds = self._lengths / self._weight, self._seconds / self._weight
        variance = self._squares / self._weight - length * length
        covariance = self._products / self._weight - length * seconds
        pull = PROPORTIONAL_WEIGHT * length * length
        slope = (covariance + pull * seconds / length) / (variance + pull)
        return min(max(slope, 0.0), seconds / length)

    @property
    def fixed_s(self) -> float:
        """What the first position adds, besides."""
        if self._weight == 0.0:
            return 0.0
        return max(0.0, self._seconds / self._weight - self.level_s * self._lengths / self._weight)


class DraftDepth:
    """How long the longest draft should be: a position is drafted for all of a step's requests, or for none of them.

    One that is worth more tokens than the price of verifying them, over all requests together, pays for as long as its
    drafting takes at the present rate of tokens.
    """

    def __init__(self) -> None:
        self._surplus: list[float] = []  # by position: survivals beyond the price, summed over requests; smoothed
        self._tokens = self._seconds = 0.0

    def observe(self, offers: Iterable[Sequence[float]], price: float) -> None:
        """Take in the survivals that each request of a step had on offer, position by position."""
        surplus: list[float] = []
        for survivals in offers:
            surplus.extend([0.0] * (len(survivals) - len(surplus)))
            for place, survival in enumerate(survivals):
                if survival <= price:
                    break
                surplus[place] += survival - price
        self._surplus.extend(surplus[len(self._surplus) :])
        surplus.extend([0.0] * (len(self._surplus) - len(surplus)))
        self._surplus = [
            (1.0 - SMOOTHING) * old + SMOOTHING * new for old, new in zip(self._surplus, surplus, strict=True)
        ]

    def observe_rate(self, num_tokens: int, seconds: float) -> None:
        """Take in what a step committed, and how long it took with its wait for drafts."""
        self._tokens = FADE * self._tokens + num_tokens
        self._seconds = FADE * self._seconds + seconds

    def bound(self, level_s: float) -> int | None:
        """Return the longest draft that pays where each position takes `level_s`, at least 1; None: any."""
        if level_s <= 0.0 or not self._surplus or self._seconds <= 0.0:
            return None
        cost = level_s * self._tokens / self._seconds
        paying = next((place for place, gain in enumerate(self._surplus) if gain <= cost), len(self._surplus))
        return max(1, paying)
