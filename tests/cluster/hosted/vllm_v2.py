"""vLLM with its V2 model runner on a CPU, drafting from a pool: a peer's script, for `test_live_vllm_v2.py`.

vLLM's CPU build runs V2 where Triton compiles for CPUs, which no package at hand does. Triton's interpreter runs the same
kernels, slowly; vLLM asks for a backend named `cpu` and takes the one that is put there here.
"""

from __future__ import annotations

import os
from typing import Any

os.environ |= {
    "TRITON_INTERPRET": "1",
    "TRITON_DEFAULT_BACKEND": "cpu",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_CPU_CI_ENV": "1",  # no warm-up
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


class InterpretingDriver:
    """A driver of Triton's that vLLM finds; the interpreter launches nothing by it."""

    @staticmethod
    def is_active() -> bool:
        return True


def offer_interpreter() -> None:
    """Have vLLM, which must not be imported yet, take Triton for one that runs on this CPU."""
    import triton.backends

    backend: Any = triton.backends.Backend(None, InterpretingDriver)  # type: ignore[arg-type]
    triton.backends.backends["cpu"] = backend


def load(options: dict[str, Any]) -> tuple[str, Any]:
    num_ranks = options.get("tensor_parallel_size", 1)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(f"{rank}-{rank}" for rank in range(num_ranks))
    offer_interpreter()
    import vllm

    plugin = {"pool": options["pool"], "speculation": "always", "max_wait_ms": 300, **options.get("plugin", {})}
    engine = vllm.LLM(
        options["model"],
        dtype="float32",
        max_num_seqs=options["max_num_seqs"],
        max_model_len=options["max_model_len"],
        max_num_batched_tokens=options.get("max_num_batched_tokens"),
        enforce_eager=True,
        worker_cls="outrider.cluster.vllm.Worker",
        speculative_config={"method": "ngram", "num_speculative_tokens": options["num_speculative_tokens"]},
        additional_config={"outrider": plugin},
        num_gpu_blocks_override=options.get("num_blocks"),
        tensor_parallel_size=num_ranks,
    )

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return vllm.__version__, generate


if __name__ == "__main__":
    from outrider.cluster.peers.worker import serve

    serve(load)
