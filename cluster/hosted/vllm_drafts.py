"""The plug-in of vLLM: the proposer that its `--speculative-config` names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import vllm
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from outrider.cluster.hosted.drafting import HostedConfig
from outrider.cluster.hosted.metrics import HostedMetrics
from outrider.cluster.hosted.options import PluginOptions
from outrider.cluster.hosted.plugin import HostStep, Plugin
from outrider.cluster.hosted.vllm_hook import RunnerView, UntriedVersionError, install_hook, options_of, rows_of
from outrider.cluster.hosted.vllm_sampling import mend_expansion
from outrider.cluster.hosted.vllm_states import StepStates
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.tokenizer import fingerprint_of

logger = init_logger(__name__)


class Drafts:
    """`{"method": "custom_class", "model": "outrider.cluster.vllm.Drafts", "num_speculative_tokens": K}`.

    The pool is named by `--additional-config '{"outrider": {"pool": "host:port"}}'`. vLLM makes one on every rank; the
    first of each tensor-parallel group talks to the drafters, the others follow.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Raises `ValueError` naming the option, and `UntriedVersionError`."""
        options = options_of(vllm_config)
        install_hook(GPUModelRunner, vllm.__version__, Drafts)
        if vllm_config.device_config.device.type == "cpu" and mend_expansion(rejection_sampler):
            logger.warning("vLLM's CPU build loses the temperature of drafted requests (issue 55005): mended here")
        self._draft_seeded = options.draft_seeded
        self.state_taps = options.state_taps
        self._runner: Any = None
        self._states = StepStates(options.state_taps) if options.state_taps else None
        self._plugin: Plugin | None = None
        if get_tp_group().rank_in_group == 0:
            self._plugin = self._new_plugin(options, vllm_config)

    def _new_plugin(self, options: PluginOptions, vllm_config: Any) -> Plugin:
        model = vllm_config.model_config
        config = HostedConfig(
            vocab_size=model.get_vocab_size(),
            max_model_len=model.max_model_len,
            num_speculative_tokens=vllm_config.speculative_config.num_speculative_tokens,
            is_pinned=options.speculation == "always",
            max_wait_s=options.max_wait_ms / 1000.0,
        )
        tokenizer = ModelConfig(
            path=model.tokenizer, revision=model.tokenizer_revision, trust_remote_code=model.trust_remote_code
        )
        return Plugin(
            options,
            config,
            vocab_fingerprint=fingerprint_of(tokenizer),
            engine="vllm",
            known_ids=lambda: () if self._runner is None else list(self._runner.requests),
            metrics=HostedMetrics(),
            states=self._states,
        )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is no model here; vLLM's CPU runner calls this of every proposer."""

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """Never called: the hook calls `propose_step` in its place."""
        raise UntriedVersionError("vLLM calls proposers by another way than the plug-in's hook")

    def propose_step(
        self,
        runner: Any,
        scheduler_output: Any,
        sampled_token_ids: Sequence[list[int]],
        hidden_states: torch.Tensor,
        layer_inputs: Sequence[torch.Tensor] | None,
    ) -> list[Any]:
        """Return what to verify in the next step, for every request of the runner's batch, in its order."""
        self._runner = runner
        tensor_parallel = get_tp_group()
        drafts: list[list[int]] | None = None
        if self._plugin is not None:

            def read() -> HostStep:
                if self._states is not None:
                    self._states.write(runner, scheduler_output, hidden_states, layer_inputs)
                return (
                    rows_of(runner.input_batch, scheduler_output, sampled_token_ids),
                    scheduler_output.finished_req_ids,
                    RunnerView(runner, draft_seeded=self._draft_seeded),
                )

            drafts = self._plugin.propose(len(runner.input_batch.req_ids), read)
        if tensor_parallel.world_size > 1:
            drafts = tensor_parallel.broadcast_object(drafts, src=0)
        assert drafts is not None
        return drafts
