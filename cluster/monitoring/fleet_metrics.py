"""The fleet's Prometheus metrics, from the reports of verifiers, drafters and router in the gateway's snapshot.

Counters are per replica: `engine` is its id. A replaced replica's series ends, and the new one's begins at 0.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from outrider.cluster.monitoring.expert_metrics import EXPERTS
from outrider.cluster.monitoring.fleet_load import tokens_per_accelerator
from outrider.cluster.monitoring.fleet_metric import (
    FleetMetric,
    Rows,
    Value,
    add_sample,
    family_of,
    of_drafters,
    of_verifiers,
    of_verifiers_by,
)
from outrider.cluster.monitoring.handover_metrics import HANDOVERS
from outrider.cluster.monitoring.learner_metrics import LEARNERS
from outrider.cluster.monitoring.metrics import LABELS, Definition, alias_of
from outrider.cluster.monitoring.update_metrics import UPDATES
from outrider.cluster.router.fleet import FleetSnapshot, ReplicaState, VerifierReport
from outrider.verifier_service.messages.engine import BreakerState
from outrider.verifier_service.messages.graph_counts import GraphCounts

CIRCUIT_STATES = {BreakerState.CLOSED.value: 0.0, BreakerState.HALF_OPEN.value: 1.0, BreakerState.OPEN.value: 2.0}


def _yields(report: VerifierReport) -> Iterable[tuple[str, Value]]:
    for known in report.load.drafters:
        if known.accepted_per_round is not None:
            yield known.drafter_id, known.accepted_per_round


def _bad_frames(snapshot: FleetSnapshot, now_s: float) -> Rows:
    for verifier in snapshot.verifiers:
        yield (verifier.report.verifier_id, "verifier"), verifier.report.num_bad_frames
    for drafter in snapshot.drafters:
        yield (drafter.report.drafter_id, "drafter"), drafter.report.num_bad_frames


def _graphs(snapshot: FleetSnapshot) -> Iterator[tuple[str, str, GraphCounts]]:
    """Yield the id, the role and the captured steps of every replica."""
    for verifier in snapshot.verifiers:
        yield verifier.report.verifier_id, "verifier", verifier.report.load.counters.graphs
    for drafter in snapshot.drafters:
        yield drafter.report.drafter_id, "drafter", drafter.report.load.counters.graphs


def _replayed_steps(snapshot: FleetSnapshot, now_s: float) -> Rows:
    return [((replica, role), graphs.num_replayed) for replica, role, graphs in _graphs(snapshot)]


def _capture_seconds(snapshot: FleetSnapshot, now_s: float) -> Rows:
    return [((replica, role), graphs.capture_s) for replica, role, graphs in _graphs(snapshot)]


def _eager_steps(snapshot: FleetSnapshot, now_s: float) -> Rows:
    for replica, role, graphs in _graphs(snapshot):
        yield from (((replica, role, reason), count) for reason, count in graphs.eager.items())


def _pool_replicas(snapshot: FleetSnapshot, now_s: float) -> Rows:
    counts = Counter(("verifier", ReplicaState.of(state.report).value) for state in snapshot.verifiers)
    counts += Counter(("drafter", ReplicaState.of(state.report).value) for state in snapshot.drafters)
    for labels in itertools.product(("verifier", "drafter"), [state.value for state in ReplicaState]):
        yield labels, counts[labels]


def _decisions(snapshot: FleetSnapshot, now_s: float) -> Rows:
    return [((item.decision, item.reason), item.count) for item in snapshot.decisions]


def _placements(snapshot: FleetSnapshot, now_s: float) -> Rows:
    return [((item.reason.value,), item.count) for item in snapshot.placements]


def _tokens_per_accelerator(snapshot: FleetSnapshot, now_s: float) -> Rows:
    per_second = tokens_per_accelerator(snapshot.verifiers, snapshot.drafters)
    return [] if per_second is None else [((), per_second)]


def _snapshot_age(snapshot: FleetSnapshot, now_s: float) -> Rows:
    return [((), max(0.0, now_s - snapshot.decided_at_s))]


_LOAD = (
    of_verifiers(
        "num_requests_running",
        "gauge",
        "Requests that hold KV in a verifier",
        lambda state: state.report.load.num_running,
        has_alias=True,
    ),
    of_verifiers(
        "num_requests_waiting",
        "gauge",
        "Requests in a verifier's queue",
        lambda state: state.report.load.num_waiting,
        has_alias=True,
    ),
    of_verifiers(
        "kv_cache_usage_perc",
        "gauge",
        "KV blocks in use / KV blocks, 0 to 1",
        lambda state: state.report.load.kv_usage,
        has_alias=True,
    ),
    of_verifiers(
        "prefix_cache_queries",
        "counter",
        "Tokens of admitted requests that were looked up in the prefix cache",
        lambda state: state.report.load.counters.num_prefix_queried_tokens,
        has_alias=True,
    ),
    of_verifiers(
        "prefix_cache_hits",
        "counter",
        "Tokens found in the prefix cache; rate = this / prefix_cache_queries",
        lambda state: state.report.load.counters.num_prefix_hit_tokens,
        has_alias=True,
    ),
    of_verifiers(
        "num_preemptions",
        "counter",
        "Times a request's KV was taken away for an older one",
        lambda state: state.report.load.counters.num_preemptions,
        has_alias=True,
    ),
    of_verifiers(
        "request_queue_time_seconds",
        "histogram",
        "Begin of a request's first step - time the verifier received it",
        lambda state: state.report.load.counters.queue_s,
        has_alias=True,
    ),
    FleetMetric(
        Definition(
            name="pool_replicas",
            kind="gauge",
            formula="Replicas that report to the router, by role (verifier, drafter) and state (ready, draining)",
            labels=("model_name", "role", "state"),
        ),
        _pool_replicas,
    ),
    FleetMetric(
        Definition(
            name="fleet_snapshot_age_seconds",
            kind="gauge",
            formula="Now - time of the router's snapshot that all fleet metrics here come from",
            labels=("model_name",),
        ),
        _snapshot_age,
    ),
)

_STEPS = (
    of_verifiers(
        "verify_step_seconds",
        "histogram",
        "Time of a verifier's step, from scheduling to the last ask for a draft",
        lambda state: state.report.load.counters.step_s,
    ),
    of_verifiers(
        "verify_idle_seconds",
        "counter",
        "Time without a step because every request waited for its draft",
        lambda state: state.report.load.counters.idle_s,
    ),
    of_verifiers(
        "verify_idle_share",
        "gauge",
        "Share of the last two seconds without a step because every request waited for its draft",
        lambda state: state.report.load.verify_idle_share,
    ),
    of_verifiers(
        "verify_knee_tokens",
        "gauge",
        "Tokens of a step from which a verifier is compute-bound; no sample where it never is, or does not know",
        lambda state: state.report.load.knee,
    ),
    of_verifiers(
        "verify_extrapolated_steps",
        "counter",
        "Steps a quarter larger than all that the cost model had profiled or seen: their cost was extrapolated",
        lambda state: state.report.load.counters.num_extrapolated_steps,
    ),
    of_verifiers(
        "verify_scheduled_tokens",
        "counter",
        "Tokens computed by the target model, drafts included",
        lambda state: state.report.load.counters.num_scheduled_tokens,
    ),
    of_verifiers(
        "verify_committed_tokens",
        "counter",
        "Output tokens committed; throughput is its rate",
        lambda state: state.report.load.counters.num_committed_tokens,
    ),
    of_verifiers(
        "verify_drafts",
        "counter",
        "Drafts that a verifier verified",
        lambda state: state.report.load.counters.num_drafts,
    ),
    of_verifiers(
        "verify_draft_tokens",
        "counter",
        "Draft tokens that a verifier verified",
        lambda state: state.report.load.counters.num_draft_tokens,
    ),
    of_verifiers(
        "verify_accepted_tokens",
        "counter",
        "Draft tokens that a verifier accepted; accepted per position = this / verify_draft_tokens",
        lambda state: state.report.load.counters.num_accepted_tokens,
    ),
    FleetMetric(
        Definition(
            name="tokens_per_second_per_accelerator",
            kind="gauge",
            formula="Output tokens committed over the last two seconds / ranks of verifiers and drafters",
            labels=("model_name",),
        ),
        _tokens_per_accelerator,
    ),
)

_DRAFTING = (
    FleetMetric(
        Definition(
            name="router_spec_decisions",
            kind="counter",
            formula="Decisions on new requests, and changes of them; decision is on or off, reason says why",
            labels=("model_name", "decision", "reason"),
        ),
        _decisions,
    ),
    FleetMetric(
        Definition(
            name="router_placements",
            kind="counter",
            formula="New requests that gateways placed, by why they went to their verifier",
            labels=("model_name", "reason"),
        ),
        _placements,
    ),
    of_verifiers(
        "price",
        "gauge",
        "Committed tokens that one more draft position costs a verifier: drafts go on while their survival exceeds it; "
        "what the router goes by: the verifier's own, or the KV pressure where that is more; none while nobody decodes",
        lambda state: state.price,
    ),
    of_verifiers(
        "draft_length",
        "gauge",
        "Draft tokens that the router's plan allows a new request of a verifier; 0: speculation is off",
        lambda state: state.default_plan.draft_length,
    ),
    of_verifiers(
        "draft_length_mean",
        "gauge",
        "Draft tokens asked for per decoding request and step, of the last two seconds: what the price makes of plans",
        lambda state: state.report.load.draft_length_mean,
    ),
    of_verifiers(
        "draft_rtt_seconds",
        "histogram",
        "Time from asking a drafter to its draft, of rounds answered in time",
        lambda state: state.report.load.counters.round_trip_s,
    ),
    of_verifiers(
        "draft_lateness_seconds",
        "histogram",
        "Arrival of a draft - its deadline, of drafts that missed it",
        lambda state: state.report.load.counters.lateness_s,
    ),
    of_verifiers(
        "drafts_stale",
        "counter",
        "Drafts dropped because their round was over",
        lambda state: state.report.load.counters.num_stale_drafts,
    ),
    of_verifiers_by(
        "reason",
        "draft_fallback",
        "counter",
        "Rounds that ended without a usable draft, by reason; the request then decoded plainly",
        lambda report: report.load.counters.fallbacks.items(),
    ),
    of_verifiers(
        "draft_resyncs",
        "counter",
        "Times a drafter asked for a request's whole prefix again",
        lambda state: state.report.load.counters.num_resyncs,
    ),
    of_verifiers_by(
        "transport",
        "draft_state_bytes",
        "counter",
        "Bytes of the target's hidden states sent to drafters, by transport",
        lambda report: report.load.counters.num_state_bytes.items(),
    ),
    of_verifiers(
        "draft_tensor_fallbacks",
        "counter",
        "Hidden states that went in frames because their channel was full or had failed",
        lambda state: state.report.load.counters.num_tensor_fallbacks,
    ),
    of_verifiers_by(
        "drafter",
        "drafter_circuit_state",
        "gauge",
        "A verifier's circuit breaker in front of a drafter: 0 closed, 1 half open, 2 open",
        lambda report: [(circuit.drafter_id, CIRCUIT_STATES[circuit.state]) for circuit in report.load.circuits],
    ),
    of_verifiers_by(
        "drafter",
        "draft_yield",
        "gauge",
        "Tokens that a drafter lately brought a verifier's requests per round: pools are chosen by it",
        _yields,
    ),
    FleetMetric(
        Definition(
            name="link_bad_frames",
            kind="counter",
            formula="Frames of the verifier-drafter link that could not be decoded, by the role of who received them",
            labels=(*LABELS, "role"),
        ),
        _bad_frames,
    ),
    of_drafters("draft_sessions", "gauge", "Sessions that a drafter holds", lambda report: report.load.num_sessions),
    of_drafters(
        "draft_queue_depth", "gauge", "Asks that a drafter has not answered", lambda report: report.load.queue_depth
    ),
    of_drafters(
        "drafter_draft_seconds",
        "gauge",
        "Smoothed time from an ask to its draft inside the drafter",
        lambda report: report.load.mean_draft_s or 0.0,
    ),
    of_drafters(
        "drafter_drafts", "counter", "Asks that a drafter answered", lambda report: report.load.counters.num_drafts
    ),
    of_drafters(
        "drafter_draft_tokens",
        "counter",
        "Tokens that a drafter drafted",
        lambda report: report.load.counters.num_draft_tokens,
    ),
    of_drafters(
        "speculation_cache_hits",
        "counter",
        "Asks that a drafter answered at once, having drafted ahead for that outcome; rate = this / (this + misses)",
        lambda report: report.load.counters.num_cache_hits,
    ),
    of_drafters(
        "speculation_cache_misses",
        "counter",
        "Asks of an outcome that a drafter had not drafted ahead for, though it had for others",
        lambda report: report.load.counters.num_cache_misses,
    ),
    of_drafters(
        "drafter_evicted_sessions",
        "counter",
        "Sessions that a drafter dropped for want of room",
        lambda report: report.load.counters.num_evicted_sessions,
    ),
)
_GRAPHS = (
    FleetMetric(
        Definition(
            name="graph_steps",
            kind="counter",
            formula="Steps of a model that replayed a CUDA graph, by the role of its replica; 0 on CPUs",
            labels=(*LABELS, "role"),
        ),
        _replayed_steps,
    ),
    FleetMetric(
        Definition(
            name="graph_fallback",
            kind="counter",
            formula="Steps that ran without a graph where steps are captured, by role and reason",
            labels=(*LABELS, "role", "reason"),
        ),
        _eager_steps,
    ),
    FleetMetric(
        Definition(
            name="graph_capture_seconds",
            kind="counter",
            formula="Time spent capturing steps as CUDA graphs, nearly all of it at start",
            labels=(*LABELS, "role"),
        ),
        _capture_seconds,
    ),
)
_METRICS = (*_LOAD, *_STEPS, *_GRAPHS, *_DRAFTING, *HANDOVERS, *EXPERTS, *UPDATES, *LEARNERS)
FLEET_DEFINITIONS = tuple(metric.definition for metric in _METRICS)


class FleetMetrics(Collector):
    """Show the latest snapshot; before the first, families without samples."""

    def __init__(
        self,
        snapshot: Callable[[], FleetSnapshot | None],
        *,
        model_name: str,
        wall_clock: Callable[[], float],
        vllm_aliases: bool = True,
    ) -> None:
        self._snapshot = snapshot
        self._model_name = model_name
        self._wall_clock = wall_clock
        self._vllm_aliases = vllm_aliases

    def collect(self) -> Iterator[Metric]:
        snapshot, now_s = self._snapshot(), self._wall_clock()
        for metric in _METRICS:
            family = family_of(metric.definition)
            for values, value in metric.read(snapshot, now_s) if snapshot is not None else ():
                add_sample(family, (self._model_name, *values), value)
            yield family
            if metric.definition.has_alias and self._vllm_aliases:
                yield alias_of(family)
