"""How many replicas a pool should have: a pure function of what its replicas report of themselves.

Serve calls the policy several times a second and acts on its answer only when that has stayed the same for
`upscale_delay_s` or `downscale_delay_s`; bounds are Serve's too. Requests come in on ports of our own, so Serve's own
count of ongoing requests says nothing: every replica exports its load by `record_autoscaling_stats`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

DOWNSCALE_SHARE = 0.8  # of the targets: fewer replicas must hold the load with this much to spare


@dataclass(frozen=True, slots=True, order=True)
class ReplicaRange:
    """The fewest and the most replicas of a pool; both 0 where there is no pool."""

    fewest: int
    most: int

    def __post_init__(self) -> None:
        if not (1 <= self.fewest <= self.most or self.fewest == self.most == 0):
            raise ValueError("must be a number, or min:max with 1 <= min <= max")

    @classmethod
    def parse(cls, value: int | str) -> ReplicaRange:
        """Read a number or "min:max"; raises `ValueError`."""
        fewest, colon, most = str(value).partition(":")
        try:
            return cls(int(fewest), int(most if colon else fewest))
        except ValueError as error:
            raise ValueError(f"must be a number, or min:max with 1 <= min <= max, not {value!r}") from error

    @property
    def is_fixed(self) -> bool:
        return self.fewest == self.most


class ScalingContext(Protocol):
    """The part of Serve's `AutoscalingContext` that counts here."""

    current_num_replicas: int
    target_num_replicas: int

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None:
        """Return {metric: {replica: mean over the look-back period}}."""


@dataclass(frozen=True, slots=True)
class PoolPolicy:
    """Scale a pool so that no exported figure exceeds its target per replica."""

    targets: Mapping[str, float]

    def __call__(self, context: ScalingContext) -> tuple[int, dict[str, Any]]:
        """Return the wanted number of replicas, and no state of its own; a pool that says nothing is left alone."""
        metrics = context.aggregated_metrics or {}
        totals = {name: sum(metrics[name].values()) for name in self.targets if metrics.get(name)}
        if not totals:
            return context.target_num_replicas, {}
        return desired_replicas(totals, self.targets, context.target_num_replicas), {}


def desired_replicas(totals: Mapping[str, float], targets: Mapping[str, float], num_replicas: int) -> int:
    """Return how many replicas the pool's `totals` need, at least one.

    The figure that needs the most replicas decides. The pool shrinks only as far as what stays would be filled to
    `DOWNSCALE_SHARE`, so that it does not grow again at once.
    """
    need = max(total / targets[name] for name, total in totals.items())
    if need > num_replicas:
        return math.ceil(need)
    return max(1, min(num_replicas, math.ceil(need / DOWNSCALE_SHARE)))
