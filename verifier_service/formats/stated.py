"""What a checkpoint's files say of how its weights are quantised, read without torch: shells ask, too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG_NAME = "config.json"
FIELD = "quantization_config"
_MODELOPT_NAME = "hf_quant_config.json"  # older files of ModelOpt say nothing in config.json

Config = Mapping[str, Any]


def stated_config(folder: Path) -> Config | None:
    """Return a folder's `quantization_config`, by config.json or ModelOpt's own file; None: nothing is quantised."""
    whole = _read(folder / CONFIG_NAME)
    parts = (whole, whole.get("text_config") or {})
    config: Config | None = next((part[FIELD] for part in parts if part.get(FIELD) is not None), None)
    if config is None and (said := _read(folder / _MODELOPT_NAME).get("quantization")):
        return {"quant_method": "modelopt", **said}
    return config


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found
