"""Metrics of requests that leave a verifier with their KV, and of those that come."""

from __future__ import annotations

from outrider.cluster.monitoring.fleet_metric import of_verifiers, of_verifiers_by

HANDOVERS = (
    of_verifiers(
        "kv_given_requests",
        "counter",
        "Requests whose KV a verifier gave to another one, to its end",
        lambda state: state.report.load.counters.num_given,
    ),
    of_verifiers(
        "kv_given_bytes",
        "counter",
        "Bytes of KV and hidden states that a verifier sent to others, those of requests that were not taken, too",
        lambda state: state.report.load.counters.num_given_bytes,
    ),
    of_verifiers_by(
        "reason",
        "kv_refusals",
        "counter",
        "Requests whose KV a verifier did not give, by why",
        lambda report: report.load.counters.refused_takes.items(),
    ),
    of_verifiers(
        "kv_taken_requests",
        "counter",
        "Requests that came to a verifier with their KV",
        lambda state: state.report.load.counters.num_taken,
    ),
)
