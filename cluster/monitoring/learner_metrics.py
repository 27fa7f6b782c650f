"""Metrics of drafters that learn while they serve: what a pool's learner has done, and how its versions fare."""

from __future__ import annotations

from collections.abc import Callable

from outrider.cluster.monitoring.fleet_metric import FleetMetric, Rows, Value
from outrider.cluster.monitoring.metrics import Definition
from outrider.cluster.router.fleet import FleetSnapshot
from outrider.drafter_service.learning.messages import LearnerStatus, Phase, VersionRecord

LABELS = ("model_name", "pool")


def _of_learners(name: str, kind: str, formula: str, read: Callable[[LearnerStatus], Value]) -> FleetMetric:
    """Define a metric with one value per pool that learns."""

    def rows(snapshot: FleetSnapshot, now_s: float) -> Rows:
        return [((status.pool,), read(status)) for status in snapshot.learners]

    return FleetMetric(Definition(name=f"learner_{name}", kind=kind, formula=formula, labels=LABELS), rows)


def _of_versions(name: str, formula: str, read: Callable[[VersionRecord], Value]) -> FleetMetric:
    """Define a counter with one value per version that a learner knows."""

    def rows(snapshot: FleetSnapshot, now_s: float) -> Rows:
        return [
            ((status.pool, record.name), read(record)) for status in snapshot.learners for record in status.versions
        ]

    labels = (*LABELS, "version")
    return FleetMetric(Definition(name=f"learner_version_{name}", kind="counter", formula=formula, labels=labels), rows)


def _phases(snapshot: FleetSnapshot, now_s: float) -> Rows:
    return [
        ((status.pool, phase.value), float(status.phase is phase)) for status in snapshot.learners for phase in Phase
    ]


LEARNERS = (
    FleetMetric(
        Definition(
            name="learner_phase",
            kind="gauge",
            formula="1 for what a pool's learner is at, 0 for every other phase",
            labels=(*LABELS, "phase"),
        ),
        _phases,
    ),
    _of_learners("samples", "gauge", "Samples that a learner keeps", lambda status: status.num_samples),
    _of_learners("sample_bytes", "gauge", "Bytes of the samples that a learner keeps", lambda status: status.num_bytes),
    _of_learners("seen_samples", "counter", "Samples that came to a learner", lambda status: status.num_seen),
    _of_learners(
        "dropped_samples", "counter", "Samples lost for want of room on the way", lambda status: status.num_dropped
    ),
    _of_learners("steps", "counter", "Training steps", lambda status: status.num_steps),
    _of_learners("train_seconds", "counter", "CPU time of training", lambda status: status.train_s),
    _of_learners("candidates", "counter", "Candidates that training ended with", lambda status: status.num_candidates),
    _of_learners("published", "counter", "Versions that came to serve", lambda status: status.num_published),
    _of_learners(
        "refused", "counter", "Candidates refused by held-out text or trial", lambda status: status.num_refused
    ),
    _of_learners(
        "rolled_back", "counter", "Versions taken back for their predecessor", lambda status: status.num_rolled_back
    ),
    _of_versions("rounds", "Drafts of a version that text has followed", lambda record: record.num_rounds),
    _of_versions("draft_tokens", "Draft tokens of a version", lambda record: record.num_draft_tokens),
    _of_versions(
        "named_tokens",
        "Draft tokens of a version that the target committed; acceptance = this / learner_version_draft_tokens",
        lambda record: record.num_named_tokens,
    ),
)
