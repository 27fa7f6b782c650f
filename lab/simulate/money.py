"""What devices cost, and what tokens cost on them.

Prices are per device and hour, in one currency. The defaults are an assumption: what one lender listed at one time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from outrider.lab.simulate.accelerators import ACCELERATORS

# US dollars. RunPod's lowest offers of March 2026, by https://deploybase.ai/articles/runpod-gpu-pricing. RunPod has no
# A10G: the on-demand price of AWS's g5.xlarge in us-east-1, June 2026, a dearer kind of offer. CPU: a guess of ours for
# one socket, for nobody lends one alone.
PRICES_PER_HOUR: Mapping[str, float] = MappingProxyType(
    {"H100": 2.69, "H200": 3.59, "B200": 5.98, "L4": 0.44, "A10G": 1.006, "L40S": 0.79, "CPU": 1.0}
)


def prices_with(changes: Sequence[str]) -> dict[str, float]:
    """Return the default prices with changes such as `H100=2.5`; raise `ValueError` on one that cannot be read."""
    prices = dict(PRICES_PER_HOUR)
    for change in changes:
        name, _, text = change.partition("=")
        try:
            price = float(text)
        except ValueError:
            price = math.nan
        if name not in ACCELERATORS or not 0.0 < price < math.inf:
            raise ValueError(f"price_per_hour: {change!r} is not NAME=PRICE with one of {', '.join(ACCELERATORS)}")
        prices[name] = price
    return prices


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """The devices of a fleet and the price of each kind per hour."""

    num_verifier_devices: int
    num_drafter_devices: int
    verifier_price: float
    drafter_price: float

    @property
    def num_devices(self) -> int:
        return self.num_verifier_devices + self.num_drafter_devices

    @property
    def price_per_hour(self) -> float:
        return self.num_verifier_devices * self.verifier_price + self.num_drafter_devices * self.drafter_price


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """A fleet's tokens per second, shared out three ways."""

    per_verifier_device: float
    per_device: float
    per_price: float  # per unit of price and hour: 1 is 3,600 tokens for each unit that is paid

    @classmethod
    def of(cls, tokens_per_s: float, bill: Bill) -> Worth:
        return cls(
            per_verifier_device=tokens_per_s / bill.num_verifier_devices,
            per_device=tokens_per_s / bill.num_devices,
            per_price=tokens_per_s / bill.price_per_hour,
        )


def break_even_ratio(tokens_per_s: float, bill: Bill, rival_per_verifier_device: float) -> float:
    """Return up to which price a drafter's device may cost, in those of a verifier's device, before a rival wins.

    The rival has no drafters and gives so many tokens per second and device. Negative or 0: it wins even where
    drafters cost nothing. Solves `tokens / (V + D * ratio) = rival`, which falls as the ratio grows.
    """
    affordable = tokens_per_s / rival_per_verifier_device  # verifiers' devices, in price
    return (affordable - bill.num_verifier_devices) / bill.num_drafter_devices
