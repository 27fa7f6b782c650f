"""Whether weights in the shadow, or weights that have just been published, draft better: a paired test over rounds.

Both versions draft the same rounds, so that what differs between requests cancels. Rounds of a session are correlated
and one looks repeatedly, hence three standard errors, and looks only when the rounds have doubled since the last one.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from outrider.drafter_service.engine.learning_messages import TrialCounts
from outrider.drafter_service.learning.totals import Totals

SIGMAS = 3.0  # one look errs once in 740; with doubling looks, of two equal versions under 1 in 100 is published
MIN_ROUNDS_TO_WIN = 64  # a publish costs every drafter its KV
MIN_ROUNDS_TO_LOSE = 16  # a bad version is to go soon, and a good one that goes costs a trial
MIN_GAIN = 0.01  # of the predecessor's score: less is not worth a publish
MAX_TRIAL_ROUNDS = 4096  # a gain that does not show by then is small
MAX_WATCH_ROUNDS = 1024  # a version that has won its trial is not worse by much if it does not show by then


class Verdict(enum.Enum):
    OPEN = "open"
    WINS = "wins"
    LOSES = "loses"
    DRAW = "draw"


@dataclass(frozen=True, slots=True)
class Score:
    """A candidate beside its predecessor, in score per round (see `TrialCounts`)."""

    num_rounds: int
    candidate: float  # mean score
    predecessor: float
    standard_error: float  # of the mean difference

    @classmethod
    def of(cls, counts: TrialCounts, candidate: str) -> Score:
        """Read the counts of a candidate that is in the shadow, or that serves."""
        num = max(1, counts.num_rounds)
        means = {counts.shadow: counts.shadow_score / num, counts.serving: counts.serving_score / num}
        other = counts.serving if candidate == counts.shadow else counts.shadow
        difference = means[candidate] - means[other]
        variance = max(0.0, counts.squared_difference / num - difference**2) * num / max(1, num - 1)
        return cls(counts.num_rounds, means[candidate], means[other], math.sqrt(variance / num))

    @property
    def sigmas(self) -> float:
        """The mean difference in standard errors; without any difference 0, and infinite if it is always the same."""
        difference = self.candidate - self.predecessor
        if self.standard_error > 0 or difference == 0:
            return difference / self.standard_error if difference else 0.0
        return math.copysign(math.inf, difference)

    def __str__(self) -> str:
        """Say it in words, for a fate."""
        return f"{self.candidate:.2f} against {self.predecessor:.2f} a round, over {self.num_rounds} rounds"


def verdict(score: Score, max_rounds: int) -> Verdict:
    """Judge a candidate by its score; a draw after `max_rounds`."""
    if score.num_rounds >= MIN_ROUNDS_TO_LOSE and score.sigmas <= -SIGMAS:
        return Verdict.LOSES
    is_gain = score.candidate - score.predecessor >= MIN_GAIN * score.predecessor
    if score.num_rounds >= MIN_ROUNDS_TO_WIN and score.sigmas >= SIGMAS and is_gain:
        return Verdict.WINS
    return Verdict.DRAW if score.num_rounds >= max_rounds else Verdict.OPEN


class Trial:
    """The counts of one trial or watch, of all drafters together, and when to look at them."""

    def __init__(self, *, serving: str, shadow: str, candidate: str, max_rounds: int) -> None:
        self.serving, self.shadow, self.candidate = serving, shadow, candidate
        self._max_rounds = max_rounds
        self._next_look = MIN_ROUNDS_TO_LOSE
        self._totals: Totals[TrialCounts] = Totals()

    def take(self, drafter_id: str, counts: TrialCounts) -> None:
        """Take a drafter's counts since its trial began; those of other versions are not of this trial."""
        if (counts.serving, counts.shadow) != (self.serving, self.shadow):
            return
        self._totals.take(drafter_id, self.candidate, counts)

    def score(self) -> Score:
        nothing = TrialCounts(serving=self.serving, shadow=self.shadow)
        return Score.of(self._totals.of(self.candidate, nothing), self.candidate)

    def look(self) -> tuple[Verdict, Score]:
        """Judge if it is time to: rounds have doubled since the last look, or are enough for a draw."""
        score = self.score()
        if score.num_rounds < min(self._next_look, self._max_rounds):
            return Verdict.OPEN, score
        self._next_look = 2 * score.num_rounds
        return verdict(score, self._max_rounds), score
