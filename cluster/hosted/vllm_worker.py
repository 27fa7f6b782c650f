"""The door for vLLM's V2 model runner: the worker that its `--worker-cls` names."""

from __future__ import annotations

from typing import Any

import vllm
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator
from vllm.v1.worker.gpu_worker import Worker as GpuWorker

from outrider.cluster.hosted.vllm_plugin import RankPlugin, plugin_of
from outrider.cluster.hosted.vllm_scheduled import ScheduledRequests
from outrider.cluster.hosted.vllm_settings import options_of, refuse_untried, refuse_v2_configuration
from outrider.cluster.hosted.vllm_speculator import PoolSpeculator, attach, parameters_of_propose
from outrider.cluster.hosted.vllm_states import StepStates


class Worker(GpuWorker):
    """`--worker-cls outrider.cluster.vllm.Worker`, with the method `ngram`, whose look-ups the pool's drafts replace.

    The pool is named by `--additional-config '{"outrider": {"pool": "host:port"}}'`. vLLM makes a worker on every rank;
    the first of each tensor-parallel group talks to the drafters, the others follow.
    """

    def _make_model_runner(self) -> Any:
        """Raises `ValueError` naming the option, and `UntriedVersionError`."""
        config = self.vllm_config
        options = options_of(config)
        refuse_v2_configuration(config)
        refuse_untried(vllm.__version__, BaseSpeculator, {"propose": parameters_of_propose()})
        runner = super()._make_model_runner()
        requests = ScheduledRequests()
        states = StepStates(options.state_taps) if options.state_taps else None
        speculator = PoolSpeculator(
            runner,
            RankPlugin(get_tp_group(), lambda: plugin_of(config, options, known_ids=requests.ids, states=states)),
            requests,
            num_speculative_tokens=config.speculative_config.num_speculative_tokens,
            draft_seeded=options.draft_seeded,
            states=states,
        )
        attach(runner, speculator, vllm.__version__, options.state_taps)
        return runner

    def compile_or_warm_up_model(self) -> Any:
        with self.model_runner.speculator.resting():
            return super().compile_or_warm_up_model()
