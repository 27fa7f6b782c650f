"""What is learnt of drafting, by load.

Step times, prices, waits and losses of one request tell little of those of many: a machine may be a quarter faster than
its profile with many tokens and as fast as its profile with one. So each level of load, the number of requests by
powers of two, learns for itself, and what it has learnt is there when the load returns.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace

import numpy as np

from outrider.verifier_service.pricing.cost_model import CostModel, StepTimeModel
from outrider.verifier_service.pricing.exposure import DraftDepth, DraftExposure
from outrider.verifier_service.pricing.request_table import Floats, Ints
from outrider.verifier_service.pricing.step_price import StepPrice
from outrider.verifier_service.pricing.trial import Trial

ACCIDENT = 3.0  # times the usual wait for drafts, or a plain step: a longer wait is a stall or a kernel's first call


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """One level of load."""

    cost: CostModel
    price: StepPrice
    depth: DraftDepth
    exposure: DraftExposure
    trial: Trial
    finding: Trial = field(default_factory=Trial)  # of look-ups, in steps in which no draft is to be computed

    def ask_lengths(self, survivals: Floats, bounds: Ints) -> Ints:
        """Return how many leading positions of each row to ask for: those that pay, down to the best depth.

        If only the best depth ends a draft, it may be as long as `next_bound`: the price was found for the positions
        down to it and does not tell of deeper ones. `survivals`: [rows, width + 1], 0 from a row's bound on.
        """
        depth = self.depth.bound
        lengths = self.price.num_paying(survivals)
        if depth is None:
            return lengths
        return np.where(lengths >= depth, np.minimum(self.depth.next_bound(depth), bounds), lengths)

    def is_accident(self, longest: int, exposed_s: float, plain_s: float) -> bool:
        """Return whether a wait for drafts of this length was an accident, and the allowance for accidents lasts."""
        usual_s = max(self.exposure.seconds(longest), plain_s)
        return self.trial.allowance > 0.0 and exposed_s > ACCIDENT * usual_s

    def observe_plain(self) -> None:
        """Count a step for which no drafts were asked."""
        self.exposure.observe_plain()
        self.trial.observe_plain()


class LoadLevels:
    """All levels so far; a new one starts with the step times and waits of the nearest."""

    def __init__(self, cost: CostModel) -> None:
        """`cost`: by the profile alone."""
        self._levels = {(1).bit_length(): _new_level(cost, DraftExposure())}

    def use_profile(self, profile: StepTimeModel) -> None:
        """Replace the profile of all levels; what they have learnt of drafts stays."""
        for level in self._levels.values():
            level.cost.use_profile(profile)

    def at(self, num_requests: int) -> LoadLevel:
        """Return the level of this many decoding requests; the first time, create it."""
        index = num_requests.bit_length()
        if index not in self._levels:
            nearest = self._levels[min(self._levels, key=lambda known: abs(known - index))]
            experts = nearest.cost.experts  # not copied: see `ExpertsRead`
            cost = deepcopy(nearest.cost, {id(experts): experts})
            self._levels[index] = _new_level(cost, replace(nearest.exposure))
        return self._levels[index]


def _new_level(cost: CostModel, exposure: DraftExposure) -> LoadLevel:
    trial = Trial()
    return LoadLevel(cost, StepPrice(cost, trial.settle), DraftDepth(cost, exposure), exposure, trial)
