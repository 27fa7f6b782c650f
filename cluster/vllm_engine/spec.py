"""What a verifier with vLLM inside is told; apart from what runs it, so that knowing one needs no vLLM."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.ranks import RankSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedDrafts:
    """How vLLM gets its drafts: from our plug-in, which follows the directory at `options["pool"]`."""

    num_speculative_tokens: int
    options: dict[str, Any]  # of `PluginOptions`


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSpec:
    """Everything the one process that hosts vLLM must know: vLLM starts the processes of its ranks itself."""

    model: ModelConfig
    max_num_batched_tokens: int
    max_num_seqs: int
    enable_prefix_caching: bool
    seed: int | None = None
    gpu_memory_utilization: float | None = None  # None: vLLM's own default
    drafts: HostedDrafts | None = None
    lora_modules: dict[str, str] = field(default_factory=dict)  # adapters' folders by their names
    engine_kwargs: dict[str, Any] = field(default_factory=dict)  # further arguments of vLLM's `AsyncEngineArgs`

    def drafting_from(self, directory: str) -> VllmSpec:
        """Return the same with the "host:port" of the directory that names its drafters."""
        assert self.drafts is not None
        drafts = dataclasses.replace(self.drafts, options=self.drafts.options | {"pool": directory})
        return dataclasses.replace(self, drafts=drafts)

    def run_rank(self, rank: RankSpec) -> None:
        """Host vLLM until the shell goes away."""
        from outrider.cluster.vllm_engine.process import run_vllm

        run_vllm(self, rank)
