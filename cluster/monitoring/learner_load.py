"""A learner's status as plain JSON values, for /load, /v1/learner and `outrider top`."""

from __future__ import annotations

from typing import Any

from outrider.drafter_service.learning.messages import LearnerStatus, VersionRecord


def learner_load(status: LearnerStatus) -> dict[str, Any]:
    """Describe a pool's learner; `num_samples` and `num_bytes` are what it keeps now."""
    return {
        "pool": status.pool,
        "phase": status.phase.value,
        "serving": status.serving,
        "num_samples": status.num_samples,
        "num_bytes": status.num_bytes,
        "num_seen": status.num_seen,
        "num_dropped": status.num_dropped,
        "num_steps": status.num_steps,
        "loss": status.loss,
        "train_s": status.train_s,
        "num_candidates": status.num_candidates,
        "num_published": status.num_published,
        "num_refused": status.num_refused,
        "num_rolled_back": status.num_rolled_back,
        "last_event": status.last_event,
        "versions": [_version(record) for record in status.versions],
    }


def _version(record: VersionRecord) -> dict[str, Any]:
    """acceptance        named draft tokens / draft tokens; null: none drafted
    named_per_round   named draft tokens / answered rounds; null: none answered
    """
    return {
        "name": record.name,
        "is_serving": record.is_serving,
        "fate": record.fate,
        "num_rounds": record.num_rounds,
        "num_draft_tokens": record.num_draft_tokens,
        "num_named_tokens": record.num_named_tokens,
        "acceptance": record.num_named_tokens / record.num_draft_tokens if record.num_draft_tokens else None,
        "named_per_round": record.num_named_tokens / record.num_rounds if record.num_rounds else None,
    }
