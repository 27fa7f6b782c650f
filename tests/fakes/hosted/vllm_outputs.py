"""vLLM's outputs and statistics, with the attributes that we read of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def output(token_ids: list[int], finish_reason: str | None = None, **more: Any) -> SimpleNamespace:
    """One of vLLM's `RequestOutput`s, with one choice."""
    choice = SimpleNamespace(
        token_ids=token_ids,
        finish_reason=finish_reason,
        logprobs=more.pop("logprobs", None),
        spec_decode_metrics=more.pop("spec_decode_metrics", None),
    )
    common = {"num_cached_tokens": None, "prompt_logprobs": None, "prompt_token_ids": []}
    return SimpleNamespace(outputs=[choice], **(common | more))


def logprob(value: float, rank: int) -> SimpleNamespace:
    return SimpleNamespace(logprob=value, rank=rank)


def scheduler_stats(num_running: int, num_waiting: int = 0, **more: Any) -> SimpleNamespace:
    common = {"kv_cache_usage": 0.0, "prefix_cache_stats": None, "spec_decoding_stats": None}
    return SimpleNamespace(num_running_reqs=num_running, num_waiting_reqs=num_waiting, **(common | more))


def iteration_stats(num_generation_tokens: int, num_prompt_tokens: int = 0, num_preempted: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        num_generation_tokens=num_generation_tokens,
        num_prompt_tokens=num_prompt_tokens,
        num_preempted_reqs=num_preempted,
    )
