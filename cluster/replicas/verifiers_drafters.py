"""A verifier's drafters: over links of its replica, or over those of a plug-in in another engine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from outrider.cluster.router.fleet import Directive, VerifierReport
from outrider.verifier_service.links.link_pool import LinkPool
from outrider.verifier_service.messages.counts import DraftingCounters, EngineCounters
from outrider.verifier_service.messages.engine import EngineLoad, Relay, SetPlans

FRESH_S = 2.0  # a plug-in reports four times a second: an older report is of a dead one


class Drafters(Protocol):
    """The drafters of one verifier."""

    @property
    def linked_drafters(self) -> tuple[str, ...]:
        """The drafters with a live link."""

    async def follow(self, directive: Directive) -> None:
        """Follow the router's directive."""

    def complete(self, report: VerifierReport) -> VerifierReport:
        """Return the engine's report with its drafters' figures."""

    def send(self, relays: Iterable[Relay]) -> None:
        """Send the engine's messages to the drafters."""

    def check(self) -> None:
        """Raise `RuntimeError` if drafters have become unreachable for good."""

    async def close(self) -> None:
        """Close the links."""


class LinkedDrafters:
    """Drafters behind links of this process."""

    def __init__(self, links: LinkPool, set_plans: Callable[[SetPlans], None]) -> None:
        self._links = links
        self._set_plans = set_plans
        self.send, self.check, self.close = links.send, links.check, links.close

    @property
    def linked_drafters(self) -> tuple[str, ...]:
        return self._links.linked_drafters

    async def follow(self, directive: Directive) -> None:
        if directive.plans:
            self._set_plans(SetPlans(plans=directive.plans))
        await self._links.hold(directive.drafters)

    def complete(self, report: VerifierReport) -> VerifierReport:
        bad = self._links.num_bad_frames
        return dataclasses.replace(report, linked_drafters=self.linked_drafters, num_bad_link_frames=bad)


class PluginsDrafters:
    """Drafters behind the links of a plug-in in the engine's process. This is the plug-in's directory.

    The plug-in's reports are merged into the verifier's; the router's directives are its next answers.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._directive: Directive | None = None  # the last, with all plans since the plug-in's last report
        self._seen: VerifierReport | None = None
        self._seen_s = 0.0

    async def answer(self, report: VerifierReport) -> Directive | None:
        """Store the plug-in's report and return a directive; None: the router has sent none yet."""
        self._seen, self._seen_s = report, self._clock()
        directive = self._directive
        if directive is not None:
            self._directive = dataclasses.replace(directive, plans={})
        return directive

    async def forget(self, verifier_id: str) -> None:
        """Do nothing: the report of a plug-in whose stream has ended expires."""

    @property
    def linked_drafters(self) -> tuple[str, ...]:
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
        """Do nothing: the plug-in sends its own messages."""

    def check(self) -> None:
        """Never raise: a plug-in that fails costs drafts, and reconnects itself."""

    async def close(self) -> None:
        """Do nothing: the links end with the engine."""


def _counted_by_both(engine: EngineCounters, plugin: EngineCounters) -> EngineCounters:
    """Return the plug-in's counters of drafting, and the engine's of the rest, whose drafted part the plug-in sees."""
    drafted = {each.name: getattr(plugin, each.name) for each in dataclasses.fields(DraftingCounters)}
    return dataclasses.replace(engine, **drafted)


def _described_by_both(engine: EngineLoad, plugin: EngineLoad) -> EngineLoad:
    """Return the engine's load with the plug-in's figures of requests, steps, prices and drafters."""
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
