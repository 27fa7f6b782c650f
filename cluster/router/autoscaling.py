"""How large the pools should be: pure functions of what their replicas say of themselves.

The pools are coupled by the price of a draft token (docs/architecture.md, "4. The price of a draft token"). A price
near 1 everywhere says that the verifiers are compute-bound: more of them are wanted, and drafters do nothing for them.
(Below the knee it says that drafts are slow or wrong, as those of a drafter that has just started: no verifier helps
there.) A low price with drafts that come late says that drafters are short. A service without requests keeps the fewest
of both, which may be no drafter.

Serve calls the policy several times a second and acts on its answer only when that has stayed the same for
`upscale_delay_s` or `downscale_delay_s`; bounds are Serve's too. So nothing here remembers or waits: what keeps the
pools from flapping is that a pool shrinks only as far as what stays would be filled to `DOWNSCALE_SHARE` of what makes
it grow, whatever that does to the price, and that between two prices neither pool grows by the price.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

FIRST_POOL = "default"  # of drafters: the one that `speculative_config` and `num_drafters` describe
DOWNSCALE_SHARE = 0.8  # of the targets: fewer replicas must hold the load with this much to spare
SPARE_FILL = 0.5  # of the knee: filled to less, verifiers may go whatever the price says
# Settings by which loads are divided.
_POSITIVE = ("requests_per_verifier", "kv_usage", "sessions_per_drafter", "queue_per_drafter", "max_late_share")


@dataclass(frozen=True, slots=True, order=True)
class ReplicaRange:
    """The fewest and the most replicas of a pool; both 0 where there is no pool."""

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
    """Why a pool should be as large as is said; in logs."""

    STEADY = "steady"  # neither more are needed nor would fewer do
    SILENT = "silent"  # no replica has said yet how it is
    IDLE = "idle"  # there are no requests
    FITS = "fits"  # fewer hold the load
    REQUESTS = "requests"
    KV_CACHE = "kv_cache"
    COMPUTE_BOUND = "compute_bound"  # the price is near 1 everywhere: of verifiers more, of drafters fewer
    PRICE = "price"  # too high to shrink the verifiers, or for more drafters; for a first one the knee counts, too
    SESSIONS = "sessions"
    DRAFT_QUEUE = "draft_queue"
    LATE_DRAFTS = "late_drafts"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiersLoad:
    """The verifiers, all together; figures are sums over those that report, unless said otherwise."""

    num_replicas: int  # wanted until now: those that start are among them
    num_ready: int  # that report
    num_with_knee: float  # that know from how many tokens on their steps are compute-bound
    num_requests: float = 0.0  # running and waiting
    kv_usage: float = 0.0  # 1: as much as one verifier holds
    knee_fill: float = 0.0  # tokens of a step, drafts left out, ÷ those at the knee; of those that know them
    price: float = 0.0  # mean, each at most 1; 0: of a verifier that has nothing to decode, or no step-time profile
    num_undrafted: float = 0.0  # requests that lack nothing for speculation but a drafter; at least 1 of a pool of none

    @property
    def num_filled(self) -> float | None:
        """How many verifiers the load would fill to the knee, if all are as those that know theirs; None: none does."""
        return self.knee_fill * self.num_ready / self.num_with_knee if self.num_with_knee > 0.0 else None

    @property
    def is_filled(self) -> bool | None:
        """Whether the load fills the verifiers to the knee; None: nobody knows."""
        return None if self.num_filled is None else self.num_filled >= self.num_ready

    def is_compute_bound(self, high_price: float) -> bool:
        """Return whether drafts do not pay for want of compute; where the knee is not known, by the price alone."""
        return self.price >= high_price and self.is_filled is not False


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftersLoad:
    """The drafters, all together; figures are sums over those that report, unless said otherwise."""

    num_replicas: int
    num_ready: int
    num_sessions: float = 0.0
    queue_depth: float = 0.0  # unanswered asks
    late_share: float = 0.0  # of the drafts that came: after their deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsLoad:
    verifiers: VerifiersLoad
    drafters: DraftersLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsPolicy:
    """What one replica should carry, and which prices move the pools. Raises `ValueError` naming the field."""

    verifiers: ReplicaRange = field(default_factory=lambda: ReplicaRange(1, 1))
    drafters: ReplicaRange = field(default_factory=lambda: ReplicaRange(1, 1))
    requests_per_verifier: float = 32.0
    kv_usage: float = 0.8
    sessions_per_drafter: float = 32.0
    queue_per_drafter: float = 16.0
    low_price: float = 0.5  # at most this: verifiers may shrink, drafters that are late or gone are worth having
    high_price: float = 0.9  # at least this, from the knee on: verifiers grow, drafters go
    max_late_share: float = 0.1
    growth: float = 1.5  # most times the ready replicas where the load does not say how many are needed

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
    """Return how large both pools should be and why, within the policy's ranges."""
    verifiers, verifiers_reason = _desired_verifiers(load.verifiers, policy)
    drafters, drafters_reason = _desired_drafters(load, policy)
    return PoolSizes(
        verifiers=PoolSize(num_replicas=policy.verifiers.clamp(verifiers), reason=verifiers_reason),
        drafters=PoolSize(num_replicas=policy.drafters.clamp(drafters), reason=drafters_reason),
    )


def desired_replicas(totals: Mapping[str, float], targets: Mapping[str, float], num_replicas: int) -> int:
    """Return how many replicas a pool on its own needs for its `totals`, at least one.

    The figure that needs the most replicas decides.
    """
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
        # counted from those that are ready: while more start, the price stays as it is and asks for no more of them
        return max(wanted, _grown(load.num_ready, load.num_filled or 0.0, policy)), ScalingReason.COMPUTE_BOUND
    # Below the knee the price may be 0 and above it 1, so that what stays is to be below it as well; a request cannot
    # be shared, so that where a single one is beyond the knee more verifiers than requests are of no use
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
        is_helped = verifiers.num_ready < verifiers.num_replicas  # those that start will bring the price down
        return wanted if is_helped else policy.drafters.fewest, ScalingReason.COMPUTE_BOUND
    if drafters.num_ready == 0 < wanted:  # stopped now, they would be started again for the next request
        return wanted, ScalingReason.SILENT
    if verifiers.num_requests == 0:
        return policy.drafters.fewest, ScalingReason.IDLE
    need, reason = max(
        ((drafters.num_sessions + verifiers.num_undrafted) / policy.sessions_per_drafter, ScalingReason.SESSIONS),
        (drafters.queue_depth / policy.queue_per_drafter, ScalingReason.DRAFT_QUEUE),
    )
    # without drafts nobody learns what they would lose, so that the price may fall where the load is what it was
    if wanted == 0 and (verifiers.price > policy.low_price or verifiers.is_filled):
        return 0, ScalingReason.PRICE
    if need > wanted:
        if verifiers.price >= policy.high_price and drafters.queue_depth <= drafters.num_ready:
            return wanted, ScalingReason.PRICE  # nobody waits for another's draft: more of what does not pay would not
        return math.ceil(need), reason
    if drafters.late_share > policy.max_late_share:
        return _for_late_drafts(load, policy), ScalingReason.LATE_DRAFTS
    # never the last one while there are requests: without it nobody would say whether it is worth having
    fewer = max(min(wanted, 1), _fewer(need, wanted))
    return fewer, ScalingReason.FITS if fewer < wanted else ScalingReason.STEADY


def _for_late_drafts(load: PoolsLoad, policy: PoolsPolicy) -> int:
    """Return the drafters for drafts that come late: more only where asks wait for one another.

    Drafts that are late without a queue have a slow link or a slow drafter, and another one is as slow.
    """
    drafters = load.drafters
    if load.verifiers.price > policy.low_price or drafters.queue_depth <= drafters.num_ready:
        return drafters.num_replicas
    return max(drafters.num_replicas, _grown(drafters.num_ready, 0.0, policy))


def _grown(num_ready: int, need: float, policy: PoolsPolicy) -> int:
    """Return a few more than are ready: as many as are needed, if that is known, but not all at once."""
    return min(max(num_ready + 1, math.ceil(need)), math.ceil(num_ready * policy.growth))


def _fewer(need: float, num_replicas: int) -> int:
    """Return as few of the replicas as the need fills to `DOWNSCALE_SHARE`."""
    return min(num_replicas, math.ceil(need / DOWNSCALE_SHARE))
