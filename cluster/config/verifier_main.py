"""What each rank of a verifier runs: our own engine, with the drafter beside it where it belongs there, or vLLM."""

from __future__ import annotations

import dataclasses

from outrider.cluster.config.service_config import VLLM, ServiceConfig
from outrider.cluster.vllm_engine.spec import HostedDrafts, VllmSpec
from outrider.drafter_service.service.drafter_spec import ColocatedSpec
from outrider.verifier_service.engine.verifier_spec import VerifierSpec

GPU_MEMORY_UTILIZATION = 0.9  # of a whole GPU: as vLLM's own guides


def verifier_main(config: ServiceConfig, host: str = "") -> VerifierSpec | ColocatedSpec | VllmSpec:
    """Return what the ranks of a verifier are told; `host` is where others meet it."""
    if config.verifiers.engine == VLLM:
        return _vllm_spec(config)
    spec, drafter = config.verifier_spec, config.own_drafter
    if transports := config.tensor_transports:
        spec = dataclasses.replace(spec, tensor_transport=transports[0], tensor_host=host)
    return spec if drafter is None else ColocatedSpec(verifier=spec, drafter=drafter)


def _vllm_spec(config: ServiceConfig) -> VllmSpec:
    """Return what vLLM's process is told; where its drafters' directory is, its replica knows."""
    verifiers = config.verifiers
    return VllmSpec(
        model=config.verifier_spec.model,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        enable_prefix_caching=verifiers.enable_prefix_caching,
        seed=config.seed,
        gpu_memory_utilization=GPU_MEMORY_UTILIZATION * config.model.gpu_share if config.model.gpus_per_rank else None,
        drafts=_drafts(config) if config.pools else None,
        lora_modules=verifiers.lora_modules,
        engine_kwargs=({} if verifiers.async_scheduling else {"async_scheduling": False}) | verifiers.engine_kwargs,
    )


def _drafts(config: ServiceConfig) -> HostedDrafts:
    return HostedDrafts(
        num_speculative_tokens=config.max_draft_length,
        options={
            "speculation": "always" if config.speculation == "always" else "auto",
            "state_taps": list(config.verifier_spec.model.state_taps),
            "learn": bool(config.learning),  # of requests that the gateway says may be learned from
            **{name: value for name, value in config.links if name.startswith("link_") and value is not None},
        },
    )
