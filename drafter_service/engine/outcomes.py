"""Which outcomes a verification may have, and which are worth drafting for while it runs. Pure Python.

An outcome is (number of accepted tokens, next token). The next token stands in the place of the first rejected token,
or after the last one. *Speculative speculative decoding* (Kumar et al. 2026) spreads a budget of guesses over the
places, as a capped geometric series of the chance that verification gets there. Taking the likeliest outcomes one by
one does the same where acceptance is the same at every place, and better elsewhere.

The draft, its rows and what became of earlier drafts decide which outcomes are drafted for; tokens drawn for an outcome
never do. So a draft that was made ahead has the same law as one that is drawn when the outcome is known.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.drafter_service.engine.acceptance import AcceptanceEstimate

NUM_BINS = 10  # of confidence in [0, 1]
PRIOR_WEIGHT = 4.0  # tokens that a confidence itself counts for
MEMORY = 200  # tokens of a bin after which its counts are halved


@dataclass(frozen=True, slots=True)
class Place:
    """One place of a draft: its token, the drafter's confidence in it, and the place's candidates, likeliest first."""

    token_id: int
    confidence: float
    candidates: tuple[tuple[int, float], ...]  # (token, chance), the place's own token among them or not
    is_drawn: bool = False  # the token was drawn from the candidates: the target draws one of its own

    @property
    def others(self) -> list[tuple[int, float]]:
        """Return the candidates besides the place's own token, with their chances given that it is rejected."""
        found = [(token_id, chance) for token_id, chance in self.candidates if token_id != self.token_id]
        left = 1.0 - sum(chance for token_id, chance in self.candidates if token_id == self.token_id)
        return [(token_id, chance / left) for token_id, chance in found] if left > 0.0 else []

    def guesses(self, acceptance: float) -> list[tuple[int, float]]:
        """Return candidates, with their chances, for a place that was not part of the answered draft.

        A point mass guesses the target's choice, and is right with a chance of `acceptance`. A drawn token says no more
        than the row it was drawn from.
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


def acceptance_by_confidence() -> AcceptanceEstimate:
    """Return an estimate whose kinds are bins of confidence: a drafter's confidences are seldom calibrated."""
    return AcceptanceEstimate(prior_weight=PRIOR_WEIGHT, memory=MEMORY)


def bin_of(confidence: float) -> int:
    """Return the kind of a token with this confidence."""
    return min(int(confidence * NUM_BINS), NUM_BINS - 1)


def likely_outcomes(
    places: Sequence[Place], after: Place, known: AcceptanceEstimate, num_outcomes: int
) -> list[LikelyOutcome]:
    """Return the likeliest ends of a draft's verification; `after` is the place that follows its last token."""
    outcomes: list[LikelyOutcome] = []
    survival = 1.0
    for index, place in enumerate(places):
        acceptance = known.rate(bin_of(place.confidence), place.confidence)
        rejection = survival * (1.0 - acceptance)
        outcomes += [LikelyOutcome(index, token_id, rejection * chance) for token_id, chance in place.others]
        survival *= acceptance
    guesses = after.guesses(known.rate(bin_of(after.confidence), after.confidence))
    outcomes += [LikelyOutcome(len(places), token_id, survival * chance) for token_id, chance in guesses]
    return heapq.nsmallest(num_outcomes, outcomes, key=lambda outcome: -outcome.chance)


@dataclass(frozen=True, slots=True)
class Pace:
    """Times that a drafter has measured: of its next forward, and from its answers to the verifier's next ask."""

    step_s: float
    round_s: float


def length_worth_waiting_for(length: int, acceptance: float, pace: Pace | None) -> int:
    """Return the draft length with the most tokens per second, maybe 0, where the verifier waits for the draft.

    With acceptance a, m drafted tokens win 1 + a + ... + a^m tokens in expectation, and take m forwards before the
    round. Of equal lengths the longest.
    """
    if pace is None:
        return length
    expected = list(itertools.accumulate(acceptance**depth for depth in range(length + 1)))
    speeds = [tokens / max(pace.round_s + m * pace.step_s, 1e-9) for m, tokens in enumerate(expected)]
    return max(range(length + 1), key=lambda m: (speeds[m], m))
