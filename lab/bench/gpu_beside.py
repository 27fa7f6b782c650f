"""vLLM with the model of `outrider bench gpu`: random weights of its own, the same prompts, timed by differences.

A step is the time of a long generation less that of a short one, over the steps between: vLLM tells no step's own.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from outrider.lab.bench.gpu_measure import Rate, prompt_of
from outrider.lab.bench.gpu_models import BenchShape

SHORT_TOKENS, NUM_REPEATS = 8, 3


def vllm_rates(shape: BenchShape, target: Path, tell: Callable[[Rate], None]) -> list[Rate]:
    """Decode with each number of streams; raises `click.ClickException` where vLLM is not installed."""
    if find_spec("vllm") is None:
        raise click.ClickException("--beside vllm: vLLM is not installed in this environment")
    from vllm import LLM, SamplingParams

    long_tokens = SHORT_TOKENS + 4 * shape.num_steps
    with tempfile.TemporaryDirectory(prefix="outrider-vllm-") as folder:
        description = json.loads((target / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
        (Path(folder) / "config.json").write_text(json.dumps(description))
        llm: Any = LLM(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            max_model_len=shape.max_model_len,
            max_num_seqs=max(shape.streams),
            kv_cache_memory_bytes=shape.kv_bytes,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        rates: list[Rate] = []
        for streams in shape.streams:
            prompts = [{"prompt_token_ids": list(prompt_of(shape, index))} for index in range(streams)]

            def seconds(num_tokens: int, prompts: list[Any] = prompts) -> float:
                params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
                begin_s = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                return time.perf_counter() - begin_s

            seconds(SHORT_TOKENS)
            short_s, long_s = (
                statistics.median(seconds(count) for _ in range(NUM_REPEATS)) for count in (SHORT_TOKENS, long_tokens)
            )
            step_s = (long_s - short_s) / (long_tokens - SHORT_TOKENS)
            rates.append(Rate(streams=streams, tokens_per_s=streams / step_s, step_s=step_s, acceptance=None))
            tell(rates[-1])
    return rates
