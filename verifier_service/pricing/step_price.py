"""The price of a draft position: the survival from which drafting it would have paid in recent steps.

Each past step tells, for every price of a grid, how many of its slots have a higher survival, how many tokens these are
expected to bring, and how long the step takes with them. The price with the most tokens per second over recent steps
holds; later steps count more. No shape of step times is assumed: stairs, knees and a wait that begins with the first
slot all show, because every price is tried. A slot is a draft position or a tree node. A step's own tokens, prefill
among them, count as one token each; so a step full of prompts makes drafts dear, and drafts do not delay first tokens.

Before a draft arrives, a slot's survival is estimated from its request's history; after, from the draft's confidences.
As soon as one slot is asked for, the step pays the full wait, whatever the draft then turns out to be. (Charged to the
verified slots alone, the wait would seem free at a price that only good drafts exceed, and at that price nothing is
asked for.)

The price of a step comes from earlier steps alone: an optimum over its own survivals would depend on the drawn tokens
(docs/exactness.md, "The trap").
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from outrider.verifier_service.messages.engine import NEVER
from outrider.verifier_service.pricing.cost_model import CostModel, StepShape
from outrider.verifier_service.pricing.fading import Fading
from outrider.verifier_service.pricing.request_table import Floats, Ints

# 3 % apart; closer below 0.1, where one request on a memory-bound machine has its long drafts
GRID = np.array([*(0.0, 0.01, 0.02, 0.03, 0.045, 0.06, 0.08), *(0.1 + 0.03 * step for step in range(30)), NEVER])
WINDOW_STEPS = 32.0  # the memory: about a second of a large model, in which the load may change
FADE = 1.0 - 1.0 / WINDOW_STEPS  # per step
MIN_GAIN = 1e-3  # of tokens per second, that drafts must bring: step times are not known more exactly
TIE = 2e-4  # of tokens per second: prices within it are equal, and the middle one holds
Settle = Callable[[float, float, bool], float]


class StepPrice:
    """The price that was best over recent steps. Before the first step it is 0: all is admitted."""

    def __init__(self, cost: CostModel, settle: Settle | None = None) -> None:
        """`settle` maps the last price, the best one and whether drafts can pay to the next price; None: the best."""
        self._cost = cost
        self._settle = settle
        self._gains = Fading(FADE, 0.0, np.zeros(len(GRID)))  # log (tokens per second at this price / without drafts)
        self._can_pay = True  # in the last step with slots, if drafts came at once
        self.value = 0.0  # the survival that a position must exceed in the next step, 0 to 1

    @property
    def is_new(self) -> bool:
        """Whether no step was observed yet."""
        return bool(self._gains.weight == 0.0)

    def num_paying(self, survivals: Floats) -> Ints:
        """Return the number of leading positions above the price, of each row, which must not rise and end with a 0."""
        return (survivals > self.value).argmin(axis=-1)

    def observe(
        self,
        base: StepShape,
        num_decoding: int,
        survivals: Floats,
        before: Floats,
        exposed_s: float = 0.0,
        num_steps: int = 1,
    ) -> None:
        """Learn from a past step, or `num_steps` equal ones: its shape without drafts and the slots on offer.

        Of each slot, `survivals` has what it is by the draft, `before` what was estimated before that arrived. If any
        slot is asked for, the step waits `exposed_s` for drafts. A step without decoding requests or without slots
        teaches nothing.
        """
        if num_decoding < 1:
            return
        if len(survivals):
            self._gains.add(self._gains_at(base, survivals, before, exposed_s), num_steps)
        if not self.is_new:
            best = self._best()
            self.value = best if self._settle is None else self._settle(self.value, best, self._can_pay)

    def _gains_at(self, base: StepShape, survivals: Floats, before: Floats, exposed_s: float) -> Floats:
        """Return the log throughput gain over no drafts for each price of the grid, by the step costs known now."""
        seconds = self._cost.seconds_with(base, len(survivals))
        plain = base.num_tokens / seconds[0]
        self._can_pay = bool((base.num_tokens + survivals.max()) / seconds[1] > plain)
        # a slot is left out from the first price on that is not below it
        left_out = np.searchsorted(GRID, np.minimum(survivals, before))
        counts, worths = (_sums_above(left_out, weights) for weights in (None, survivals))
        took_s = seconds[counts.astype(np.int64)]
        gains = np.log((base.num_tokens + worths) / ((took_s + exposed_s) * plain))
        return np.where(before.max() > GRID, gains, 0.0)  # at a higher price nothing is asked for

    def _best(self) -> float:
        """Return the best price; of a stretch of equal ones the middle, where noise does the least."""
        gains: list[float] = self._gains.total.tolist()
        best = max(gains)
        if best <= gains[-1] + MIN_GAIN * self._gains.weight:
            return NEVER
        tie = TIE * self._gains.weight
        low = high = gains.index(best)
        while low > 0 and gains[low - 1] >= best - tie:
            low -= 1
        while high + 1 < len(GRID) and gains[high + 1] >= best - tie:
            high += 1
        return float(GRID[(low + high) // 2])


def _sums_above(left_out: Ints, weights: Floats | None) -> Floats:
    """Return, for each price of the grid, the sum over the slots that it does not leave out."""
    at = np.bincount(left_out, weights, len(GRID) + 1)
    return np.add.accumulate(at[:0:-1])[::-1]
