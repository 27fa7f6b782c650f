"""How a verifier comes by its drafters: over links that its replica holds, or through its engine's own plug-in."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from outrider.cluster.router.fleet import Directive, VerifierReport
from outrider.verifier_service.links.link_pool import LinkPool
from outrider.verifier_service.messages.engine import EngineCounters, EngineLoad, Relay, SetPlans

FRESH_S = 2.0  # a plug-in reports four times a second: what is older is of one that has died
# what the plug-in alone counts; the rest is counted by the engine, of which a plug-in sees the drafted part
_PLUGINS_COUNTERS = (
    *("num_asks", "num_asked_tokens", "num_bad_frames", "num_stale_drafts", "num_resyncs", "fallbacks"),
    *("num_state_bytes", "num_tensor_fallbacks", "idle_s", "num_extrapolated_steps", "round_trip_s", "lateness_s"),
)


class Drafters(Protocol):
    """The drafters of one verifier, as its replica sees them."""

    @property
    def drafters_up(self) -> tuple[str, ...]:
        """Those that there is a live link to."""

    async def follow(self, directive: Directive) -> None:
        """Do as the router says."""

    def complete(self, report: VerifierReport) -> VerifierReport:
        """Add what is known of drafters to what the engine says of itself."""

    def send(self, relays: Iterable[Relay]) -> None:
        """Pass the engine's messages on."""

    def check(self) -> None:
        """Raise `RuntimeError` where no drafter could be reached ever again."""

    async def close(self) -> None:
        """Let go of them."""


class LinkedDrafters:
    """Drafters behind links of this process."""

    def __init__(self, links: LinkPool, set_plans: Callable[[SetPlans], None]) -> None:
        self._links = links
        self._set_plans = set_plans
        self.send, self.check, self.close = links.send, links.check, links.close

    @property
    def drafters_up(self) -> tuple[str, ...]:
        return self._links.drafters_up

    async def follow(self, directive: Directive) -> None:
        if directive.plans:
            self._set_plans(SetPlans(plans=directive.plans))
        await self._links.hold(directive.drafters)

    def complete(self, report: VerifierReport) -> VerifierReport:
        links = self._links
        return dataclasses.replace(report, linked_drafters=links.drafters_up, num_bad_link_frames=links.num_bad_frames)


class PluginsDrafters:
    """Drafters behind links of a plug-in in the engine's process, whose directory this is.

    The plug-in's reports become part of the verifier's, and the router's directives go to it with the next answer.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._directive: Directive | None = None  # with every plan since the plug-in's last report
        self._seen: VerifierReport | None = None
        self._seen_s = 0.0

    async def answer(self, report: VerifierReport) -> Directive | None:
        """Take in a report of the plug-in; None: the router has said nothing yet."""
        self._seen, self._seen_s = report, self._clock()
        directive = self._directive
        if directive is not None:
            self._directive = dataclasses.replace(directive, plans={})
        return directive

    async def forget(self, verifier_id: str) -> None:
        """Hear that the plug-in's stream has ended: what it said grows old by itself."""

    @property
    def drafters_up(self) -> tuple[str, ...]:
        return self._seen.linked_drafters if self._seen is not None and self._is_fresh else ()

    @property
    def _is_fresh(self) -> bool:
        return self._clock() - self._seen_s < FRESH_S

    async def follow(self, directive: Directive) -> None:
        earlier = {} if self._directive is None else self._directive.plans
        self._directive = dataclasses.replace(directive, plans=earlier | directive.plans)

    def complete(self, report: VerifierReport) -> VerifierReport:
        seen = self._seen
        if seen is None:
            return report
        counters = _counted_by_both(report.load.counters, seen.load.counters)
        load = dataclasses.replace(report.load, counters=counters)
        if not self._is_fresh:
            return dataclasses.replace(report, load=load)
        return dataclasses.replace(
            report,
            load=_described_by_both(load, seen.load),
            step_times=seen.step_times,
            linked_drafters=seen.linked_drafters,
        )

    def send(self, relays: Iterable[Relay]) -> None:
        """Do nothing: the plug-in sends by itself."""

    def check(self) -> None:
        """Never raise: a plug-in that fails costs drafts, and begins again by itself."""

    async def close(self) -> None:
        """Do nothing: the links end with the engine."""


def _counted_by_both(engine: EngineCounters, plugin: EngineCounters) -> EngineCounters:
    return dataclasses.replace(engine, **{name: getattr(plugin, name) for name in _PLUGINS_COUNTERS})


def _described_by_both(engine: EngineLoad, plugin: EngineLoad) -> EngineLoad:
    """Return the engine's load with what its plug-in knows better: requests that draft, steps, prices, drafters."""
    return dataclasses.replace(
        engine,
        mean_step_s=plugin.mean_step_s or engine.mean_step_s,
        price=plugin.price,
        knee=plugin.knee,
        draft_length_mean=plugin.draft_length_mean,
        verify_idle_share=plugin.verify_idle_share,
        requests=plugin.requests,
        drafters=plugin.drafters,
        circuits=plugin.circuits,
    )
