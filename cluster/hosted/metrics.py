"""Drafting inside another engine, as Prometheus series of that engine's process."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from outrider.verifier_service.messages.engine import EngineLoad

# metric names, and the fields of `EngineCounters`
_COUNTERS = {
    "num_drafts": ("outrider_hosted_drafts", "Drafts that were verified."),
    "num_draft_tokens": ("outrider_hosted_draft_tokens", "Draft tokens that were verified."),
    "num_accepted_tokens": ("outrider_hosted_accepted_tokens", "Draft tokens that were accepted."),
    "num_asks": ("outrider_hosted_asks", "Decisions how much to draft next, one per decoding request and step."),
    "num_asked_tokens": ("outrider_hosted_asked_tokens", "Draft tokens that drafters were asked for."),
    "num_stale_drafts": ("outrider_hosted_stale_drafts", "Drafts that came after their round was over."),
    "num_resyncs": ("outrider_hosted_resyncs", "Drafters that wanted a whole prefix again."),
}


class HostedMetrics:
    """Counters and gauges, set from reports."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._counters = {name: Counter(*said, registry=registry) for name, said in _COUNTERS.items()}
        self._fallbacks = Counter(
            "outrider_hosted_fallbacks",
            "Rounds that ended without a draft: timeout is a missed deadline.",
            ["reason"],
            registry=registry,
        )
        self._undrafted = Counter(
            "outrider_hosted_undrafted",
            "Requests in steps for which nothing was drafted, by reason.",
            ["reason"],
            registry=registry,
        )
        self._price = _gauge("outrider_hosted_price", "Committed tokens that one more verified token costs.", registry)
        self._drafters = _gauge("outrider_hosted_drafters", "Drafters that there are links to.", registry)
        self._wait_s = _gauge("outrider_hosted_round_trip_seconds", "From asking for drafts to having them.", registry)
        self.begin_again()

    def begin_again(self) -> None:
        """Expect reports that count from zero again."""
        self._last = EngineLoad(num_running=0, num_waiting=0, num_decoding=0, kv_usage=0.0)
        self._last_undrafted: dict[str, int] = {}

    def observe(self, load: EngineLoad, num_undrafted: Mapping[str, int], num_drafters: int) -> None:
        """Set the series from a report; another thread may be incrementing `num_undrafted`."""
        num_undrafted = dict(num_undrafted)
        now, before = load.counters, self._last.counters
        for name, counter in self._counters.items():
            counter.inc(_grown(getattr(now, name), getattr(before, name)))
        _count(self._fallbacks, now.fallbacks, before.fallbacks)
        _count(self._undrafted, num_undrafted, self._last_undrafted)
        self._price.set(load.price or 0.0)
        self._drafters.set(num_drafters)
        self._wait_s.set(max((one.round_trip_s for one in load.drafters), default=0.0))
        self._last, self._last_undrafted = load, num_undrafted


def _gauge(name: str, text: str, registry: CollectorRegistry) -> Gauge:
    return Gauge(name, text, registry=registry, multiprocess_mode="livemostrecent")


def _count(counter: Counter, now: Mapping[str, int], before: Mapping[str, int]) -> None:
    for reason, count in now.items():
        counter.labels(reason=reason).inc(_grown(count, before.get(reason, 0)))


def _grown(now: int, before: int) -> int:
    """Return the increase of a count; a smaller count has restarted from zero, in the step thread."""
    return now - before if now >= before else now
