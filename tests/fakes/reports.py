"""Reports to the router of which a test names only what matters to it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from outrider.cluster.router.fleet import DrafterReport, VerifierReport
from outrider.verifier_service.messages.drafter_load import DrafterLoad
from outrider.verifier_service.messages.engine import EngineLoad

LOAD_FIELDS = frozenset(field.name for field in fields(EngineLoad))
DRAFTER_LOAD_FIELDS = frozenset(field.name for field in fields(DrafterLoad))
IDLE = EngineLoad(num_running=0, num_waiting=0, num_decoding=0, kv_usage=0.0)


def verifier_report(verifier_id: str = "v0", *, endpoint: str = "", epoch: int = 1, **figures: Any) -> VerifierReport:
    """Make a report of an idle verifier, with some figures of its own and of its engine's load changed."""
    idle = VerifierReport(verifier_id=verifier_id, endpoint=endpoint or f"{verifier_id}:1", epoch=epoch, load=IDLE)
    return changed(idle, **figures)


def changed(report: VerifierReport, **figures: Any) -> VerifierReport:
    """Return a report with some of its figures, or of its engine's load, changed."""
    load = replace(report.load, **{name: figures.pop(name) for name in figures.keys() & LOAD_FIELDS})
    return replace(report, load=load, **figures)


def drafter_report(drafter_id: str = "d0", *, epoch: int = 1, **figures: Any) -> DrafterReport:
    """Make a report of an idle drafter, with some figures of its own and of its engine's load changed."""
    load = DrafterLoad(**{name: figures.pop(name) for name in figures.keys() & DRAFTER_LOAD_FIELDS})
    own = {"max_draft_length": 8} | figures
    return DrafterReport(drafter_id=drafter_id, endpoint=f"{drafter_id}:1", epoch=epoch, load=load, **own)
