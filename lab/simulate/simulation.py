"""A fleet in virtual time: the service's own router, price, survival estimates and autoscaler around fake engines.

An event queue holds what happens at a moment of the fleet (an arrival, a report, a look of the autoscaler, a replica
that has started); the engines catch up in between (engines.py). Everything is drawn from one generator, and
events of the same moment keep their order, so a seed gives the same figures every time.

A fleet may be cut into cells, each with a router of its own, as large services are: a decision of the router looks at
every replica that it knows. Requests are placed by what all reports say now; or by gateways, in turn, each of which
knows what the router told a moment ago, and what it has placed itself since.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from outrider.cluster.router.fleet import Assignment, DrafterReport, RouteAsk, RouterPolicy, VerifierReport
from outrider.cluster.router.news import FleetNews
from outrider.cluster.router.router import RouterCore
from outrider.cluster.router.routing import NoVerifierError
from outrider.cluster.router.search import Search
from outrider.cluster.router.view import FleetView
from outrider.lab.simulate.drafting import DrafterShape, FakeDrafter
from outrider.lab.simulate.engines import FakeVerifier, VerifierShape
from outrider.lab.simulate.ledger import Ledger
from outrider.lab.simulate.lengths import LengthPolicy, OracleLengths, PlannedLengths, PricedLengths
from outrider.lab.simulate.load import Workload
from outrider.lab.simulate.scaling import PoolScaler, ScalingOptions

RETRY_INTERVAL_S = 0.25  # of a gateway that found no verifier
NEWS_INTERVAL_S = 0.05  # between the router's news to gateways, and from a report to a gateway at the least
PROGRESS_EVENTS = 1 << 12


class LengthMode(enum.StrEnum):
    """Who sets draft lengths below the router's plan."""

    PRICED = "priced"  # the verifier's step price
    PLANNED = "planned"  # nobody
    ORACLE = "oracle"  # somebody who knows every survival probability and every step's time


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetShape:
    """The replicas and what each of them is. Raises `ValueError` naming the field that is out of range."""

    verifier: VerifierShape
    num_verifiers: int
    drafter: DrafterShape | None = None
    num_drafters: int = 0
    num_cells: int = 1  # routers, each with its share of the replicas
    accelerators_per_verifier: int = 1
    accelerators_per_drafter: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_cells <= self.num_verifiers:
            raise ValueError("num_cells must be from 1 to num_verifiers")
        if self.num_drafters < 0 or (self.num_drafters > 0 and self.drafter is None):
            raise ValueError("num_drafters must be at least 0, and 0 without a drafter's shape")

    @property
    def num_accelerators(self) -> int:
        verifiers = self.num_verifiers * self.accelerators_per_verifier
        return verifiers + self.num_drafters * self.accelerators_per_drafter


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """How the fleet is run. Raises `ValueError` naming the field that is out of range."""

    policy: RouterPolicy = field(default_factory=RouterPolicy)
    lengths: LengthMode = LengthMode.PRICED
    report_interval_s: float = 0.25
    scaling: ScalingOptions | None = None
    num_gateways: int | None = None  # None: requests are placed by somebody who hears every report at once
    has_affinity: bool = False  # every request has a prefix of its own
    most_waiting: int | None = None  # requests at a verifier, which refuses more; None: it takes all

    def __post_init__(self) -> None:
        if self.num_gateways is not None and self.num_gateways < 1:
            raise ValueError("num_gateways must be at least 1")
        if not 0 < self.report_interval_s < self.policy.expire_after_s:
            raise ValueError("report_interval_s must be positive and below the policy's expire_after_s")


@dataclass(frozen=True, slots=True)
class PoolSample:
    """The pools at one moment of the day."""

    at_s: float
    num_verifiers: int  # that serve
    num_drafters: int
    num_requests: int
    mean_price: float | None
    verifiers_reason: str
    drafters_reason: str


class Event(enum.IntEnum):
    REPORT_VERIFIER = 0
    REPORT_DRAFTER = 1
    RETRY = 2
    SCALE = 3
    START_VERIFIER = 4
    START_DRAFTER = 5
    TELL_NEWS = 6


@dataclass(slots=True)
class _Cell:
    """A router and its replicas."""

    router: RouterCore
    views: list[FleetView]  # of those who place requests
    news: FleetNews | None = None  # on its way to gateways
    verifiers: dict[str, FakeVerifier] = field(default_factory=dict)
    drafters: dict[str, FakeDrafter] = field(default_factory=dict)
    reports: dict[str, VerifierReport] = field(default_factory=dict)
    drafter_reports: dict[str, DrafterReport] = field(default_factory=dict)


class Simulation:
    """One run of a fleet over a workload; `run` once."""

    def __init__(
        self, fleet: FleetShape, workload: Workload, options: SimulationOptions, random: np.random.Generator
    ) -> None:
        longest = int((workload.num_prompt_tokens + workload.num_output_tokens).max(initial=0))
        if longest > fleet.verifier.kv_tokens:
            raise ValueError(f"kv_tokens: a request of {longest} tokens never fits in {fleet.verifier.kv_tokens}")
        if options.scaling is not None and fleet.num_cells > 1:
            raise ValueError("num_cells must be 1 where pools are scaled")
        self.fleet, self.workload, self.options = fleet, workload, options
        self.ledger = Ledger(workload, random)
        self.samples: list[PoolSample] = []
        self.num_events = 0
        num_views = options.num_gateways or 1
        self._cells = [
            _Cell(RouterCore(options.policy), [FleetView() for _ in range(num_views)]) for _ in range(fleet.num_cells)
        ]
        self._queue: list[tuple[float, int, Event, int, str]] = []
        self._order = itertools.count()
        self._num_verifiers, self._num_drafters = 0, 0  # ever started: their names
        self._scaler: PoolScaler | None = None
        self._num_starting = {Event.START_VERIFIER: 0, Event.START_DRAFTER: 0}

    def run(self, on_progress: Callable[[int], None] = lambda _: None) -> None:
        """Run until every request has ended; `on_progress` gets their number now and then."""
        self._start()
        arrival_s = self.workload.arrival_s.tolist()
        next_arrival = 0
        while not self.ledger.is_complete:
            self.num_events += 1
            if next_arrival < len(arrival_s) and arrival_s[next_arrival] <= self._queue[0][0]:
                self._arrive(next_arrival, arrival_s[next_arrival])
                next_arrival += 1
            else:
                now_s, _, event, cell, name = heapq.heappop(self._queue)
                self._handle(event, self._cells[cell], cell, name, now_s)
            if self.num_events % PROGRESS_EVENTS == 0:
                on_progress(self.ledger.num_finished)
        on_progress(self.ledger.num_finished)

    def _start(self) -> None:
        """Let every replica report once, then in turn through the interval."""
        interval_s = self.options.report_interval_s
        for index in range(self.fleet.num_drafters):
            self._add_drafter(index % len(self._cells), 0.0, interval_s * (index + 1) / self.fleet.num_drafters)
        for index in range(self.fleet.num_verifiers):
            self._add_verifier(index % len(self._cells), 0.0, interval_s * (index + 1) / self.fleet.num_verifiers)
        if self.options.num_gateways is not None:
            for index in range(len(self._cells)):
                self._push(0.0, Event.TELL_NEWS, index)
        if self.options.scaling is not None:
            self._scaler = PoolScaler(
                self.options.scaling, num_verifiers=self.fleet.num_verifiers, num_drafters=self.fleet.num_drafters
            )
            self._push(0.0, Event.SCALE, 0)

    def _push(self, at_s: float, event: Event, cell: int, name: str = "") -> None:
        heapq.heappush(self._queue, (at_s, next(self._order), event, cell, name))

    def _handle(self, event: Event, cell: _Cell, index: int, name: str, now_s: float) -> None:
        if event is Event.REPORT_VERIFIER:
            self._report_verifier(cell, index, name, now_s)
        elif event is Event.REPORT_DRAFTER:
            self._report_drafter(cell, index, name, now_s)
        elif event is Event.RETRY:
            self._arrive(int(name), now_s)
        elif event is Event.SCALE:
            self._scale(cell, now_s)
        elif event is Event.TELL_NEWS:
            self._tell_news(cell, index, now_s)
        else:
            self._num_starting[event] -= 1
            add = self._add_verifier if event is Event.START_VERIFIER else self._add_drafter
            add(index, now_s, self.options.report_interval_s)

    def _arrive(self, number: int, now_s: float) -> None:
        index = number % len(self._cells)
        cell = self._cells[index]
        view = cell.views[number // len(self._cells) % len(cell.views)]
        if self.options.num_gateways is None:
            view.take(cell.router.news(view.cursor, now_s))
        search = Search(may_wait=self.options.num_gateways is None)
        while (chosen := self._place(cell, view, number, search, now_s)) is not None:
            verifier = cell.verifiers[chosen.verifier_id]
            if self._has_room(verifier, search, view, chosen, now_s):
                verifier.submit(number, chosen.plan, now_s)
                view.begin(str(number), chosen.verifier_id, chosen.plan.drafter_id)
                view.accept(str(number), verifier.num_taken)
                return
            if not search.refused(chosen.verifier_id):
                break
        if search.full_ids:
            self.ledger.refuse()
        else:
            self._push(now_s + RETRY_INTERVAL_S, Event.RETRY, index, str(number))

    def _place(self, cell: _Cell, view: FleetView, number: int, search: Search, now_s: float) -> Assignment | None:
        """Return where a request goes next; None: no verifier is left."""
        ask = RouteAsk(
            request_id=str(number),
            num_prompt_tokens=int(self.workload.num_prompt_tokens[number]),
            affinity_key=str(number) if self.options.has_affinity else None,
        )
        while True:
            try:
                return view.place(replace(ask, excluded_verifier_ids=search.excluded_ids), now_s)
            except NoVerifierError:
                if not search.none_left():
                    return None

    def _has_room(
        self, verifier: FakeVerifier, search: Search, view: FleetView, chosen: Assignment, now_s: float
    ) -> bool:
        """Return whether a verifier takes a request, by what it knows of its queue."""
        state = view.state_of(chosen.verifier_id)
        assert state is not None
        most = search.most_waiting(chosen, state, self.options.most_waiting)
        if most is None:
            return True
        verifier.advance(now_s)
        return verifier.num_requests + 1 - self.fleet.verifier.max_num_seqs <= most

    def _tell_news(self, cell: _Cell, index: int, now_s: float) -> None:
        """Let all gateways hear what the router said at the last time, and let it say what is new."""
        if cell.news is not None:
            for view in cell.views:
                view.take(cell.news)
        cell.news = cell.router.news(cell.news.cursor if cell.news is not None else None, now_s)
        self._push(now_s + NEWS_INTERVAL_S, Event.TELL_NEWS, index)

    def _report_verifier(self, cell: _Cell, index: int, name: str, now_s: float) -> None:
        verifier = cell.verifiers[name]
        verifier.advance(now_s)
        if verifier.draining and verifier.num_requests == 0:
            verifier.follow({})  # lets its drafters know that it asks nothing more
            del cell.verifiers[name], cell.reports[name]
            cell.router.remove(name)
            return
        report = verifier.report(tuple(cell.drafters), with_knee=self.options.scaling is not None)
        cell.reports[name] = report
        verifier.follow(cell.router.report_verifier(report, now_s).plans)
        self._push(now_s + self.options.report_interval_s, Event.REPORT_VERIFIER, index, name)

    def _report_drafter(self, cell: _Cell, index: int, name: str, now_s: float) -> None:
        drafter = cell.drafters[name]
        if drafter.draining and drafter.num_sessions == 0:
            del cell.drafters[name], cell.drafter_reports[name]
            cell.router.remove(name)
            return
        report = drafter.report()
        cell.drafter_reports[name] = report
        cell.router.report_drafter(report, now_s)
        self._push(now_s + self.options.report_interval_s, Event.REPORT_DRAFTER, index, name)

    def _add_verifier(self, index: int, now_s: float, first_report_s: float) -> None:
        cell, name = self._cells[index], f"v{self._num_verifiers}"
        self._num_verifiers += 1
        shape = self.fleet.verifier
        cell.verifiers[name] = FakeVerifier(
            name, shape, self.ledger, cell.drafters, self._length_policy(shape), now_s=now_s
        )
        report = cell.verifiers[name].report(tuple(cell.drafters), with_knee=self.options.scaling is not None)
        cell.reports[name] = report
        cell.router.report_verifier(report, now_s)
        self._push(now_s + first_report_s, Event.REPORT_VERIFIER, index, name)

    def _add_drafter(self, index: int, now_s: float, first_report_s: float) -> None:
        assert self.fleet.drafter is not None
        cell, name = self._cells[index], f"d{self._num_drafters}"
        self._num_drafters += 1
        cell.drafters[name] = FakeDrafter(name, self.fleet.drafter)
        cell.drafter_reports[name] = cell.drafters[name].report()
        cell.router.report_drafter(cell.drafter_reports[name], now_s)
        self._push(now_s + first_report_s, Event.REPORT_DRAFTER, index, name)

    def _length_policy(self, shape: VerifierShape) -> LengthPolicy:
        if self.options.lengths is LengthMode.PRICED:
            return PricedLengths(shape.profile())
        if self.options.lengths is LengthMode.ORACLE:
            return OracleLengths(self.workload.acceptance, shape.timing)
        return PlannedLengths()

    def _scale(self, cell: _Cell, now_s: float) -> None:
        """Let the autoscaler look; start what is missing and drain what is too many, the least busy ones."""
        scaler = self._scaler
        assert scaler is not None
        verifiers = [verifier for verifier in cell.verifiers.values() if not verifier.draining]
        drafters = [drafter for drafter in cell.drafters.values() if not drafter.draining]
        reports = [cell.reports[verifier.verifier_id] for verifier in verifiers]
        sizes = scaler.scale(
            scaler.load_of(
                reports,
                [cell.drafter_reports[drafter.drafter_id] for drafter in drafters],
                sum(verifier.num_undrafted for verifier in verifiers),
            ),
            now_s,
        )
        self._start_missing(Event.START_VERIFIER, scaler.verifiers.num_replicas - len(verifiers), now_s)
        self._start_missing(Event.START_DRAFTER, scaler.drafters.num_replicas - len(drafters), now_s)
        verifiers.sort(key=lambda verifier: verifier.num_requests)
        drafters.sort(key=lambda drafter: drafter.num_sessions)
        for verifier in verifiers[: max(0, len(verifiers) - scaler.verifiers.num_replicas)]:
            verifier.draining = True
        for drafter in drafters[: max(0, len(drafters) - scaler.drafters.num_replicas)]:
            drafter.draining = True
        prices = [report.load.price for report in reports if report.load.price is not None and report.load.num_decoding]
        self.samples.append(
            PoolSample(
                at_s=now_s,
                num_verifiers=len(cell.verifiers),
                num_drafters=len(cell.drafters),
                num_requests=sum(report.load.num_running + report.load.num_waiting for report in reports),
                mean_price=sum(prices) / len(prices) if prices else None,
                verifiers_reason=sizes.verifiers.reason.value,
                drafters_reason=sizes.drafters.reason.value,
            )
        )
        self._push(now_s + scaler.options.interval_s, Event.SCALE, 0)

    def _start_missing(self, event: Event, num_missing: int, now_s: float) -> None:
        assert self.options.scaling is not None
        for _ in range(num_missing - self._num_starting[event]):
            self._num_starting[event] += 1
            self._push(now_s + self.options.scaling.start_s, event, 0)
