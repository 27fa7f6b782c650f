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

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

from outrider.verifier_service.messages.engine import NEVER
from outrider.verifier_service.pricing.cost_model import CostModel, StepShape

# 3 % apart; closer below 0.1, where one request on a memory-bound machine has its long drafts
GRID = (*(0.0, 0.01, 0.02, 0.03, 0.045, 0.06, 0.08), *(0.1 + 0.03 * step for step in range(30)), NEVER)
WINDOW_STEPS = 32.0  # the memory: about a second of a large model, in which the load may change
FADE = 1.0 - 1.0 / WINDOW_STEPS  # per step
MIN_GAIN = 1e-3  # of tokens per second, that drafts must bring: step times are not known more exactly
TIE = 2e-4  # of tokens per second: prices within it are equal, and the middle one holds
Settle = Callable[[float, float, bool], float]
Slot = tuple[float, float]  # survival by the draft, and as estimated before it arrived


def fade_over(num_steps: int) -> tuple[float, float]:
    """Return the fade of earlier sums over this many equal steps, and the steps' weight together."""
    fade = FADE**num_steps
    return fade, (1.0 - fade) / (1.0 - FADE)


class StepPrice:
    """The price that was best over recent steps. Before the first step it is 0: all is admitted."""

    def __init__(self, cost: CostModel, settle: Settle | None = None) -> None:
        """`settle` maps the last price, the best one and whether drafts can pay to the next price; None: the best."""
        self._cost = cost
        self._settle = settle
        self._gains = [0.0] * len(GRID)  # sums of log (tokens per second at this price / without drafts)
        self._num_steps = 0.0  # the weight of the sums
        self._can_pay = True  # in the last step with slots, if drafts came at once
        self.value = 0.0  # the survival that a position must exceed in the next step, 0 to 1

    @property
    def is_new(self) -> bool:
        """Whether no step was observed yet."""
        return self._num_steps == 0.0

    def num_paying(self, survivals: Sequence[float]) -> int:
        """Return the number of leading positions above the price; survivals must not rise."""
        for place, survival in enumerate(survivals):
            if survival <= self.value:
                return place
        return len(survivals)

    def observe(
        self,
        base: StepShape,
        num_decoding: int,
        slots: Sequence[Slot],
        exposed_s: float = 0.0,
        num_steps: int = 1,
    ) -> None:
        """Learn from a past step, or `num_steps` equal ones: its shape without drafts and the slots on offer.

        If any slot is asked for, the step waits `exposed_s` for drafts. A step without decoding requests or without
        slots teaches nothing.
        """
        if num_decoding < 1:
            return
        if slots:
            best = max(survival for survival, _ in slots)
            self._can_pay = self._cost.best_length(base, (best,)) > 0
            fade, weight = fade_over(num_steps)
            gains = self.gains_at(base, slots, exposed_s)
            self._gains = [fade * old + weight * new for old, new in zip(self._gains, gains, strict=True)]
            self._num_steps = fade * self._num_steps + weight
        if not self.is_new:
            best = self._best()
            self.value = best if self._settle is None else self._settle(self.value, best, self._can_pay)

    def gains_at(self, base: StepShape, slots: Sequence[Slot], exposed_s: float) -> list[float]:
        """Return the log throughput gain over no drafts for each price of the grid, by the step costs known now."""
        seconds = self._cost.seconds_with(base, len(slots))
        plain = math.log(base.num_tokens / seconds[0])
        num_asked = bisect_left(GRID, max(before for _, before in slots))
        rates = _rates([(min(slot), slot[0]) for slot in slots], base.num_tokens, seconds, num_asked)
        gains = [rate - plain - math.log1p(exposed_s / seconds[count]) for rate, count in rates]
        return gains + [0.0] * (len(GRID) - num_asked)

    def _best(self) -> float:
        """Return the best price; of a stretch of equal ones the middle, where noise does the least."""
        gains = self._gains
        best = max(gains)
        if best <= gains[-1] + MIN_GAIN * self._num_steps:
            return NEVER
        tie = TIE * self._num_steps
        top = gains.index(best)
        low = high = top
        while low > 0 and gains[low - 1] >= best - tie:
            low -= 1
        while high + 1 < len(GRID) and gains[high + 1] >= best - tie:
            high += 1
        return GRID[(low + high) // 2]


def _rates(
    slots: Sequence[Slot], num_tokens: int, seconds: Sequence[float], num_prices: int
) -> list[tuple[float, int]]:
    """Return, for each of the grid's first prices, the logarithm of tokens per second and the number of slots.

    `slots`: the price from which a slot is left out, and its survival; `seconds[n]`: the step's time with n slots
    beside its own `num_tokens`.
    """
    falling = sorted(slots, reverse=True)
    negated = [-last for last, _ in falling]
    tokens = list(accumulate((survival for _, survival in falling), initial=float(num_tokens)))
    rates: list[tuple[float, int]] = []
    for price in GRID[:num_prices]:
        count = bisect_left(negated, -price)  # slots above the price; an equal one is not
        if rates and count == rates[-1][1]:  # most prices admit as many as the one before
            rates.append(rates[-1])
        else:
            rates.append((math.log(tokens[count] / seconds[count]), count))
    return rates
