"""The spec of a verifier with vLLM inside; in a module of its own, which needs no vLLM."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.ranks import MainFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedDrafts:
    """vLLM's drafts: from our plug-in, which follows the directory at `options["pool"]`."""

    num_speculative_tokens: int
    options: dict[str, Any]  # of `PluginOptions`


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSpec:
    """The spec of the process that hosts vLLM, which starts the processes of its ranks itself."""

    main: ClassVar = MainFunction("outrider.cluster.vllm_engine.process:run_vllm")
    model: ModelConfig
    max_num_batched_tokens: int
    max_num_seqs: int
    enable_prefix_caching: bool
    seed: int | None = None
    gpu_memory_utilization: float | None = None  # None: vLLM's default
    drafts: HostedDrafts | None = None
    lora_modules: dict[str, str] = field(default_factory=dict)  # folders of adapters, by name
    engine_kwargs: dict[str, Any] = field(default_factory=dict)  # more arguments of vLLM's `AsyncEngineArgs`

    def drafting_from(self, directory: str) -> VllmSpec:
        """Return the spec with the drafter directory's "host:port"."""
        assert self.drafts is not None
        drafts = dataclasses.replace(self.drafts, options=self.drafts.options | {"pool": directory})
        return dataclasses.replace(self, drafts=drafts)
