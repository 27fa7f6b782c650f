"""The process that hosts vLLM: it creates the configured engine, and serves until the shell is gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

from outrider.cluster.hosted.vllm_settings import OPTIONS_KEY
from outrider.cluster.vllm_engine.load import VllmLoad
from outrider.cluster.vllm_engine.loop import VllmLoop
from outrider.cluster.vllm_engine.sampling import sampling_of, structured_of
from outrider.cluster.vllm_engine.spec import VllmSpec
from outrider.verifier_service.messages.engine import EngineReady
from outrider.verifier_service.messages.request import GenerationRequest
from outrider.verifier_service.messages.wire import encode
from outrider.verifier_service.model.architectures import read_eos_token_ids, resolve_folder
from outrider.verifier_service.model.ranks import RankSpec, connect
from outrider.verifier_service.model.tokenizer import fingerprint_of

PROPOSER = "outrider.cluster.vllm.Drafts"


def run_vllm(spec: VllmSpec, rank: RankSpec) -> None:
    """Load vLLM, report to the shell, and serve until either ends."""
    set_environment(spec)
    asyncio.run(_serve(spec, rank.shell_address))


def set_environment(spec: VllmSpec) -> None:
    """Set the number of threads of vLLM's CPU build, which reads the environment only."""
    if spec.model.device == "cpu":
        os.environ["OMP_NUM_THREADS"] = str(spec.model.num_threads or 1)  # replaces Ray's
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # or replicas on one machine would bind to the same cores


def engine_arguments(spec: VllmSpec) -> dict[str, Any]:
    """Return the arguments of `AsyncEngineArgs`; the operator's override ours."""
    model = spec.model
    arguments: dict[str, Any] = {
        "model": str(resolve_folder(model)),
        "trust_remote_code": model.trust_remote_code,
        "dtype": model.dtype,
        "max_model_len": model.max_model_len,
        "tensor_parallel_size": model.tensor_parallel_size,
        # in a Ray actor, vLLM would by default place ranks by Ray, in bundles of other replicas
        "distributed_executor_backend": "uni" if model.tensor_parallel_size == 1 else "mp",
        "enforce_eager": model.enforce_eager,
        "kv_cache_memory_bytes": model.kv_cache_memory_bytes,
        "max_num_batched_tokens": spec.max_num_batched_tokens,
        "max_num_seqs": spec.max_num_seqs,
        "enable_prefix_caching": spec.enable_prefix_caching,
        "scheduling_policy": "priority",
        "seed": secrets.randbits(31) if spec.seed is None else spec.seed,  # vLLM's default is one seed for all replicas
    }
    if spec.gpu_memory_utilization is not None:
        arguments["gpu_memory_utilization"] = spec.gpu_memory_utilization
    if spec.drafts is not None:
        arguments["speculative_config"] = {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": spec.drafts.num_speculative_tokens,
        }
        arguments["additional_config"] = {OPTIONS_KEY: spec.drafts.options}
        arguments["per_request_spec_decode_metrics"] = "summary"
    if spec.lora_modules:
        arguments |= {"enable_lora": True, "max_loras": len(spec.lora_modules)}
    return arguments | spec.engine_kwargs


class VllmEngine:
    """vLLM's `AsyncLLM`, with our requests."""

    def __init__(self, engine: AsyncLLM, spec: VllmSpec) -> None:
        self._engine = engine
        self._has_drafts = spec.drafts is not None
        self._adapters = {
            name: LoRARequest(name, number, folder)
            for number, (name, folder) in enumerate(spec.lora_modules.items(), start=1)
        }

    @property
    def is_dead(self) -> bool:
        return self._engine.errored

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Any]:
        """Yield vLLM's outputs; raises `ValueError` for a refused request."""
        arguments = sampling_of(request, has_drafts=self._has_drafts)
        if request.sampling.structured is not None:
            arguments["structured_outputs"] = StructuredOutputsParams(**structured_of(request.sampling.structured))
        prompt = TokensPrompt(prompt_token_ids=[*request.prompt_token_ids, *request.output_token_ids])
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        try:
            outputs = self._engine.generate(
                prompt,
                SamplingParams(**arguments, output_kind=RequestOutputKind.DELTA),
                request.request_id,
                priority=request.priority,
                lora_request=None if request.adapter is None else self._adapters[request.adapter],
            )
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield output
        except VLLMClientError as error:
            raise ValueError(str(error)) from error


async def _serve(spec: VllmSpec, shell_address: str) -> None:
    load = VllmLoad()
    arguments = AsyncEngineArgs(**engine_arguments(spec))
    engine = AsyncLLM.from_engine_args(arguments, stat_loggers=[lambda *_: load])
    shell = connect(shell_address)
    try:
        shell.send_bytes(encode(await _ready(spec, engine)))
        await VllmLoop(VllmEngine(engine, spec), load, shell, is_drafted=spec.drafts is not None).run()
    finally:
        shell.close()  # first: the shell must not wait for the rest
        engine.shutdown()


async def _ready(spec: VllmSpec, engine: AsyncLLM) -> EngineReady:
    config = engine.vllm_config
    return EngineReady(
        vocab_size=config.model_config.get_vocab_size(),
        max_model_len=config.model_config.max_model_len,
        eos_token_ids=read_eos_token_ids(
            Path(config.model_config.model), config.model_config.hf_text_config, spec.model
        ),
        num_kv_blocks=config.cache_config.num_gpu_blocks or 0,
        step_times=(),
        vocab_fingerprint=fingerprint_of(spec.model),
    )
