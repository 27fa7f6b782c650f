"""The autoscaler's figures: those that each replica exports, and their sums as a `PoolsLoad`.

Serve carries plain numbers from replicas to the policy, averaged over its look-back period. So a share is exported as
two counts and a mean as a sum over reporting replicas. An unknown figure is exported as 0, which moves no pool.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from outrider.cluster.router.fleet import LACKS_DRAFTER
from outrider.cluster.scaling.autoscaling import DraftersLoad, PoolsLoad, VerifiersLoad
from outrider.verifier_service.messages.counts import EngineCounters
from outrider.verifier_service.messages.drafter_load import DrafterLoad
from outrider.verifier_service.messages.engine import EngineLoad
from outrider.verifier_service.messages.request import SpeculationPlan

Figures = Mapping[str, Mapping[Hashable, float]]  # {figure: {replica: value}}, as in Serve's contexts


class VerifierFigures:
    """The figures that a verifier exports; counts are since the previous call."""

    def __init__(self) -> None:
        self._before = EngineCounters()

    def take(self, load: EngineLoad, default_plan: SpeculationPlan | None) -> dict[str, float]:
        """Return the figures, and start to count anew; `default_plan` is the router's last, None before its first."""
        before, self._before = self._before, load.counters
        lacks_drafter = default_plan is not None and default_plan.disabled_reason in LACKS_DRAFTER
        num_willing = sum(request.is_running and request.num_speculative_tokens != 0 for request in load.requests)
        return {
            "num_requests": float(load.num_running + load.num_waiting),
            "kv_usage": load.kv_usage,
            "knee_fill": knee_fill(before, load.counters, load.knee),
            "num_with_knee": float(bool(load.knee)),
            "price": min(1.0, load.price) if load.price is not None and load.num_decoding > 0 else 0.0,
            "num_willing": float(num_willing),
            "num_undrafted": float(num_willing) if lacks_drafter else 0.0,
            "num_drafts_in_time": float(_num_between(before.round_trip_s.counts, load.counters.round_trip_s.counts)),
            "num_drafts_late": float(_num_between(before.lateness_s.counts, load.counters.lateness_s.counts)),
        }


def drafter_figures(load: DrafterLoad) -> dict[str, float]:
    """Return the figures that a drafter exports."""
    return {"num_sessions": float(load.num_sessions), "queue_depth": float(load.queue_depth)}


def pools_load(verifiers: Figures, drafters: Figures, *, num_verifiers: int, num_drafters: int) -> PoolsLoad:
    """Add up the replicas' figures; `num_verifiers` and `num_drafters` are the wanted ones, reporting or not."""
    num_ready = len(verifiers.get("num_requests", {}))
    num_in_time, num_late = _total(verifiers, "num_drafts_in_time"), _total(verifiers, "num_drafts_late")
    num_undrafted = _total(verifiers, "num_undrafted")
    if num_drafters == 0 and _total(verifiers, "num_willing") > 0.0:
        num_undrafted = max(num_undrafted, 1.0)  # drafts of this pool are untried, even if another pool has drafters
    return PoolsLoad(
        verifiers=VerifiersLoad(
            num_replicas=num_verifiers,
            num_ready=num_ready,
            num_with_knee=_total(verifiers, "num_with_knee"),
            num_requests=_total(verifiers, "num_requests"),
            kv_usage=_total(verifiers, "kv_usage"),
            knee_fill=_total(verifiers, "knee_fill"),
            price=_total(verifiers, "price") / max(1, num_ready),
            num_undrafted=num_undrafted,
        ),
        drafters=DraftersLoad(
            num_replicas=num_drafters,
            num_ready=len(drafters.get("num_sessions", {})),
            num_sessions=_total(drafters, "num_sessions"),
            queue_depth=_total(drafters, "queue_depth"),
            late_share=num_late / (num_in_time + num_late) if num_late > 0 else 0.0,
        ),
    )


def knee_fill(before: EngineCounters, now: EngineCounters, knee: float | None) -> float:
    """Return the mean tokens of a step between two readings, without drafts, ÷ the knee.

    0 without a step in between, or without a known knee.
    """
    num_steps = now.num_steps - before.num_steps
    if not knee or num_steps <= 0:
        return 0.0
    num_tokens = now.num_scheduled_tokens - before.num_scheduled_tokens
    num_drafted = now.num_draft_tokens - before.num_draft_tokens
    return (num_tokens - num_drafted) / num_steps / knee


def _num_between(before: tuple[int, ...], now: tuple[int, ...]) -> int:
    return sum(now) - sum(before)


def _total(figures: Figures, name: str) -> float:
    return sum(figures.get(name, {}).values())
