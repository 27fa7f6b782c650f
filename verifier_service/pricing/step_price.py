"""The price of a draft position: what it would have paid to ask for in the steps before this one.

Every past step tells, for each price of a grid, how many of the slots on offer survive it, how many tokens they are
expected to bring and how long the step takes with them. The price is the one with the most tokens per second over these
steps, the later ones counting more. Nothing is assumed of the shape of step times: every price is tried, so stairs,
knees and a wait that starts with the first slot are all seen. Slots are draft positions (or tree nodes) with their
survivals; a step's own tokens, prefill among them, count as one token each, so that a step which is busy with prompts
makes drafts dear and they do not starve time to first token.

Before its draft is seen, a slot is worth what its request's history says; after, what the draft's confidences say. As
soon as one slot is requested, the step pays the full wait, whatever the drafts turn out to be worth. (Charged to the
verified slots alone, waiting would seem free at a price that only good drafts exceed; at that price nothing is
requested.)

The price of a step comes from earlier steps alone: an optimum over its own survivals would depend on what its drafts
drew (docs/architecture.md, "The trap").
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

from outrider.verifier_service.messages.engine import NEVER
from outrider.verifier_service.pricing.cost_model import CostModel, StepShape

# Prices that are tried: 3 % apart, closer below 0.1, where one request on a memory-bound machine has its long drafts.
GRID = (*(0.0, 0.01, 0.02, 0.03, 0.045, 0.06, 0.08), *(0.1 + 0.03 * step for step in range(30)), NEVER)
WINDOW_STEPS = 32.0  # how many steps count, in all: about a second of a large model, in which a load may have changed
FADE = 1.0 - 1.0 / WINDOW_STEPS  # per step: each one counts less than the next
MIN_GAIN = 1e-3  # of tokens per second: drafts that gain less are not worth it: step times are no better known
TIE = 2e-4  # prices whose tokens per second differ by less are equals: of those the middle one holds
Settle = Callable[[float, float], float]
Slot = tuple[float, float]  # the worth of a draft position: with its draft, and before its draft was there


def fade_over(num_steps: int) -> tuple[float, float]:
    """Return what is left of earlier sums after so many steps that are alike, and what these weigh together."""
    fade = FADE**num_steps
    return fade, (1.0 - fade) / (1.0 - FADE)


class StepPrice:
    """Find the price that would have been best over recent steps; 0, all is admitted, before the first."""

    def __init__(self, cost: CostModel, settle: Settle | None = None) -> None:
        """`settle` maps the last price and the best one to the next; None: the best."""
        self._cost = cost
        self._settle = settle
        self._gains = [0.0] * len(GRID)  # sums of log (tokens per second at this price / without drafts)
        self._num_steps = 0.0  # what the sums weigh
        self._price = 0.0

    @property
    def price(self) -> float:
        """The survival that a position must exceed in the next step, 0 to 1."""
        return self._price

    @property
    def is_new(self) -> bool:
        """Whether no step has said anything yet."""
        return self._num_steps == 0.0

    def num_paying(self, worths: Sequence[float]) -> int:
        """Return the number of leading positions worth more than the price; `worths` must not rise."""
        for place, worth in enumerate(worths):
            if worth <= self._price:
                return place
        return len(worths)

    def observe(
        self,
        base: StepShape,
        num_decoding: int,
        slots: Sequence[Slot],
        exposed_s: float = 0.0,
        num_steps: int = 1,
    ) -> None:
        """Take in a past step, or so many that were alike: its shape without drafts and what was on offer.

        As soon as one slot is asked for, drafts hold the step up by `exposed_s`. A step in which no request was
        decoding, or in which nothing was on offer, says nothing of drafts.
        """
        if num_decoding < 1:
            return
        if slots:
            fade, weight = fade_over(num_steps)
            gains = self.gains_at(base, slots, exposed_s)
            self._gains = [fade * old + weight * new for old, new in zip(self._gains, gains, strict=True)]
            self._num_steps = fade * self._num_steps + weight
        if not self.is_new:
            best = self._best(self._gains)
            self._price = best if self._settle is None else self._settle(self._price, best)

    def gains_at(self, base: StepShape, slots: Sequence[Slot], exposed_s: float) -> list[float]:
        """Return the log throughput gain over no drafts of each price of the grid, for such a step, by today's costs."""
        seconds = self._cost.seconds_with(base, len(slots))
        plain = math.log(base.num_tokens / seconds[0])
        num_asked = bisect_left(GRID, max(before for _, before in slots))
        rates = _rates([(min(slot), slot[0]) for slot in slots], base.num_tokens, seconds, num_asked)
        gains = [rate - plain - math.log1p(exposed_s / seconds[count]) for rate, count in rates]
        return gains + [0.0] * (len(GRID) - num_asked)

    def _best(self, gains: Sequence[float]) -> float:
        """Return the best price; where a stretch of prices is as good, one in the middle of it, as noise is then."""
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

    `slots` are pairs of the price from which on one takes no part and what it is worth; `seconds` are a step's times
    with so many of them, beside its `num_tokens` own.
    """
    falling = sorted(slots, reverse=True)
    negated = [-last for last, _ in falling]
    tokens = list(accumulate((worth for _, worth in falling), initial=float(num_tokens)))
    rates: list[tuple[float, int]] = []
    for price in GRID[:num_prices]:
        count = bisect_left(negated, -price)  # slots above the price: equals are not
        if rates and count == rates[-1][1]:  # most prices are exceeded by as many as the one before
            rates.append(rates[-1])
        else:
            rates.append((math.log(tokens[count] / seconds[count]), count))
    return rates
