"""What a verification may end in, and which of it is worth drafting for before it is known. Pure Python.

A verification of a draft of K tokens ends in (number of accepted tokens, next token). The next token is one that might
have stood in the place of the first rejected one, or after the last one. *Speculative speculative decoding* (Kumar et
al. 2026) spends a budget of guesses over the places as a capped geometric series of the chance to get there; to take
the likeliest outcomes one by one does the same wherever acceptance is the same at every place, and better elsewhere.

Which outcomes are drafted for is decided by the draft, its rows and what earlier drafts came to: never by what is then
drawn for an outcome. So a draft that waits for an outcome has the law of one that is drawn when the outcome is known.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

NUM_BINS = 10  # of confidence in [0, 1]
PRIOR_WEIGHT = 4.0  # judged tokens that a bin's own confidence counts for
MEMORY = 0.995  # of a bin's earlier tokens, for each new one: about the last 200 count


@dataclass(frozen=True, slots=True)
class Place:
    """One place of a draft: its token, how sure the drafter is of it, and what might stand there, likeliest first."""

    token_id: int
    confidence: float
    candidates: tuple[tuple[int, float], ...]  # (token, chance), the place's own token among them or not
    is_drawn: bool = False  # its own token was drawn from the candidates: the target draws another

    @property
    def others(self) -> list[tuple[int, float]]:
        """Return what may come in the place of its own token, with the chances once that one is rejected."""
        found = [(token_id, chance) for token_id, chance in self.candidates if token_id != self.token_id]
        left = 1.0 - sum(chance for token_id, chance in self.candidates if token_id == self.token_id)
        return [(token_id, chance / left) for token_id, chance in found] if left > 0.0 else []

    def guesses(self, acceptance: float) -> list[tuple[int, float]]:
        """Return what may come here where nothing is drafted, its own token being right with a chance of `acceptance`.

        A point mass stands for the target's own choice; of a drawn token that is no more than a draw.
        """
        if self.is_drawn:
            return list(self.candidates)
        return [(self.token_id, acceptance), *((other, (1.0 - acceptance) * chance) for other, chance in self.others)]


@dataclass(frozen=True, slots=True)
class LikelyOutcome:
    """One end of a verification."""

    num_accepted: int
    next_token_id: int
    chance: float


@dataclass(slots=True)
class AcceptanceMemory:
    """How often tokens of a certain confidence were accepted lately: what a drafter believes is seldom what comes."""

    _num_accepted: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)
    _num_judged: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)

    def observe(self, confidence: float, is_accepted: bool) -> None:
        """Take in what became of one token that was verified."""
        index = _bin_of(confidence)
        self._num_accepted[index] = MEMORY * self._num_accepted[index] + is_accepted
        self._num_judged[index] = MEMORY * self._num_judged[index] + 1.0

    def chance(self, confidence: float) -> float:
        """Return the chance of a token to be accepted where all before it are."""
        index = _bin_of(confidence)
        return (self._num_accepted[index] + PRIOR_WEIGHT * confidence) / (self._num_judged[index] + PRIOR_WEIGHT)

    @property
    def overall(self) -> float:
        """Return the share of verified tokens that were accepted, one half where nothing is known."""
        return (sum(self._num_accepted) + 0.5) / (sum(self._num_judged) + 1.0)


def _bin_of(confidence: float) -> int:
    return min(int(confidence * NUM_BINS), NUM_BINS - 1)


def likely_outcomes(
    places: Sequence[Place], after: Place, memory: AcceptanceMemory, num_outcomes: int
) -> list[LikelyOutcome]:
    """Return the likeliest ends of a draft's verification; `after` is the place that follows its last token."""
    outcomes: list[LikelyOutcome] = []
    survival = 1.0
    for index, place in enumerate(places):
        acceptance = memory.chance(place.confidence)
        rejection = survival * (1.0 - acceptance)
        outcomes += [LikelyOutcome(index, token_id, rejection * chance) for token_id, chance in place.others]
        survival *= acceptance
    guesses = after.guesses(memory.chance(after.confidence))
    outcomes += [LikelyOutcome(len(places), token_id, survival * chance) for token_id, chance in guesses]
    return heapq.nsmallest(num_outcomes, outcomes, key=lambda outcome: -outcome.chance)


@dataclass(frozen=True, slots=True)
class Pace:
    """What a drafter has measured: of its own forwards, and of the time from its answers to the next ask."""

    step_s: float
    round_s: float


def length_worth_waiting_for(length: int, acceptance: float, pace: Pace | None) -> int:
    """Return how many tokens to draft while the verifier waits: those with the most tokens per second, maybe none.

    m tokens bring 1 + a + ... + a^m tokens in expectation and take m forwards before the round. Equal gains: longer.
    """
    if pace is None:
        return length
    expected = list(itertools.accumulate(acceptance**depth for depth in range(length + 1)))
    speeds = [tokens / max(pace.round_s + m * pace.step_s, 1e-9) for m, tokens in enumerate(expected)]
    return max(range(length + 1), key=lambda m: (speeds[m], m))
