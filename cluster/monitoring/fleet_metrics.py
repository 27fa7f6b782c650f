"""The fleet's Prometheus metrics, from the reports of verifiers, drafters and router in the gateway's snapshot.

Counters are per replica: `engine` is its id. A replaced replica's series ends, and the new one's begins at 0.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from outrider.cluster.monitoring.fleet_load import tokens_per_accelerator
from outrider.cluster.monitoring.fleet_metric import (
    COUNTERS,
    DRAFTER_COUNTERS,
    DRAFTER_LOAD,
    FETCHES,
    LOAD,
    FleetMetric,
    Rows,
    add_sample,
    family_of,
    of_fleet,
    of_verifiers,
    of_verifiers_by,
)
from outrider.cluster.monitoring.learner_metrics import LEARNERS
from outrider.cluster.monitoring.metrics import Definition, alias_of
from outrider.cluster.router.fleet import FleetSnapshot, ReplicaState
from outrider.verifier_service.messages.counts import GraphCounts
from outrider.verifier_service.messages.engine import BreakerState

CIRCUIT_STATES = {BreakerState.CLOSED.value: 0.0, BreakerState.HALF_OPEN.value: 1.0, BreakerState.OPEN.value: 2.0}


def _bad_frames(snapshot: FleetSnapshot) -> Rows:
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


def _replayed_steps(snapshot: FleetSnapshot) -> Rows:
    return [((replica, role), graphs.num_replayed) for replica, role, graphs in _graphs(snapshot)]


def _capture_seconds(snapshot: FleetSnapshot) -> Rows:
    return [((replica, role), graphs.capture_s) for replica, role, graphs in _graphs(snapshot)]


def _eager_steps(snapshot: FleetSnapshot) -> Rows:
    for replica, role, graphs in _graphs(snapshot):
        yield from (((replica, role, reason), count) for reason, count in graphs.eager.items())


def _pool_replicas(snapshot: FleetSnapshot) -> Rows:
    counts = Counter(("verifier", ReplicaState.of(state.report).value) for state in snapshot.verifiers)
    counts += Counter(("drafter", ReplicaState.of(state.report).value) for state in snapshot.drafters)
    for labels in itertools.product(("verifier", "drafter"), [state.value for state in ReplicaState]):
        yield labels, counts[labels]


def _decisions(snapshot: FleetSnapshot) -> Rows:
    return [((item.decision, item.reason), item.count) for item in snapshot.decisions]


def _placements(snapshot: FleetSnapshot) -> Rows:
    return [((item.reason.value,), item.count) for item in snapshot.placements]


def _tokens_per_accelerator(snapshot: FleetSnapshot) -> Rows:
    per_second = tokens_per_accelerator(snapshot.verifiers, snapshot.drafters)
    return [] if per_second is None else [((), per_second)]


def _draft_seconds(snapshot: FleetSnapshot) -> Rows:
    return [((state.report.drafter_id,), state.report.load.mean_draft_s or 0.0) for state in snapshot.drafters]


def _snapshot_age(snapshot: FleetSnapshot, now_s: float) -> Rows:
    return [((), max(0.0, now_s - snapshot.decided_at_s))]


_METRICS = (
    *LOAD.metrics("num_running", "num_waiting", "kv_usage"),
    *COUNTERS.metrics("num_prefix_queried_tokens", "num_prefix_hit_tokens", "num_preemptions", "queue_s"),
    of_fleet(
        "pool_replicas",
        "gauge",
        "Replicas that report to the router, by role (verifier, drafter) and state (ready, draining)",
        ("role", "state"),
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
    *COUNTERS.metrics("step_s", "idle_s"),
    *LOAD.metrics("verify_idle_share", "knee"),
    *COUNTERS.metrics("num_extrapolated_steps", "num_scheduled_tokens", "num_committed_tokens"),
    *COUNTERS.metrics("num_drafts", "num_draft_tokens", "num_accepted_tokens"),
    of_fleet(
        "tokens_per_second_per_accelerator",
        "gauge",
        "Output tokens committed over the last two seconds / ranks of verifiers and drafters",
        (),
        _tokens_per_accelerator,
    ),
    of_fleet(
        "graph_steps",
        "counter",
        "Steps of a model that replayed a CUDA graph, by the role of its replica; 0 on CPUs",
        ("engine", "role"),
        _replayed_steps,
    ),
    of_fleet(
        "graph_fallback",
        "counter",
        "Steps that ran without a graph where steps are captured, by role and reason",
        ("engine", "role", "reason"),
        _eager_steps,
    ),
    of_fleet(
        "graph_capture_seconds",
        "counter",
        "Time spent capturing steps as CUDA graphs, nearly all of it at start",
        ("engine", "role"),
        _capture_seconds,
    ),
    of_fleet(
        "router_spec_decisions",
        "counter",
        "Decisions on new requests, and changes of them; decision is on or off, reason says why",
        ("decision", "reason"),
        _decisions,
    ),
    of_fleet(
        "router_placements",
        "counter",
        "New requests that gateways placed, by why they went to their verifier",
        ("reason",),
        _placements,
    ),
    of_verifiers(
        "price",
        "Committed tokens that one more draft position costs a verifier: drafts go on while their survival exceeds it; "
        "what the router goes by: the verifier's own, or the KV pressure where that is more; none while nobody decodes",
        lambda state: state.price,
    ),
    of_verifiers(
        "draft_length",
        "Draft tokens that the router's plan allows a new request of a verifier; 0: speculation is off",
        lambda state: state.default_plan.draft_length,
    ),
    *LOAD.metrics("draft_length_mean"),
    *COUNTERS.metrics("round_trip_s", "lateness_s", "num_stale_drafts", "fallbacks", "num_resyncs"),
    *COUNTERS.metrics("num_state_bytes", "num_tensor_fallbacks"),
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
        lambda report: [(known.drafter_id, known.accepted_per_round) for known in report.load.drafters],
    ),
    of_fleet(
        "link_bad_frames",
        "counter",
        "Frames of the verifier-drafter link that could not be decoded, by the role of who received them",
        ("engine", "role"),
        _bad_frames,
    ),
    *DRAFTER_LOAD.metrics("num_sessions", "queue_depth"),
    of_fleet(
        "drafter_draft_seconds",
        "gauge",
        "Smoothed time from an ask to its draft inside the drafter",
        ("engine",),
        _draft_seconds,
    ),
    *DRAFTER_COUNTERS.metrics("num_drafts", "num_draft_tokens"),
    *DRAFTER_COUNTERS.metrics("num_cache_hits", "num_cache_misses", "num_evicted_sessions"),
    *COUNTERS.metrics("num_given", "num_given_bytes", "refused_takes", "num_taken"),
    *FETCHES.metrics("num_taken", "num_hits", "num_fetched"),
    of_verifiers(
        "generation_paused",
        "1: a trainer has paused a verifier, which runs no step; 0: it has not",
        lambda state: int(state.report.load.is_paused),
    ),
    of_verifiers(
        "weights_broken",
        "1: an update of a verifier's weights broke off half-way, and it serves nothing until a whole one; 0: none did",
        lambda state: int(state.report.load.weights_error is not None),
    ),
    of_verifiers_by(
        "drafter",
        "drafter_updates_behind",
        "gauge",
        "Updates of a verifier's weights that a drafter has not followed; no sample where it has no weights of its own",
        lambda report: [(known.drafter_id, known.num_updates_behind) for known in report.load.drafters],
    ),
    of_verifiers_by(
        "weight_version",
        "version_draft_tokens",
        "counter",
        "Draft tokens that a version of a verifier's weights verified; the last four versions",
        lambda report: [(each.weight_version, each.num_draft_tokens) for each in report.load.counters.by_version],
    ),
    of_verifiers_by(
        "weight_version",
        "version_accepted_tokens",
        "counter",
        "Draft tokens that a version of a verifier's weights accepted; acceptance = this / version_draft_tokens",
        lambda report: [(each.weight_version, each.num_accepted_tokens) for each in report.load.counters.by_version],
    ),
    *LEARNERS,
)
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
