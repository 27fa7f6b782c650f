"""The plug-in's entry for vLLM's V1 model runner: a proposer for `--speculative-config`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import vllm
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from outrider.cluster.hosted.plugin import HostStep, RankPlugin
from outrider.cluster.hosted.vllm_hook import RunnerView, install_hook, rows_of
from outrider.cluster.hosted.vllm_plugin import plugin_of
from outrider.cluster.hosted.vllm_sampling import mend_expansion
from outrider.cluster.hosted.vllm_settings import UntriedVersionError, options_of
from outrider.cluster.hosted.vllm_states import StepStates

logger = init_logger(__name__)


class Drafts:
    """`{"method": "custom_class", "model": "outrider.cluster.vllm.Drafts", "num_speculative_tokens": K}`.

    `--additional-config '{"outrider": {"pool": "host:port"}}'` names the pool. vLLM creates one on every rank; the
    first rank of each tensor-parallel group drafts, the others follow.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Raises `ValueError` naming a bad option, and `UntriedVersionError`."""
        options = options_of(vllm_config)
        install_hook(GPUModelRunner, vllm.__version__, Drafts)
        if vllm_config.device_config.device.type == "cpu" and mend_expansion(rejection_sampler):
            logger.warning("vLLM's CPU build loses the temperature of drafted requests (issue 55005): mended here")
        self._draft_seeded = options.draft_seeded
        self.state_taps = options.state_taps
        self._runner: Any = None
        self._states = StepStates(options.state_taps) if options.state_taps else None
        self._plugin = RankPlugin(
            get_tp_group(),
            lambda: plugin_of(
                vllm_config,
                options,
                known_ids=lambda: () if self._runner is None else list(self._runner.requests),
                states=self._states,
            ),
        )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no model, but vLLM's CPU runner calls this on every proposer."""

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """Never called: the hook calls `propose_step` instead."""
        raise UntriedVersionError("vLLM calls proposers by another way than the plug-in's hook")

    def propose_step(
        self,
        runner: Any,
        scheduler_output: Any,
        sampled_token_ids: Sequence[list[int]],
        hidden_states: torch.Tensor,
        layer_inputs: Sequence[torch.Tensor] | None,
    ) -> list[Any]:
        """Return the next step's draft for every request of the runner's batch, in its order."""
        self._runner = runner

        def read() -> HostStep:
            if self._states is not None:
                self._states.write(runner, scheduler_output, hidden_states, layer_inputs)
            return (
                rows_of(runner.input_batch, scheduler_output, sampled_token_ids),
                scheduler_output.finished_req_ids,
                RunnerView(runner, draft_seeded=self._draft_seeded),
            )

        return self._plugin.propose(len(runner.input_batch.req_ids), read)
