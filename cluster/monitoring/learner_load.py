"""A learner's status as plain JSON values, for /load, /v1/learner and `outrider top`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from outrider.drafter_service.learning.messages import LearnerStatus, VersionRecord


def learner_load(status: LearnerStatus) -> dict[str, Any]:
    """Describe a pool's learner; `num_samples` and `num_bytes` are what it keeps now."""
    return _fields(status) | {
        "phase": status.phase.value,
        "versions": [_version(record) for record in status.versions],
    }


def _version(record: VersionRecord) -> dict[str, Any]:
    """acceptance        named draft tokens / draft tokens; null: none drafted
    named_per_round   named draft tokens / answered rounds; null: none answered
    """
    return _fields(record) | {
        "acceptance": record.num_named_tokens / record.num_draft_tokens if record.num_draft_tokens else None,
        "named_per_round": record.num_named_tokens / record.num_rounds if record.num_rounds else None,
    }


def _fields(report: LearnerStatus | VersionRecord) -> dict[str, Any]:
    return {each.name: getattr(report, each.name) for each in fields(report)}
