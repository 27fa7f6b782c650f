"""Tokens per verification, from counters worked out by hand."""

from __future__ import annotations

from outrider.lab.head.acceptance import ALL, Served, rounds_of, to_rows
from outrider.verifier_service.messages.request import SpeculationMetrics

METRICS = {
    "fact": SpeculationMetrics(num_drafts=3, num_empty_rounds=1, num_accepted_tokens=6),
    "code": SpeculationMetrics(num_drafts=0, num_empty_rounds=4),
    "list": SpeculationMetrics(),
}


def test_rounds_without_a_draft_count():
    by_kind = {kind: rounds_of(metrics) for kind, metrics in METRICS.items()}
    served = Served(drafter="d", sampling="greedy", by_kind=by_kind)
    assert [served.tokens_per_verification(kind) for kind in ("fact", "code", "list", ALL)] == [2.5, 1.0, None, 1.75]
    assert to_rows([served])[-1] == "| d | greedy | 1.75 | 2.50 | 1.00 | - |"
