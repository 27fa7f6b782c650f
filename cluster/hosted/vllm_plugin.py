"""The plug-in of one vLLM process, for both model runners; imports no vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from outrider.cluster.hosted.drafting import HostedConfig
from outrider.cluster.hosted.metrics import HostedMetrics
from outrider.cluster.hosted.options import PluginOptions
from outrider.cluster.hosted.plugin import Plugin
from outrider.cluster.hosted.vllm_states import StepStates
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.tokenizer import fingerprint_of


def plugin_of(
    vllm_config: Any, options: PluginOptions, *, known_ids: Callable[[], Iterable[str]], states: StepStates | None
) -> Plugin:
    """Return the plug-in for a vLLM configuration; `known_ids`: ids of vLLM's present requests."""
    model = vllm_config.model_config
    config = HostedConfig(
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        num_speculative_tokens=vllm_config.speculative_config.num_speculative_tokens,
        is_pinned=options.speculation == "always",
        max_wait_s=options.max_wait_ms / 1000.0,
        learn=options.learn,
    )
    tokenizer = ModelConfig(
        path=model.tokenizer, revision=model.tokenizer_revision, trust_remote_code=model.trust_remote_code
    )
    return Plugin(
        options,
        config,
        vocab_fingerprint=fingerprint_of(tokenizer),
        engine="vllm",
        known_ids=known_ids,
        metrics=HostedMetrics(),
        states=states,
    )
