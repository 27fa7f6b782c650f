"""Drafters that come with the package for models that do not: trained here, as deploy/models says."""

from __future__ import annotations

from pathlib import Path

from outrider.drafter_service.service.speculative_config import Method

HERE = Path(__file__).resolve().parent


def smollm2_drafters() -> dict[Method, Path]:
    """Return the folders of the heads for SmolLM2-135M-Instruct."""
    return {Method.EAGLE3: HERE / "smollm2" / "eagle3"}
