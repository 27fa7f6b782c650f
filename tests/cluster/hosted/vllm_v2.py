"""vLLM with its V2 model runner on a CPU, drafting from a pool: a peer's script, for `test_live_vllm_v2.py`.

vLLM's CPU build runs V2 where Triton compiles for CPUs, which no package at hand does. Triton's interpreter runs the
same kernels, slowly: vLLM asks for a backend named `cpu`, and takes what is put there.
"""

from __future__ import annotations

import os
import sys
from typing import Any

PREEMPTED = "a request was preempted"  # in the log
SEEDED_START = 0  # the first token of a prompt whose answer is drawn with a seed

os.environ |= {
    "TRITON_INTERPRET": "1",
    "TRITON_DEFAULT_BACKEND": "cpu",
    "TORCHDYNAMO_DISABLE": "1",  # it would compile with Triton what ranks share
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_CPU_CI_ENV": "1",  # no warm-up
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


import triton.backends  # noqa: E402 - it reads the environment


class InterpretingDriver:
    """A driver of Triton's that vLLM finds; the interpreter launches nothing by it."""

    @staticmethod
    def is_active() -> bool:
        return True


# where this file is imported: the processes of other ranks do that first of all
backend: Any = triton.backends.Backend(None, InterpretingDriver)  # type: ignore[arg-type]
triton.backends.backends["cpu"] = backend


def note_preemptions() -> None:
    """Have the log say when vLLM's scheduler takes a request's KV away."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt = Scheduler._preempt_request

    def noting(self: Any, *arguments: Any, **named: Any) -> None:
        sys.stderr.write(f"{PREEMPTED}\n")
        preempt(self, *arguments, **named)

    Scheduler._preempt_request = noting


def warm_up(engine: Any) -> None:
    """Have vLLM do what it does before it serves on a GPU: a dummy step, and steps of requests of its own making."""
    from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup

    worker = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    runner = worker.model_runner
    runner._dummy_run(16, skip_attn=True, is_profile=True)
    with runner.speculator.resting():
        assert run_mixed_prefill_decode_warmup(runner, worker.execute_model, worker.sample_tokens, num_tokens=16)


def load(options: dict[str, Any]) -> tuple[str, Any]:
    num_ranks = options["tensor_parallel_size"]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(f"{rank}-{rank}" for rank in range(num_ranks))
    import vllm

    note_preemptions()
    engine = vllm.LLM(
        options["model"],
        dtype="float32",
        max_num_seqs=8,
        max_model_len=options["max_model_len"],
        max_num_batched_tokens=options["max_num_batched_tokens"],
        block_size=options["block_size"],
        num_gpu_blocks_override=options["num_blocks"],
        tensor_parallel_size=num_ranks,
        enforce_eager=True,
        worker_cls="outrider.cluster.vllm.Worker",
        speculative_config={"method": "ngram", "num_speculative_tokens": options["num_speculative_tokens"]},
        additional_config={"outrider": options["plugin"]},
    )

    if options.get("warm_up"):
        warm_up(engine)

    def sampling_of(prompt: list[int], max_tokens: int) -> Any:
        drawn = {"temperature": 0.8, "seed": prompt[1]} if prompt[0] == SEEDED_START else {"temperature": 0.0}
        return vllm.SamplingParams(max_tokens=max_tokens, ignore_eos=True, **drawn)

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [sampling_of(prompt, max_tokens) for prompt in prompts],
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    return vllm.__version__, generate


if __name__ == "__main__":
    from outrider.lab.peers.worker import serve

    serve(load)
