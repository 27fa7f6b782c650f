"""What the router tells gateways, as it changes: all that they place requests by.

    reports ─▶ router   version 7: v3 | version 8: d1 | version 9: v2
               gateway  has seen 7    ─▶ is sent d1, v2: version 9

A report that differs from the last one in nothing but its time is no change. When a replica leaves, what is told next
is whole: who is not in it has left. A router that has just started never says that, for it does not know all yet: what
gateways know from the one before it stays, until every replica has had time to report.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field

from outrider.cluster.router.fleet import DrafterState, FleetSnapshot, PlacementReason, RouterPolicy, VerifierState


@dataclass(slots=True)
class Tally:
    """How often somebody decided and placed since its start."""

    decisions: Counter[tuple[str, str]] = field(default_factory=Counter)  # by "on" or "off", and its reason
    placements: Counter[PlacementReason] = field(default_factory=Counter)

    @classmethod
    def of(cls, fleet: FleetSnapshot) -> Tally:
        return cls(
            Counter({(item.decision, item.reason): item.count for item in fleet.decisions}),
            Counter({item.reason: item.count for item in fleet.placements}),
        )

    def plus(self, other: Tally) -> Tally:
        return Tally(self.decisions + other.decisions, self.placements + other.placements)

    def minus(self, earlier: Tally) -> Tally:
        return Tally(self.decisions - earlier.decisions, self.placements - earlier.placements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """How far somebody has heard one router out."""

    epoch: int  # of the router: another one counts anew
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewsAsk:
    """What a gateway says when it asks for news."""

    gateway_id: str
    seen: Cursor | None  # None: nothing yet
    tally: Tally = field(default_factory=Tally)  # of what it has chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetNews:
    """What has changed; or, if it `is_whole`, all that there is."""

    cursor: Cursor
    is_whole: bool
    changed: FleetSnapshot  # of verifiers and drafters those that have changed, of all else all
    policy: RouterPolicy


State = VerifierState | DrafterState


class Changes:
    """At which version each replica's state last changed."""

    def __init__(self) -> None:
        self.version = 0
        self._whole_from = 0  # who has heard less is told all
        self._changed_at: dict[str, int] = {}

    def note(self) -> None:
        """Note a change of what no replica has reported."""
        self.version += 1

    def put(self, replica_id: str, last: State | None, state: State) -> None:
        """Note a replica's state, after its `last` one."""
        if last is None or dataclasses.replace(last, reported_s=state.reported_s) != state:
            self.note()
            self._changed_at[replica_id] = self.version

    def leave(self, replica_id: str) -> None:
        """Note that a replica has left."""
        del self._changed_at[replica_id]
        self.tell_all()

    def tell_all(self) -> None:
        """Have the next news be whole, for everybody."""
        self.note()
        self._whole_from = self.version

    def knows(self, version: int) -> bool:
        """Return whether changes are all that is new to who has seen `version`."""
        return version >= self._whole_from

    def is_new(self, replica_id: str, version: int) -> bool:
        """Return whether a replica's state has changed since `version`."""
        return self._changed_at[replica_id] > version
