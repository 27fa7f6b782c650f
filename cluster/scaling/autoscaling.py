"""How large the pools should be: pure functions of the replicas' reports.

The price of a draft token couples the pools (docs/architecture.md, "4. The price of a draft token"):
- A price near 1 everywhere, from the knee on: verifiers are compute-bound. More of them are wanted; drafters are of no
  use. Below the knee the same price means slow or wrong drafts (a drafter has just started), and no verifier helps.
- A low price and late drafts: too few drafters.
- No requests: the fewest of both, which may be no drafter.

Serve calls the policy several times a second, and acts once the answer has stayed the same for `upscale_delay_s` or
`downscale_delay_s`; Serve also applies the bounds. So nothing here remembers or waits. Two rules prevent flapping: a
pool shrinks only until the rest would be filled to `DOWNSCALE_SHARE` of the load that makes it grow, and between the
low and the high price no pool grows by the price.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

FIRST_POOL = "default"  # the drafter pool of `speculative_config` and `num_drafters`
DOWNSCALE_SHARE = 0.8  # of the targets: after a downscale, load per replica is at most this share of them
SPARE_FILL = 0.5  # of the knee: verifiers filled to less may go, whatever the price
# Settings that are divisors of loads.
_POSITIVE = ("requests_per_verifier", "kv_usage", "sessions_per_drafter", "queue_per_drafter", "max_late_share")


@dataclass(frozen=True, slots=True, order=True)
class ReplicaRange:
    """The fewest and the most replicas of a pool; both 0: there is no pool."""

    fewest: int
    most: int

    def __post_init__(self) -> None:
        if not 0 <= self.fewest <= self.most:
            raise ValueError("must be a number, or min:max with 0 <= min <= max")

    @classmethod
    def parse(cls, value: int | str) -> ReplicaRange:
        """Read a number or "min:max"; raises `ValueError`."""
        fewest, colon, most = str(value).partition(":")
        try:
            return cls(int(fewest), int(most if colon else fewest))
        except ValueError as error:
            raise ValueError(f"must be a number, or min:max with 0 <= min <= max, not {value!r}") from error

    def __str__(self) -> str:
        return str(self.most) if self.is_fixed else f"{self.fewest}:{self.most}"

    @property
    def is_fixed(self) -> bool:
        return self.fewest == self.most

    def clamp(self, num_replicas: int) -> int:
        """Return the nearest number within the range."""
        return max(self.fewest, min(self.most, num_replicas))


class ScalingReason(enum.StrEnum):
    """Why a pool should have its size; in logs."""

    STEADY = "steady"  # no more are needed, and fewer would not do
    SILENT = "silent"  # no replica has reported yet
    IDLE = "idle"  # there are no requests
    FITS = "fits"  # fewer hold the load
    REQUESTS = "requests"
    KV_CACHE = "kv_cache"
    COMPUTE_BOUND = "compute_bound"  # the price is near 1 everywhere: more verifiers, fewer drafters
    PRICE = "price"  # too high for fewer verifiers or more drafters; for a first drafter, the knee counts too
    SESSIONS = "sessions"
    DRAFT_QUEUE = "draft_queue"
    LATE_DRAFTS = "late_drafts"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiersLoad:
    """The verifiers, all together; figures are sums over those that report, except where noted."""

    num_replicas: int  # wanted until now, including those that are starting
    num_ready: int  # that report
    num_with_knee: float  # that know their knee: the number of tokens from which a step is compute-bound
    num_requests: float = 0.0  # running and waiting
    kv_usage: float = 0.0  # 1: one full verifier
    knee_fill: float = 0.0  # tokens of a step without drafts ÷ the knee; of the verifiers that know it
    price: float = 0.0  # mean of prices clamped to 1; without decoding requests or a step-time profile, 0
    num_undrafted: float = 0.0  # requests that lack only a drafter; at least 1 for a pool without one

    @property
    def num_filled(self) -> float | None:
        """Verifiers that the load would fill to the knee, if all had the known ones' mean; None: no knee is known."""
        return self.knee_fill * self.num_ready / self.num_with_knee if self.num_with_knee > 0.0 else None

    @property
    def is_filled(self) -> bool | None:
        """Whether the load fills the verifiers to the knee; None: no knee is known."""
        return None if self.num_filled is None else self.num_filled >= self.num_ready

    def is_compute_bound(self, high_price: float) -> bool:
        """Return whether drafts do not pay since compute is short; without a known knee, by the price alone."""
        return self.price >= high_price and self.is_filled is not False


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftersLoad:
    """The drafters, all together; figures are sums over those that report, except where noted."""

    num_replicas: int
    num_ready: int
    num_sessions: float = 0.0
    queue_depth: float = 0.0  # unanswered asks
    late_share: float = 0.0  # of the drafts that arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsLoad:
    verifiers: VerifiersLoad
    drafters: DraftersLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsPolicy:
    """Load targets per replica, and the prices that move the pools. Raises `ValueError` naming the field."""

    verifiers: ReplicaRange = field(default_factory=lambda: ReplicaRange(1, 1))
    drafters: ReplicaRange = field(default_factory=lambda: ReplicaRange(1, 1))
    requests_per_verifier: float = 32.0
    kv_usage: float = 0.8
    sessions_per_drafter: float = 32.0
    queue_per_drafter: float = 16.0
    low_price: float = 0.5  # at most this: verifiers may shrink, and missing or late drafters are worth adding
    high_price: float = 0.9  # at least this, from the knee on: verifiers grow, drafters shrink
    max_late_share: float = 0.1
    growth: float = 1.5  # factor on the ready replicas where the load does not tell how many are needed

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive")
        if not 0.0 <= self.low_price < self.high_price:
            raise ValueError("low_price must be at least 0 and below high_price")
        if not self.growth > 1.0:
            raise ValueError("growth must be above 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    num_replicas: int
    reason: ScalingReason


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    verifiers: PoolSize
    drafters: PoolSize


def desired_pools(load: PoolsLoad, policy: PoolsPolicy) -> PoolSizes:
    """Return both pools' sizes and why, within the policy's ranges."""
    verifiers, verifiers_reason = _desired_verifiers(load.verifiers, policy)
    drafters, drafters_reason = _desired_drafters(load, policy)
    return PoolSizes(
        verifiers=PoolSize(num_replicas=policy.verifiers.clamp(verifiers), reason=verifiers_reason),
        drafters=PoolSize(num_replicas=policy.drafters.clamp(drafters), reason=drafters_reason),
    )


def desired_replicas(totals: Mapping[str, float], targets: Mapping[str, float], num_replicas: int) -> int:
    """Return how many replicas a pool needs for its own `totals`: by the figure that needs the most, at least one."""
    need = max(total / targets[name] for name, total in totals.items())
    return max(1, math.ceil(need) if need > num_replicas else _fewer(need, num_replicas))


def _desired_verifiers(load: VerifiersLoad, policy: PoolsPolicy) -> tuple[int, ScalingReason]:
    wanted = load.num_replicas
    if load.num_ready == 0:
        return wanted, ScalingReason.SILENT
    if load.num_requests == 0:
        return policy.verifiers.fewest, ScalingReason.IDLE
    need, reason = max(
        (load.num_requests / policy.requests_per_verifier, ScalingReason.REQUESTS),
        (load.kv_usage / policy.kv_usage, ScalingReason.KV_CACHE),
    )
    if need > wanted:
        return math.ceil(need), reason
    if load.is_compute_bound(policy.high_price):
        # counted from the ready ones: until those that start are ready, the price stays the same
        return max(wanted, _grown(load.num_ready, load.num_filled or 0.0, policy)), ScalingReason.COMPUTE_BOUND
    # The price may jump from 0 to 1 at the knee: the remaining verifiers must stay below the knee too. A request runs
    # on one verifier: more verifiers than requests are of no use, even if one request alone is beyond the knee.
    filled, stays = load.num_filled, ScalingReason.STEADY
    if load.price > policy.low_price:
        stays = ScalingReason.PRICE
        if filled is None:
            return wanted, stays
        filled /= SPARE_FILL
    fewer = min(_fewer(max(need, filled or 0.0), wanted), math.ceil(load.num_requests))
    return fewer, ScalingReason.FITS if fewer < wanted else stays


def _desired_drafters(load: PoolsLoad, policy: PoolsPolicy) -> tuple[int, ScalingReason]:
    verifiers, drafters = load.verifiers, load.drafters
    wanted = drafters.num_replicas
    if verifiers.num_ready == 0:
        return wanted, ScalingReason.SILENT
    if verifiers.num_requests > 0 and verifiers.is_compute_bound(policy.high_price):
        are_more_starting = verifiers.num_ready < verifiers.num_replicas  # they will lower the price
        return wanted if are_more_starting else policy.drafters.fewest, ScalingReason.COMPUTE_BOUND
    if drafters.num_ready == 0 < wanted:  # a starting drafter is not stopped: the next request would need it
        return wanted, ScalingReason.SILENT
    if verifiers.num_requests == 0:
        return policy.drafters.fewest, ScalingReason.IDLE
    need, reason = max(
        ((drafters.num_sessions + verifiers.num_undrafted) / policy.sessions_per_drafter, ScalingReason.SESSIONS),
        (drafters.queue_depth / policy.queue_per_drafter, ScalingReason.DRAFT_QUEUE),
    )
    # without drafts the price may fall at an unchanged load: the cost of drafting is no longer observed
    if wanted == 0 and (verifiers.price > policy.low_price or verifiers.is_filled):
        return 0, ScalingReason.PRICE
    if need > wanted:
        if verifiers.price >= policy.high_price and drafters.queue_depth <= drafters.num_ready:
            return wanted, ScalingReason.PRICE  # no queue: one more drafter would not make drafts pay
        return math.ceil(need), reason
    if drafters.late_share > policy.max_late_share:
        return _for_late_drafts(load, policy), ScalingReason.LATE_DRAFTS
    # the last one stays while there are requests: it is the only evidence of whether drafts pay
    fewer = max(min(wanted, 1), _fewer(need, wanted))
    return fewer, ScalingReason.FITS if fewer < wanted else ScalingReason.STEADY


def _for_late_drafts(load: PoolsLoad, policy: PoolsPolicy) -> int:
    """Return the number of drafters where drafts are late: more only if asks queue.

    Without a queue the link or the drafter is slow, and one more would be as slow.
    """
    drafters = load.drafters
    if load.verifiers.price > policy.low_price or drafters.queue_depth <= drafters.num_ready:
        return drafters.num_replicas
    return max(drafters.num_replicas, _grown(drafters.num_ready, 0.0, policy))


def _grown(num_ready: int, need: float, policy: PoolsPolicy) -> int:
    """Return more than are ready: the known need, at most `growth` times the ready ones."""
    return min(max(num_ready + 1, math.ceil(need)), math.ceil(num_ready * policy.growth))


def _fewer(need: float, num_replicas: int) -> int:
    """Return the fewest replicas that the need fills to at most `DOWNSCALE_SHARE`."""
    return min(num_replicas, math.ceil(need / DOWNSCALE_SHARE))
