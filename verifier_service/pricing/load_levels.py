"""What is learnt of drafting, load by load.

Step times, prices, waits and losses differ between one request and many: a machine that is a quarter faster than its
profile says with many tokens is not so with one. Each level of load, requests by powers of two, has its own; so when a
load comes or goes, what was known of the other is still there, and nothing of this one is held against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

from outrider.verifier_service.pricing.cost_model import CostModel, StepTimeModel
from outrider.verifier_service.pricing.exposure import DraftDepth, DraftExposure
from outrider.verifier_service.pricing.step_price import StepPrice
from outrider.verifier_service.pricing.trial import Trial

ACCIDENT = 3.0  # times what drafts usually take, or a step without any


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """One level of load."""

    cost: CostModel
    price: StepPrice
    depth: DraftDepth
    exposure: DraftExposure
    trial: Trial

    def asked(self, worths: Sequence[float], bound: int | None, next_bound: int | None) -> int:
        """Return how many leading positions to ask for: those worth the price, as deep as drafts should go by now.

        Where that depth is all that ends a draft, it may be as long as `next_bound`: the price, which is that of the
        positions down to there, says nothing of the next.
        """
        length = self.price.num_paying(worths[:bound])
        return length if next_bound is None or length != bound else min(next_bound, len(worths))

    def is_accident(self, longest: int, exposed_s: float, plain_s: float) -> bool:
        """Return whether drafts of this length held a step up by what is no drafting: a first call, a stall.

        Once the allowance for these is used up nothing is an accident.
        """
        usual_s = max(self.exposure.seconds(longest), plain_s)
        return self.trial.allowance > 0.0 and exposed_s > ACCIDENT * usual_s

    def observe_plain(self) -> None:
        """Take in a step for which no drafts were asked."""
        self.exposure.observe_plain()
        self.trial.observe_plain()


class LoadLevels:
    """All levels that there were; a new one takes its step times and waits from the nearest."""

    def __init__(self, cost: CostModel) -> None:
        """`cost`: by the profile alone."""
        self._levels = {(1).bit_length(): _new_level(cost, DraftExposure())}

    def use_profile(self, profile: StepTimeModel) -> None:
        """Let all levels go by another profile; what they know of drafts stays."""
        for level in self._levels.values():
            level.cost.use_profile(profile)

    def at(self, num_requests: int) -> LoadLevel:
        """Return the level of so many decoding requests."""
        index = num_requests.bit_length()
        if index not in self._levels:
            nearest = self._levels[min(self._levels, key=lambda known: abs(known - index))]
            self._levels[index] = _new_level(deepcopy(nearest.cost), replace(nearest.exposure))
        return self._levels[index]


def _new_level(cost: CostModel, exposure: DraftExposure) -> LoadLevel:
    trial = Trial()
    return LoadLevel(cost, StepPrice(cost, trial.settle), DraftDepth(cost, exposure), exposure, trial)
