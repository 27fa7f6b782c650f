"""The router's state: every replica's last report, and the plans that each verifier was last given.

Sans I/O: one actor wraps `RouterCore` and passes the clock in. A restart loses nothing that the next reports do not
bring back: meanwhile gateways place by its last news, and verifiers follow their last plans. Until all replicas
have had time to report, a new router trusts verifiers: a drafter with a live link is up, and a request that drafts
goes on drafting.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass, replace

from outrider.cluster.router.fleet import (
    Directive,
    DrafterReport,
    DrafterState,
    FleetPause,
    FleetSnapshot,
    RouterPolicy,
    VerifierReport,
    VerifierState,
    is_fresh,
)
from outrider.cluster.router.news import Changes, Cursor, FleetNews, NewsAsk, Tally
from outrider.cluster.router.planning import VerifierMemory, plan_speculation
from outrider.cluster.router.routing import is_crowded, missed_weights, takers_of
from outrider.drafter_service.learning.messages import LearnerStatus

LOOK_INTERVAL_S = 0.1  # between two looks for silent replicas, which are at all of them, while others report


class RouterCore:
    """Answer verifiers' reports with plans, and tell gateways the news; `now_s` never runs backwards."""

    def __init__(self, policy: RouterPolicy | None = None, epoch: int = 0) -> None:
        """`epoch`: another one for every router that gateways may hear."""
        self._policy = policy or RouterPolicy()
        self._epoch = epoch
        self._is_stopping = False  # told to every gateway
        self._changes = Changes()
        self._verifiers: dict[str, _Verifier] = {}
        self._drafters: dict[str, DrafterState] = {}
        self._learners: dict[str, tuple[float, LearnerStatus]] = {}  # of each pool that has one, when it reported
        self._tallies: dict[str, Tally] = {}  # of each gateway, for good: counters do not fall
        self._decisions: Counter[tuple[str, str]] = Counter()  # that changed earlier ones
        self._pause: FleetPause | None = None  # the last order that a verifier told of, and when
        self._pause_told_s = 0.0
        self._started_s: float | None = None  # time of the first report
        self._looked_s = -math.inf
        self._heard_ids: set[str] = set()  # replicas that reported or left since the start; empty once it knows all
        self._knows_all = False  # every replica has had time to report

    def report_verifier(self, report: VerifierReport, now_s: float) -> Directive:
        """Store a verifier's report and return what changes; raise `StaleEpochError` for an old incarnation."""
        self._begin(now_s)
        memory = self._memory_for(report)
        drafters = [*self._drafters.values(), *self._unheard(report, now_s)]
        decision = plan_speculation(report, drafters, memory, self._policy, now_s)
        takers = takers_of(report, [known.state for known in self._verifiers.values()])
        crowded_since_s = self._crowded_since_s(report, takers, now_s)
        load = replace(report.load, requests=())  # no route depends on them: snapshots stay small
        state = VerifierState(
            report=replace(report, load=load, step_times=()),
            reported_s=now_s,
            default_plan=decision.default_plan,
            price=decision.price,
        )
        known = self._verifiers.get(report.verifier_id)
        self._changes.put(report.verifier_id, None if known is None else known.state, state)
        self._verifiers[report.verifier_id] = _Verifier(state, decision.memory, crowded_since_s)
        self._decisions.update(decision.switched)
        # a draining drafter keeps its links until its last session has ended
        links = tuple([self._drafters[drafter_id].report.link for drafter_id in sorted(self._drafters)])
        return Directive(
            plans=decision.changed_plans,
            default_plan=decision.default_plan,
            drafters=links,
            weights=missed_weights([known.state.report for known in self._verifiers.values()], report),
            pause=self._missed_pause(report, now_s),
            can_migrate=bool(takers),
            migrate_one=crowded_since_s is not None and now_s - crowded_since_s >= self._policy.move_after_s,
        )

    def _missed_pause(self, report: VerifierReport, now_s: float) -> FleetPause | None:
        """Return the fleet's last order to pause or to go on if the verifier does otherwise.

        It outlives the verifiers that have followed it: the only one may be started again.
        """
        told = FleetPause.of(report.load)
        if told is not None and told.replaces(self._pause):
            self._pause, self._pause_told_s = told, now_s
            self._changes.note()
        pause = self._pause_at(now_s)
        return None if report.follows(pause) else pause

    def _pause_at(self, now_s: float) -> FleetPause | None:
        return None if self._pause is None else self._pause.after(now_s - self._pause_told_s)

    def _crowded_since_s(self, report: VerifierReport, takers: list[VerifierState], now_s: float) -> float | None:
        """Return since when others should take running requests of a verifier, by every report; None: not now."""
        if not is_crowded(report, takers):
            return None
        known = self._verifiers.get(report.verifier_id)
        return now_s if known is None or known.crowded_since_s is None else known.crowded_since_s

    def report_drafter(self, report: DrafterReport, now_s: float) -> None:
        """Store a drafter's report; raise `StaleEpochError` for an old incarnation."""
        self._begin(now_s)
        known = self._drafters.get(report.drafter_id)
        if known is not None:
            _refuse_stale(report.drafter_id, report.epoch, known.report.epoch)
        state = DrafterState(report=report, reported_s=now_s)
        self._changes.put(report.drafter_id, self._drafters.get(report.drafter_id), state)
        self._drafters[report.drafter_id] = state
        self._heard_ids.add(report.drafter_id)

    def report_learner(self, status: LearnerStatus, now_s: float) -> None:
        """Store what a pool's learner is at: for operators, nothing is decided by it."""
        _, last = self._learners.get(status.pool, (0.0, None))
        self._learners[status.pool] = now_s, status
        if status != last:
            self._changes.note()

    def hear_gateway(self, ask: NewsAsk) -> None:
        """Note what a gateway has chosen."""
        self._tallies[ask.gateway_id] = ask.tally

    def stop_taking(self) -> None:
        """Have every gateway refuse new requests."""
        self._is_stopping = True
        self._changes.note()

    @property
    def policy(self) -> RouterPolicy:
        return self._policy

    @policy.setter
    def policy(self, policy: RouterPolicy) -> None:
        self._policy = policy
        self._changes.note()

    @property
    def version(self) -> int:
        """How much there has been to tell."""
        return self._changes.version

    def news(self, seen: Cursor | None, now_s: float) -> FleetNews:
        """Return what has changed since somebody has `seen` it, or all."""
        self.look(now_s)
        changes = self._changes
        is_known = seen is not None and seen.epoch == self._epoch and changes.knows(seen.version)
        since = seen.version if seen is not None and is_known else 0
        live = self._live(now_s)
        changed = replace(
            live,
            verifiers=tuple(each for each in live.verifiers if changes.is_new(each.report.verifier_id, since)),
            drafters=tuple(each for each in live.drafters if changes.is_new(each.report.drafter_id, since)),
        )
        return FleetNews(
            cursor=Cursor(epoch=self._epoch, version=changes.version),
            is_whole=not is_known and not self.is_new(now_s),
            changed=changed,
            policy=self._policy,
        )

    def snapshot(self, now_s: float) -> FleetSnapshot:
        """Return all that is live."""
        self.look(now_s)
        return self._live(now_s)

    def remove(self, replica_id: str) -> None:
        """Forget a verifier or drafter that has gone; an unknown id may have expired, and is no error."""
        self._forget(replica_id)
        self._heard_ids.add(replica_id)

    def is_new(self, now_s: float) -> bool:
        """Return whether a replica may be up that has not had time to report to this router."""
        return self._started_s is None or now_s - self._started_s <= self._policy.expire_after_s

    def _begin(self, now_s: float) -> None:
        self._started_s = now_s if self._started_s is None else self._started_s
        if now_s - self._looked_s >= LOOK_INTERVAL_S:
            self.look(now_s)

    def look(self, now_s: float) -> None:
        """Forget who has fallen silent; notice that all replicas have had time to report."""
        self._looked_s = now_s
        if not self._knows_all and not self.is_new(now_s):
            self._knows_all = True
            self._heard_ids.clear()
            self._changes.tell_all()
        policy = self._policy
        reported_s = {id_: known.state.reported_s for id_, known in self._verifiers.items()}
        reported_s |= {id_: drafter.reported_s for id_, drafter in self._drafters.items()}
        for replica_id in [id_ for id_, last_s in reported_s.items() if not is_fresh(last_s, now_s, policy)]:
            self._forget(replica_id)
        learners = {pool: last for pool, last in self._learners.items() if is_fresh(last[0], now_s, policy)}
        if len(learners) < len(self._learners):
            self._learners = learners
            self._changes.note()

    def _forget(self, replica_id: str) -> None:
        if self._verifiers.pop(replica_id, None) is not None or self._drafters.pop(replica_id, None) is not None:
            self._changes.leave(replica_id)

    def _memory_for(self, report: VerifierReport) -> VerifierMemory:
        """Return what is remembered of a verifier: nothing of one that is new or restarted."""
        known = self._verifiers.get(report.verifier_id)
        if known is None:
            return VerifierMemory()
        _refuse_stale(report.verifier_id, report.epoch, known.state.report.epoch)
        return VerifierMemory() if report.epoch > known.state.report.epoch else known.memory

    def _unheard(self, report: VerifierReport, now_s: float) -> list[DrafterState]:
        """Return the drafters that a verifier has links to and that have not reported to a new router yet."""
        if not self.is_new(now_s):
            return []
        longest = self._policy.max_draft_length
        unheard = [drafter_id for drafter_id in report.drafters_up if drafter_id not in self._heard_ids]
        reports = [DrafterReport(drafter_id=id_, endpoint="", epoch=0, max_draft_length=longest) for id_ in unheard]
        return [DrafterState(report=report, reported_s=now_s) for report in reports]

    def _live(self, now_s: float) -> FleetSnapshot:
        tally = functools.reduce(Tally.plus, self._tallies.values(), Tally(self._decisions))
        fleet = FleetSnapshot(
            verifiers=tuple([verifier.state for verifier in self._verifiers.values()]),
            drafters=tuple(self._drafters.values()),
            decided_at_s=now_s,
            learners=tuple([status for _, status in self._learners.values()]),
            is_stopping=self._is_stopping,
            pause=self._pause_at(now_s),
        )
        return fleet.with_counts(tally.decisions, tally.placements)


class StaleEpochError(RuntimeError):
    """The report is of an incarnation that a newer one has replaced."""


@dataclass(slots=True)
class _Verifier:
    state: VerifierState
    memory: VerifierMemory
    crowded_since_s: float | None  # since when others should take running requests of it; None: they need not


def _refuse_stale(replica_id: str, epoch: int, known_epoch: int) -> None:
    if epoch < known_epoch:
        raise StaleEpochError(f"{replica_id!r} reports as epoch {epoch}, but epoch {known_epoch} is running")
