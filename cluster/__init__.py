"""Everything that spans processes and nodes: router, gateway, Ray Serve deployments, command line.

And what a program imports to generate without any of them: `from outrider.cluster import LLM, SamplingParams`. Those
names are loaded when they are first used, for whoever imports a module of this package must not pay for model code.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.cluster.offline.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from outrider.cluster.offline.llm import LLM
    from outrider.cluster.offline.outputs import CompletionOutput, Logprob, RequestOutput
    from outrider.cluster.offline.rollout_engine import RolloutEngine, RolloutStats
    from outrider.cluster.offline.rollout_sample import RolloutSample
    from outrider.cluster.offline.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "RolloutEngine",
    "RolloutSample",
    "RolloutStats",
    "SamplingParams",
]

_MODULES = {
    "LLM": "outrider.cluster.offline.llm",
    "BeamSearchOutput": "outrider.cluster.offline.beam_search",
    "BeamSearchParams": "outrider.cluster.offline.beam_search",
    "BeamSearchSequence": "outrider.cluster.offline.beam_search",
    "CompletionOutput": "outrider.cluster.offline.outputs",
    "Logprob": "outrider.cluster.offline.outputs",
    "RequestOutput": "outrider.cluster.offline.outputs",
    "RolloutEngine": "outrider.cluster.offline.rollout_engine",
    "RolloutSample": "outrider.cluster.offline.rollout_sample",
    "RolloutStats": "outrider.cluster.offline.rollout_engine",
    "SamplingParams": "outrider.cluster.offline.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
