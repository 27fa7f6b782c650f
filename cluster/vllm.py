"""What vLLM is told to draft from a pool: `outrider.cluster.vllm.Drafts` or `.Worker`; see docs/vllm.md.

Each is loaded when vLLM asks for it: the parts of vLLM that the other stands on may not be there.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.cluster.hosted.vllm_drafts import Drafts
    from outrider.cluster.hosted.vllm_worker import Worker

__all__ = ["Drafts", "Worker"]

_MODULES = {"Drafts": "outrider.cluster.hosted.vllm_drafts", "Worker": "outrider.cluster.hosted.vllm_worker"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value
