"""Metrics of drafters that learn while they serve: what a pool's learner has done, and how its versions fare."""

from __future__ import annotations

from outrider.cluster.monitoring.fleet_metric import Rows, Shown, of_fleet
from outrider.cluster.router.fleet import FleetSnapshot
from outrider.drafter_service.learning.messages import LearnerStatus, Phase, VersionRecord
from outrider.verifier_service.messages.metric import metrics_of

STATUS = Shown(
    LearnerStatus,
    lambda snapshot: (((status.pool,), status) for status in snapshot.learners),
    labels=("model_name", "pool"),
)
VERSIONS = Shown(
    VersionRecord,
    lambda snapshot: (
        ((status.pool, record.name), record) for status in snapshot.learners for record in status.versions
    ),
    labels=("model_name", "pool", "version"),
)


def _phases(snapshot: FleetSnapshot) -> Rows:
    return [
        ((status.pool, phase.value), float(status.phase is phase)) for status in snapshot.learners for phase in Phase
    ]


LEARNERS = (
    of_fleet(
        "learner_phase",
        "gauge",
        "1 for what a pool's learner is at, 0 for every other phase",
        ("pool", "phase"),
        _phases,
    ),
    *STATUS.metrics(*metrics_of(LearnerStatus)),
    *VERSIONS.metrics(*metrics_of(VersionRecord)),
)
