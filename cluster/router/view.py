"""The fleet as one gateway knows it: the router's news, and the gateway's own requests that no report includes yet.

A gateway counts a request at its verifier from the choice on, until the verifier's report includes it: a verifier says
how many requests it had taken when it took one (`Accepted`), and how many when it reported. Reports may be lost, late
or doubled, and the router may be away: a request that has ended is no longer counted either.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from outrider.cluster.router.fleet import Assignment, DrafterState, FleetSnapshot, RouteAsk, RouterPolicy, VerifierState
from outrider.cluster.router.news import Cursor, FleetNews, NewsAsk, Tally
from outrider.cluster.router.planning import decision_of
from outrider.cluster.router.routing import NoVerifierError, route


@dataclass(slots=True)
class _Sent:
    """A request that no report includes yet."""

    verifier_id: str
    drafter_id: str | None
    num_taken: int | None = None  # by its verifier when that took it; None: it has not said so


class FleetView:
    """Take news, place requests."""

    def __init__(self) -> None:
        self.policy = RouterPolicy()
        self.cursor: Cursor | None = None  # None: nothing was heard yet
        self._tally = Tally()
        self._told = Tally()  # what the router knows of it since it was last asked
        self._changed: FleetSnapshot | None = None  # the last news'
        self._verifiers: dict[str, VerifierState] = {}
        self._drafters: dict[str, DrafterState] = {}
        self._sent: dict[str, _Sent] = {}  # by request
        self._num_sent: Counter[str] = Counter()  # by verifier
        self._num_drafted: Counter[str] = Counter()  # by drafter
        self._fleet: FleetSnapshot | None = None  # None: to be made

    # --- what the router says ---

    def ask(self, gateway_id: str, *, is_for_all: bool = False) -> NewsAsk:
        """Return what the router is asked: for what is new, or for all."""
        self._told = self._tally.plus(Tally())
        return NewsAsk(gateway_id=gateway_id, seen=None if is_for_all else self.cursor, tally=self._told)

    def take(self, news: FleetNews) -> None:
        """Take the router's news; older ones than the last change nothing."""
        seen, told = self.cursor, news.cursor
        if seen is not None and seen.epoch == told.epoch and seen.version > told.version:
            return
        if news.is_whole:
            self._verifiers.clear()
            self._drafters.clear()
        self._verifiers.update((state.report.verifier_id, state) for state in news.changed.verifiers)
        self._drafters.update((state.report.drafter_id, state) for state in news.changed.drafters)
        self._changed, self.policy, self.cursor = news.changed, news.policy, news.cursor
        for request_id in [request_id for request_id, sent in self._sent.items() if self._is_reported(sent)]:
            self.end(request_id)
        for verifier in news.changed.verifiers:
            self._show_verifier(verifier.report.verifier_id)
        for drafter in news.changed.drafters:
            self._show_drafter(drafter.report.drafter_id)
        self._fleet = None

    @property
    def fleet(self) -> FleetSnapshot | None:
        """The fleet as far as it is known, for decisions; None: nothing was heard yet."""
        if self._fleet is None and self._changed is not None:
            self._fleet = replace(
                self._changed, verifiers=tuple(self._verifiers.values()), drafters=tuple(self._drafters.values())
            )
        return self._fleet

    @property
    def snapshot(self) -> FleetSnapshot | None:
        """The same, for operators: what this gateway chose since it last told the router is counted."""
        if self.fleet is None:
            return None
        tally = Tally.of(self.fleet).plus(self._tally.minus(self._told))
        return self.fleet.with_counts(tally.decisions, tally.placements)

    # --- what the gateway does ---

    def state_of(self, verifier_id: str) -> VerifierState | None:
        return self._verifiers.get(verifier_id)

    def place_of(self, ask: RouteAsk, now_s: float) -> Assignment:
        """Return where a request would go; raises `NoVerifierError`."""
        if self.fleet is None:
            raise NoVerifierError(f"no verifier for request {ask.request_id!r}: the router was not heard yet")
        return route(self.fleet, ask, now_s, self.policy)

    def place(self, ask: RouteAsk, now_s: float) -> Assignment:
        """Choose for a new request; raises `NoVerifierError`. It is counted as sent by `begin`."""
        assignment = self.place_of(ask, now_s)
        self._tally.decisions[decision_of(assignment.plan)] += 1
        self._tally.placements[assignment.reason] += 1
        return assignment

    def begin(self, request_id: str, verifier_id: str, drafter_id: str | None) -> None:
        """Count a request that is sent to a verifier."""
        self._sent[request_id] = _Sent(verifier_id, drafter_id)
        self._count(verifier_id, drafter_id, 1)

    def accept(self, request_id: str, num_taken: int) -> None:
        """Note how many requests the verifier had taken when it took this one."""
        sent = self._sent.get(request_id)
        if sent is not None:
            sent.num_taken = num_taken
            if self._is_reported(sent):
                self.end(request_id)

    def end(self, request_id: str) -> None:
        """Count a request no longer: it has ended, or a report includes it."""
        sent = self._sent.pop(request_id, None)
        if sent is not None:
            self._count(sent.verifier_id, sent.drafter_id, -1)

    def _is_reported(self, sent: _Sent) -> bool:
        state = self._verifiers.get(sent.verifier_id)
        return state is not None and sent.num_taken is not None and state.report.num_taken >= sent.num_taken

    def _count(self, verifier_id: str, drafter_id: str | None, number: int) -> None:
        _add(self._num_sent, verifier_id, number)
        self._show_verifier(verifier_id)
        if drafter_id is not None:
            _add(self._num_drafted, drafter_id, number)
            self._show_drafter(drafter_id)
        self._fleet = None

    def _show_verifier(self, verifier_id: str) -> None:
        state, number = self._verifiers.get(verifier_id), self._num_sent[verifier_id]
        if state is not None and state.num_assigned != number:
            self._verifiers[verifier_id] = replace(state, num_assigned=number)

    def _show_drafter(self, drafter_id: str) -> None:
        state, number = self._drafters.get(drafter_id), self._num_drafted[drafter_id]
        if state is not None and state.num_assigned != number:
            self._drafters[drafter_id] = replace(state, num_assigned=number)


def _add(counts: Counter[str], name: str, number: int) -> None:
    counts[name] += number
    if counts[name] == 0:
        del counts[name]
