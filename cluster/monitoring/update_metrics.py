"""Metrics of weights that change while serving: acceptance by version, and drafters that did not follow."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.cluster.monitoring.fleet_metric import Value, of_verifiers, of_verifiers_by
from outrider.cluster.router.fleet import VerifierReport


def _updates_behind(report: VerifierReport) -> Iterable[tuple[str, Value]]:
    for known in report.load.drafters:
        if known.num_updates_behind is not None:
            yield known.drafter_id, known.num_updates_behind


UPDATES = (
    of_verifiers(
        "generation_paused",
        "gauge",
        "1: a trainer has paused a verifier, which runs no step; 0: it has not",
        lambda state: int(state.report.load.is_paused),
    ),
    of_verifiers(
        "weights_broken",
        "gauge",
        "1: an update of a verifier's weights broke off half-way, and it serves nothing until a whole one; 0: none did",
        lambda state: int(state.report.load.weights_error is not None),
    ),
    of_verifiers_by(
        "drafter",
        "drafter_updates_behind",
        "gauge",
        "Updates of a verifier's weights that a drafter has not followed; no sample where it has no weights of its own",
        _updates_behind,
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
)
