"""What a service's verifiers are told when vLLM is their engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.cluster.vllm_engine.spec import HostedDrafts, VllmSpec

if TYPE_CHECKING:
    from outrider.cluster.config.service_config import ServiceConfig

GPU_MEMORY_UTILIZATION = 0.9  # of a whole GPU: as vLLM's own guides


def vllm_spec(config: ServiceConfig) -> VllmSpec:
    """Return what each verifier's process is told; where its drafters' directory is, its replica knows."""
    return VllmSpec(
        model=config.verifier_spec.model,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        enable_prefix_caching=config.enable_prefix_caching,
        seed=config.seed,
        gpu_memory_utilization=GPU_MEMORY_UTILIZATION * config.gpu_share if config.gpus_per_rank else None,
        drafts=_drafts(config) if config.pools else None,
        lora_modules=config.lora_modules,
        engine_kwargs=({} if config.async_scheduling else {"async_scheduling": False}) | config.engine_kwargs,
    )


def _drafts(config: ServiceConfig) -> HostedDrafts:
    links = ("link_ssl_certfile", "link_ssl_keyfile", "link_ssl_ca_certs", "link_ssl_server_name")
    return HostedDrafts(
        num_speculative_tokens=config.router_policy.max_draft_length,
        options={
            "speculation": "always" if config.speculation == "always" else "auto",
            "state_taps": list(config.verifier_spec.model.state_taps),
            **{name: value for name in links if (value := getattr(config, name)) is not None},
        },
    )
