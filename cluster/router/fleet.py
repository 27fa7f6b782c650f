"""What verifiers and drafters report to the router, what it answers, and the policy it decides by.

All are frozen dataclasses: they travel through `wire.encode`/`decode` and through Ray unchanged. Times are of the
router's clock: its wrapper and the gateways pass wall-clock seconds.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.cluster.common.hints import did_you_mean
from outrider.drafter_service.learning.messages import LearnerStatus
from outrider.verifier_service.messages.drafter_load import DrafterLoad
from outrider.verifier_service.messages.engine import EngineLoad, StepTime
from outrider.verifier_service.messages.link import DrafterEndpoint
from outrider.verifier_service.messages.request import DisabledReason, SpeculationPlan

UNKNOWN_POOL = ""  # of drafters known by a verifier's links alone: the router has just started


class PlacementReason(enum.StrEnum):
    """Why a new request goes to its verifier."""

    ONLY = "only"  # no other verifier takes it
    PREFIX = "prefix"  # requests with its prefix go there
    SPILL = "spill"  # the verifier of its prefix is much busier than others: this one is next by rank
    LEAST_LOAD = "least_load"  # requests, KV usage and price, taken together
    SPREAD = "spread"  # reported loads are too old: requests are spread by hash


class VerifierRole(enum.StrEnum):
    """What a verifier is for while there are others; alone, each does both."""

    BOTH = "both"
    PREFILL = "prefill"  # computes prompts of new requests, and hands them over with their first token
    DECODE = "decode"  # takes them over


# Reasons for no drafts that one more drafter would remove; the autoscaler counts them.
LACKS_DRAFTER = frozenset({DisabledReason.DRAFTER_UNAVAILABLE, DisabledReason.DRAFTER_TIMEOUT})


class PolicyMode(enum.Enum):
    AUTO = "auto"
    ALWAYS = "always"  # every draft has the longest allowed length, whatever the price
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierReport:
    """What a verifier tells the router a few times a second: its engine's load report and how to reach it."""

    verifier_id: str
    endpoint: str  # "host:port" of its gateway-facing gRPC
    epoch: int
    load: EngineLoad
    num_taken: int = 0  # requests, since its start; see `requests_link`
    num_pending: int = 0  # of those, live ones that its load does not include yet
    max_model_len: int | None = None  # longest sequence its KV pool holds; None: not known
    step_times: tuple[StepTime, ...] = ()
    own_draft_length: int = 0  # the longest draft of the drafter in its own process; 0: there is none
    linked_drafters: tuple[str, ...] = ()  # drafters that it has a live link to
    draining: bool = False  # takes no new requests, and stops once the running ones have ended
    num_bad_link_frames: int = 0  # drafters' frames that its links could not read
    num_ranks: int = 1  # accelerators
    dtype: str = ""  # of the weights, as torch names it; empty: unknown
    role: VerifierRole = VerifierRole.BOTH
    batch_dependent: tuple[str, ...] | None = None  # parts of its model; see `model.batch_invariance`; None: unknown

    def serves(self, weights: FleetWeights | None) -> bool:
        """Return whether it draws tokens from these weights, all of them."""
        return self.load.weights_error is None and (weights is None or self.load.weight_version == weights.version)

    def follows(self, pause: FleetPause | None) -> bool:
        """Return whether it runs steps where the fleet does, and none where the fleet is paused."""
        is_behind = pause is not None and self.load.pause_asked_s < pause.asked_s
        return pause is None or not is_behind or self.load.is_paused == pause.is_paused

    @property
    def num_bad_frames(self) -> int:
        """Drafters' frames that its links or its engine could not read."""
        return self.num_bad_link_frames + self.load.counters.num_bad_frames

    @property
    def drafters_up(self) -> tuple[str, ...]:
        """Drafters that it has a live link to, with the circuit breaker closed."""
        failing = {circuit.drafter_id for circuit in self.load.circuits if circuit.is_open}
        return tuple(drafter_id for drafter_id in self.linked_drafters if drafter_id not in failing)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterReport:
    """What a drafter tells the router a few times a second."""

    drafter_id: str
    endpoint: str
    epoch: int
    max_draft_length: int
    load: DrafterLoad = field(default_factory=DrafterLoad)
    pool: str = UNKNOWN_POOL  # all drafters of a pool draft in the same way
    draining: bool = False
    num_bad_frames: int = 0  # verifiers' frames that it could not read
    num_ranks: int = 1  # accelerators

    @property
    def link(self) -> DrafterEndpoint:
        """What a verifier needs to hold a link to it."""
        return _endpoint(self.drafter_id, self.endpoint, self.epoch)


class ReplicaState(enum.StrEnum):
    """Whether a replica that reports takes new requests."""

    READY = "ready"
    DRAINING = "draining"

    @classmethod
    def of(cls, report: VerifierReport | DrafterReport) -> ReplicaState:
        return cls.DRAINING if report.draining else cls.READY


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetWeights:
    """The weights that the fleet took last."""

    version: str
    taken_s: float  # Unix time; 0: those that the verifiers started with
    folder: str | None = None  # where they came from; None: a trainer's group, or the verifiers started with them

    @classmethod
    def of(cls, reports: Iterable[VerifierReport]) -> FleetWeights | None:
        """Return the newest of the verifiers' weights; None without a verifier."""
        newest = max((report.load for report in reports), key=lambda load: load.weights_taken_s, default=None)
        if newest is None:
            return None
        return cls(version=newest.weight_version, taken_s=newest.weights_taken_s, folder=newest.weights_folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPause:
    """A trainer's last order to pause or to go on, which holds for verifiers that join later, too."""

    asked_s: float  # its number, in Unix seconds
    is_paused: bool
    lease_left_s: float | None = None  # None: until a trainer says so

    @classmethod
    def of(cls, load: EngineLoad) -> FleetPause | None:
        """Return the order that a verifier has followed last; None: it has heard none."""
        if load.pause_asked_s == 0.0:
            return None
        return cls(asked_s=load.pause_asked_s, is_paused=load.is_paused, lease_left_s=load.pause_left_s)

    def replaces(self, other: FleetPause | None) -> bool:
        """Return whether it is a newer order, or the same one where the other verifier did not pause yet."""
        return other is None or (self.asked_s, self.is_paused) > (other.asked_s, other.is_paused)

    def after(self, seconds: float) -> FleetPause:
        """Return what holds of it so many seconds later."""
        if not self.is_paused or self.lease_left_s is None:
            return self
        left_s = self.lease_left_s - seconds
        if left_s > 0.0:
            return dataclasses.replace(self, lease_left_s=left_s)
        return dataclasses.replace(self, is_paused=False, lease_left_s=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """The router's answer to a verifier's report."""

    plans: dict[str, SpeculationPlan]  # running requests whose plan changed
    # of requests that the router has not seen in a report yet. vLLM's plug-in applies it; our verifiers get a plan with
    # each request, and only count by it whether they lack drafters
    default_plan: SpeculationPlan
    drafters: tuple[DrafterEndpoint, ...]  # to hold links to
    weights: FleetWeights | None = None  # to take from their folder: the verifier started after they came
    pause: FleetPause | None = None  # an order that it has missed
    can_migrate: bool = False  # another verifier could take its requests over
    migrate_one: bool = False  # requests wait there, and another verifier has room: hand a running one over


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierState:
    """A verifier as gateways know it; its report has no requests and no step times."""

    report: VerifierReport
    reported_s: float
    default_plan: SpeculationPlan
    num_assigned: int = 0  # a gateway's own requests there that its report does not include yet
    price: float | None = None  # that decided its plans; None: none was reported


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterState:
    report: DrafterReport
    reported_s: float
    num_assigned: int = 0  # a gateway's own requests for it at verifiers whose reports do not include them yet


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionCount:
    """How many times router and gateways took a decision since their start."""

    decision: str  # on | off
    reason: str  # an `EnabledReason` or a `DisabledReason`
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementCount:
    """How many requests the gateways placed for a reason since their start."""

    reason: PlacementReason
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSnapshot:
    """Everything that `routing.route` depends on, and counts of decisions for operators."""

    verifiers: tuple[VerifierState, ...]
    drafters: tuple[DrafterState, ...]
    decided_at_s: float
    decisions: tuple[DecisionCount, ...] = ()
    placements: tuple[PlacementCount, ...] = ()
    learners: tuple[LearnerStatus, ...] = ()  # of the pools whose drafters learn while they serve
    is_stopping: bool = False  # the service takes no new requests
    pause: FleetPause | None = None  # a trainer's last order to pause or to go on; None: there was none

    def with_counts(
        self, decisions: Mapping[tuple[str, str], int], placements: Mapping[PlacementReason, int]
    ) -> FleetSnapshot:
        """Return the snapshot with counts of what was decided; a decision is "on" or "off", and its reason."""
        return dataclasses.replace(
            self,
            decisions=tuple(
                DecisionCount(decision=decision, reason=reason, count=count)
                for (decision, reason), count in sorted(decisions.items())
            ),
            placements=tuple(
                PlacementCount(reason=reason, count=count) for reason, count in sorted(placements.items())
            ),
        )

    @property
    def num_streams(self) -> int:
        """How many requests run or wait."""
        reports = [state.report for state in self.verifiers]
        return sum(report.load.num_running + report.load.num_waiting + report.num_pending for report in reports)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteAsk:
    request_id: str
    num_prompt_tokens: int
    num_speculative_tokens: int | None = None  # a cap on the draft length; 0: the request opted out
    excluded_verifier_ids: tuple[str, ...] = ()  # they have just failed this request
    affinity_key: str | None = None  # requests that share it share a prefix, and best a verifier
    priority: int = 0  # below 0 it overtakes the queue
    may_hand_over: bool = False  # its prompt may be computed at another verifier than its output


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    verifier_id: str
    endpoint: str
    plan: SpeculationPlan
    reason: PlacementReason
    prefill_verifier_id: str | None = None  # that computes the prompt and hands it over; None: the verifier itself does
    prefill_endpoint: str = ""


BatchSizeTable = tuple[tuple[int, int, int], ...]


@functools.lru_cache(maxsize=1 << 12)  # the same few go to every verifier with every report
def _endpoint(drafter_id: str, endpoint: str, epoch: int) -> DrafterEndpoint:
    return DrafterEndpoint(drafter_id=drafter_id, endpoint=endpoint, epoch=epoch)


def is_fresh(reported_s: float, now_s: float, policy: RouterPolicy) -> bool:
    """Return whether a replica that reported then is live now."""
    return now_s - reported_s <= policy.expire_after_s


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
    # mode auto; vLLM's num_speculative_tokens_per_batch_size: (first, last, length) by running requests; empty: none
    draft_length_by_batch_size: BatchSizeTable = ()
    on_dwell_s: float = 0.15  # drafts are switched on once they have paid for so long: two reports
    off_dwell_s: float = 2.0  # drafts are switched off once they have not paid for so long
    kv_pressure_from: float = 0.9  # used share of KV blocks from which drafts cost more: they bring preemptions
    max_queue_depth: int = 64  # a drafter with more waiting asks gets no new requests and hands some over
    expire_after_s: float = 3.0  # a replica that has not reported for this long is gone
    min_handover_tokens: int = 64  # a shorter prompt is computed where it decodes: to move it costs more than it saves
    move_after_s: float = 1.0  # a verifier where requests wait for so long hands running ones to one that has room
    stale_snapshot_s: float = 10.0  # an older snapshot lists the replicas, but its loads are outdated

    def __post_init__(self) -> None:
        for name in ("max_draft_length", "max_queue_depth", "min_handover_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0")
        if not 0.0 <= self.kv_pressure_from <= 1.0:
            raise ValueError("kv_pressure_from must be in [0, 1]")
        for name in ("on_dwell_s", "off_dwell_s", "move_after_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0")
        check_table(self.draft_length_by_batch_size)
        for name in ("expire_after_s", "stale_snapshot_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")


def with_changes(policy: RouterPolicy, changes: Mapping[str, Any]) -> RouterPolicy:
    """Return a policy with some fields changed; `ValueError` names a bad field, or an unknown one's closest match."""
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
