"""What verifiers and drafters report to the router, what it answers, and the policy it decides by.

All are frozen dataclasses: they travel through `wire.encode`/`decode` and through Ray unchanged. Every time in them is
of the router's clock (its wrapper and the gateways pass wall-clock seconds).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.cluster.common.hints import did_you_mean
from outrider.verifier_service.messages.drafter_load import DrafterLoad
from outrider.verifier_service.messages.engine import (
    EngineLoad,
    RequestLoad,
    StepTime,
)
from outrider.verifier_service.messages.link import DrafterEndpoint
from outrider.verifier_service.messages.request import DisabledReason, SpeculationPlan

UNKNOWN_POOL = ""  # of drafters that only a verifier's links tell of: the router has just started


class PlacementReason(enum.StrEnum):
    """Why a new request goes to the verifier that it goes to."""

    ONLY = "only"  # no other takes it
    PREFIX = "prefix"  # those with its prefix go there, and it is not much busier than others
    SPILL = "spill"  # it is: this is the next one for its prefix
    LEAST_LOAD = "least_load"  # the fewest requests, the emptiest KV pool, the lowest price, taken together
    SPREAD = "spread"  # what is known of loads is too old, so that requests go anywhere alike


# Reasons that more drafters would end: they count for the autoscaler.
LACKS_DRAFTER = frozenset({DisabledReason.DRAFTER_UNAVAILABLE, DisabledReason.DRAFTER_TIMEOUT})


@functools.cache  # one is as good as another, and a busy router says it often
def off(reason: DisabledReason) -> SpeculationPlan:
    """Return the plan of a request that runs without drafts."""
    return SpeculationPlan(disabled_reason=reason)


class PolicyMode(enum.Enum):
    AUTO = "auto"
    ALWAYS = "always"  # the operator pins every draft to the longest allowed length: no gain is computed
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierReport:
    """A verifier's state, sent a few times a second."""

    verifier_id: str
    endpoint: str  # "host:port" of its gateway-facing gRPC
    epoch: int
    load: EngineLoad  # what its engine says of itself
    max_model_len: int | None = None  # longest sequence its KV pool holds; None: not known
    step_times: tuple[StepTime, ...] = ()
    own_draft_length: int = 0  # the longest draft of the drafter in its own process; 0: there is none
    linked_drafters: tuple[str, ...] = ()  # those it has a live link to
    draining: bool = False  # takes no new requests and ends when the running ones have
    num_bad_link_frames: int = 0  # of drafters, which its links could not read
    num_ranks: int = 1  # accelerators that it takes

    @property
    def num_bad_frames(self) -> int:
        """How many frames of drafters no part of it could read."""
        return self.num_bad_link_frames + self.load.counters.num_bad_frames

    @property
    def drafters_up(self) -> tuple[str, ...]:
        """Drafters that it has a live link to and that have not failed it lately."""
        failing = {circuit.drafter_id for circuit in self.load.circuits if circuit.is_open}
        return tuple(drafter_id for drafter_id in self.linked_drafters if drafter_id not in failing)

    @property
    def running(self) -> tuple[RequestLoad, ...]:
        return tuple(request for request in self.load.requests if request.is_running)

    @property
    def waiting(self) -> tuple[RequestLoad, ...]:
        return tuple(request for request in self.load.requests if not request.is_running)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterReport:
    """A drafter's state, sent a few times a second."""

    drafter_id: str
    endpoint: str
    epoch: int
    max_draft_length: int
    load: DrafterLoad = field(default_factory=DrafterLoad)  # what its engine says of itself
    pool: str = UNKNOWN_POOL  # drafters of one draft in the same way
    draining: bool = False
    num_bad_frames: int = 0  # that verifiers sent
    num_ranks: int = 1  # accelerators that it takes


class ReplicaState(enum.StrEnum):
    """What a replica that reports is good for."""

    READY = "ready"
    DRAINING = "draining"  # takes no new requests

    @classmethod
    def of(cls, report: VerifierReport | DrafterReport) -> ReplicaState:
        return cls.DRAINING if report.draining else cls.READY


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """The router's answer to a verifier's report."""

    plans: dict[str, SpeculationPlan]  # running requests whose plan changed
    default_plan: SpeculationPlan  # for requests that arrive before the router has seen them
    drafters: tuple[DrafterEndpoint, ...]  # to hold links to


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierState:
    """A verifier in a snapshot; in those given to gateways the report comes without its requests and profile."""

    report: VerifierReport
    reported_s: float
    default_plan: SpeculationPlan
    num_assigned: int = 0  # requests sent there since its last report
    price: float | None = None  # by which was decided; None: nobody decodes, or none was reported


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterState:
    report: DrafterReport
    reported_s: float
    num_assigned: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionCount:
    """How often the router decided so since its start."""

    decision: str  # on | off
    reason: str  # an `EnabledReason` or a `DisabledReason`
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementCount:
    """How often the router placed a new request for such a reason since its start."""

    reason: PlacementReason
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSnapshot:
    """Everything that `routing.route` looks at, and what the router has decided, for operators."""

    verifiers: tuple[VerifierState, ...]
    drafters: tuple[DrafterState, ...]
    decided_at_s: float
    decisions: tuple[DecisionCount, ...] = ()
    placements: tuple[PlacementCount, ...] = ()
    is_stopping: bool = False  # the service takes no new requests

    @property
    def num_streams(self) -> int:
        """Return how many requests are being served, or wait."""
        loads = [state.report.load for state in self.verifiers]
        assigned = sum(state.num_assigned for state in self.verifiers)
        return assigned + sum(load.num_running + load.num_waiting for load in loads)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteAsk:
    request_id: str
    num_prompt_tokens: int
    num_speculative_tokens: int | None = None  # a cap on the draft length; 0: the request opted out
    excluded_verifier_ids: tuple[str, ...] = ()  # just failed for this request
    affinity_key: str | None = None  # requests that share it share a prefix: their verifier is best the same
    priority: int = 0  # below 0 it is served before those that wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    verifier_id: str
    endpoint: str
    plan: SpeculationPlan
    reason: PlacementReason


@dataclass(frozen=True, slots=True)
class RouteAnswer:
    """The router's word on a new request."""

    assignment: Assignment | None  # None: no verifier takes it now


BatchSizeTable = tuple[tuple[int, int, int], ...]


def table_length(table: BatchSizeTable, batch_size: int) -> int:
    """Return a table's draft length for a batch; in a gap and beyond the end that of the range before, as vLLM."""
    index = bisect_right(table, batch_size, key=lambda row: row[0])
    return table[max(0, index - 1)][2]


def check_table(table: BatchSizeTable) -> None:
    """Raise `ValueError` naming the option unless the rows are ranges in order, from batch size 1 on."""
    name = "draft_length_by_batch_size"
    for row in table:
        if len(row) != 3 or any(isinstance(number, bool) or not isinstance(number, int) for number in row):
            raise ValueError(f"{name} must be rows of three whole numbers: first and last batch size, draft length")
    if table and table[0][0] != 1:
        raise ValueError(f"{name} must begin at batch size 1")
    if any(first > last or length < 0 for first, last, length in table):
        raise ValueError(f"{name} must have first <= last and draft lengths of at least 0")
    if any(before[1] >= after[0] for before, after in itertools.pairwise(table)):
        raise ValueError(f"{name} must have its ranges in order and apart")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterPolicy:
    """The operator's settings. Raises `ValueError` naming the field that is out of range."""

    mode: PolicyMode = PolicyMode.AUTO
    max_draft_length: int = 8  # a bound in mode auto, the length itself in mode always
    # vLLM's num_speculative_tokens_per_batch_size, in mode auto: (first, last, length) by running requests; empty: none
    draft_length_by_batch_size: BatchSizeTable = ()
    on_dwell_s: float = 0.15  # how long drafts must have paid to be switched on: two reports …
    off_dwell_s: float = 2.0  # … and not have paid to be switched off
    kv_pressure_from: float = 0.9  # used share of the KV blocks from which drafts cost more: they bring preemptions
    max_queue_depth: int = 64  # a drafter with more asks waiting gets no new requests and hands some over
    expire_after_s: float = 3.0  # a replica that has not reported for so long is gone
    stale_snapshot_s: float = 10.0  # an older snapshot says who is there, not who is busy

    def __post_init__(self) -> None:
        for name in ("max_draft_length", "max_queue_depth"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0")
        if not 0.0 <= self.kv_pressure_from <= 1.0:
            raise ValueError("kv_pressure_from must be in [0, 1]")
        for name in ("on_dwell_s", "off_dwell_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0")
        check_table(self.draft_length_by_batch_size)
        for name in ("expire_after_s", "stale_snapshot_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")


def with_changes(policy: RouterPolicy, changes: Mapping[str, Any]) -> RouterPolicy:
    """Return a policy with some fields changed.

    Raises `ValueError` naming the field; an unknown one is refused with the closest match.
    """
    known = [known.name for known in dataclasses.fields(policy)]
    for name in changes:
        if name not in known:
            raise ValueError(f"unknown policy setting {name!r}{did_you_mean(str(name), known)}")
    changed = {name: _changed(name, getattr(policy, name), value) for name, value in changes.items()}
    return dataclasses.replace(policy, **changed)


def _changed(name: str, old: Any, value: Any) -> Any:
    if isinstance(old, PolicyMode):
        if value not in [mode.value for mode in PolicyMode]:
            raise ValueError(f"{name} must be auto, always or off, not {value!r}")
        return PolicyMode(value)
    if isinstance(old, tuple):
        if not isinstance(value, list | tuple) or not all(isinstance(row, list | tuple) for row in value):
            raise ValueError(f"{name} must be a list of rows, not {value!r}")
        return tuple(tuple(row) for row in value)
    if isinstance(value, bool) or not isinstance(value, int if isinstance(old, int) else int | float):
        raise ValueError(f"{name} must be a {'whole ' if isinstance(old, int) else ''}number, not {value!r}")
    return value
