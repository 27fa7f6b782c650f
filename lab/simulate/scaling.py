"""The autoscaler in virtual time: `autoscaling.desired_pools`, Serve's delays, and replicas that take time to start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.cluster.router.fleet import DrafterReport, VerifierReport
from outrider.cluster.scaling.autoscaling import (
    DraftersLoad,
    PoolSizes,
    PoolsLoad,
    PoolsPolicy,
    VerifiersLoad,
    desired_pools,
)
from outrider.cluster.scaling.figures import knee_fill
from outrider.verifier_service.messages.counts import EngineCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingOptions:
    """The autoscaler's policy and what surrounds it. Raises `ValueError` naming the field that is out of range."""

    policy: PoolsPolicy
    interval_s: float = 2.0
    upscale_delay_s: float = 5.0  # a wish for more must have lasted so long
    downscale_delay_s: float = 60.0
    start_s: float = 30.0  # from the decision until a replica serves

    def __post_init__(self) -> None:
        if not self.interval_s > 0:
            raise ValueError("interval_s must be positive")
        for name in ("upscale_delay_s", "downscale_delay_s", "start_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0")


@dataclass(slots=True)
class DelayedTarget:
    """A number of replicas that follows wishes which have lasted, as Serve's does."""

    num_replicas: int
    _direction: int = field(default=0, init=False)
    _since_s: float = field(default=0.0, init=False)

    def after(self, wanted: int, now_s: float, options: ScalingOptions) -> int:
        """Take in a wish; return the target."""
        direction = (wanted > self.num_replicas) - (wanted < self.num_replicas)
        if direction != self._direction:
            self._direction, self._since_s = direction, now_s
        delay_s = options.upscale_delay_s if direction > 0 else options.downscale_delay_s
        if direction and now_s - self._since_s >= delay_s:
            self.num_replicas, self._direction = wanted, 0
        return self.num_replicas


class PoolScaler:
    """Both pools' targets over time."""

    def __init__(self, options: ScalingOptions, *, num_verifiers: int, num_drafters: int) -> None:
        self.options = options
        self.verifiers, self.drafters = DelayedTarget(num_verifiers), DelayedTarget(num_drafters)
        self._fills: dict[str, tuple[EngineCounters, float]] = {}  # of the verifiers, at their last report

    def scale(self, load: PoolsLoad, now_s: float) -> PoolSizes:
        """Move the targets; return what the policy said, with its reasons."""
        sizes = desired_pools(load, self.options.policy)
        self.verifiers.after(sizes.verifiers.num_replicas, now_s, self.options)
        self.drafters.after(sizes.drafters.num_replicas, now_s, self.options)
        return sizes

    def load_of(
        self, verifiers: Sequence[VerifierReport], drafters: Sequence[DrafterReport], num_undrafted: int
    ) -> PoolsLoad:
        """Sum up reports; a verifier without requests has price 0."""
        num_ready = len(verifiers)
        prices = (min(1.0, report.load.price or 0.0) for report in verifiers if report.load.num_decoding)
        self._fills = {report.verifier_id: (report.load.counters, self._knee_fill(report)) for report in verifiers}
        return PoolsLoad(
            verifiers=VerifiersLoad(
                num_replicas=self.verifiers.num_replicas,
                num_ready=num_ready,
                num_with_knee=sum(bool(report.load.knee) for report in verifiers),
                num_requests=sum(report.load.num_running + report.load.num_waiting for report in verifiers),
                kv_usage=sum(report.load.kv_usage for report in verifiers),
                knee_fill=sum(fill for _, fill in self._fills.values()),
                price=sum(prices) / max(1, num_ready),
                num_undrafted=num_undrafted,
            ),
            drafters=DraftersLoad(
                num_replicas=self.drafters.num_replicas,
                num_ready=len(drafters),
                num_sessions=sum(report.load.num_sessions for report in drafters),
                queue_depth=sum(report.load.queue_depth for report in drafters),
            ),
        )

    def _knee_fill(self, report: VerifierReport) -> float:
        before, last = self._fills.get(report.verifier_id, (EngineCounters(), 0.0))
        if not report.load.num_running:
            return 0.0
        if report.load.counters.num_steps == before.num_steps:  # it has not reported since
            return last
        return knee_fill(before, report.load.counters, report.load.knee)
