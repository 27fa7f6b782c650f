"""What is learnt of drafting, load by load.

Prices, waits and losses differ between one request and many. Each level of load, requests by powers of two, has its
own; so when a load comes or goes, what was known of the other is still there, and nothing of this one is held against
it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from outrider.verifier_service.cost_model import CostModel
from outrider.verifier_service.exposure import DraftDepth, DraftExposure
from outrider.verifier_service.shortfall import Shortfall
from outrider.verifier_service.step_price import StepPrice
from outrider.verifier_service.trial import Trial


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """One level of load."""

    price: StepPrice
    depth: DraftDepth
    exposure: DraftExposure
    trial: Trial
    shortfall: Shortfall = field(default_factory=Shortfall)

    def observe_plain(self) -> None:
        """Take in a step for which no drafts were asked."""
        self.exposure.observe_plain()
        self.shortfall.observe_plain()
        self.trial.observe_plain()


class LoadLevels:
    """All levels that there were; a new one takes its waits from the nearest."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._levels: dict[int, LoadLevel] = {}

    def at(self, num_requests: int) -> LoadLevel:
        """Return the level of so many decoding requests."""
        index = num_requests.bit_length()
        if index not in self._levels:
            nearest = min(self._levels, key=lambda known: abs(known - index), default=None)
            exposure = DraftExposure() if nearest is None else replace(self._levels[nearest].exposure)
            trial = Trial()
            price = StepPrice(self._cost, trial.settle)
            self._levels[index] = LoadLevel(price, DraftDepth(self._cost, exposure), exposure, trial)
        return self._levels[index]
