"""The plug-in's entry for vLLM's V2 model runner: a worker for `--worker-cls`."""

from __future__ import annotations

from typing import Any

import vllm
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from outrider.cluster.hosted.plugin import RankPlugin
from outrider.cluster.hosted.vllm_plugin import plugin_of
from outrider.cluster.hosted.vllm_scheduled import ScheduledRequests
from outrider.cluster.hosted.vllm_settings import options_of, refuse_untried, refuse_v2_configuration
from outrider.cluster.hosted.vllm_speculator import PoolSpeculator, attach, parameters_of_propose
from outrider.cluster.hosted.vllm_states import StepStates

OWN_WORKERS = {"cpu": "vllm.v1.worker.cpu_worker.CPUWorker", "xpu": "vllm.v1.worker.xpu_worker.XPUWorker"}
OwnWorker: Any = resolve_obj_by_qualname(
    OWN_WORKERS.get(current_platform.device_type, "vllm.v1.worker.gpu_worker.Worker")
)


class Worker(OwnWorker):
    """`--worker-cls outrider.cluster.vllm.Worker`, with the method `ngram`, whose drafts the pool's replace.

    `--additional-config '{"outrider": {"pool": "host:port"}}'` names the pool. vLLM creates a worker on every rank; the
    first rank of each tensor-parallel group drafts, the others follow.
    """

    def init_device(self) -> None:
        """Raises `ValueError` naming a bad option, and `UntriedVersionError`."""
        config = self.vllm_config
        options = options_of(config)
        refuse_v2_configuration(config)
        refuse_untried(vllm.__version__, BaseSpeculator, {"propose": parameters_of_propose()})
        super().init_device()  # creates the model runner, which loads later
        requests = ScheduledRequests()
        states = StepStates(options.state_taps) if options.state_taps else None
        speculator = PoolSpeculator(
            self.model_runner,
            RankPlugin(get_tp_group(), lambda: plugin_of(config, options, known_ids=requests.ids, states=states)),
            requests,
            num_speculative_tokens=config.speculative_config.num_speculative_tokens,
            draft_seeded=options.draft_seeded,
            states=states,
        )
        attach(self.model_runner, speculator, vllm.__version__, options.state_taps)

    def compile_or_warm_up_model(self) -> Any:
        with self.model_runner.speculator.resting():
            return super().compile_or_warm_up_model()
