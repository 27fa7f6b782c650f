"""The embedded default pair: a small target and its drafter, trained on this machine, shipped inside the package."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.drafter_service.service.speculative_config import Method

HERE = Path(__file__).resolve().parent


def target_path() -> Path:
    """Return the folder of the shipped target model."""
    return HERE / "target"


def draft_path() -> Path:
    """Return the folder of the shipped drafter."""
    return HERE / "draft"


def drafter_paths() -> dict[Method, Path]:
    """Return the folders of the shipped draft model and heads, all made for the shipped target."""
    return {Method.DRAFT_MODEL: draft_path(), Method.MEDUSA: HERE / "medusa", Method.EAGLE3: HERE / "eagle3"}


def held_out_prompts() -> list[str]:
    """Return the prompts cut from files that the pair was not trained on."""
    lines = (HERE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]
