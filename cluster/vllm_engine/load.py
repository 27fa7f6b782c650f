"""vLLM's step statistics as an `EngineLoad`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from outrider.verifier_service.engine.step_stats import RecentRates, StepStats
from outrider.verifier_service.messages.counts import EngineCounters
from outrider.verifier_service.messages.engine import EngineLoad, RequestLoad

MAX_STEP_S = 10.0  # a longer time between two steps is a pause


class VllmLoad:
    """A stat logger of vLLM: it records every step, and describes the engine's load."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stats = StepStats()
        self._rates = RecentRates()
        self._counters = EngineCounters()
        self._num_running = self._num_waiting = 0
        self._kv_usage = 0.0
        self.has_news = False  # steps since the last `describe`
        self._heard_s: float | None = None  # time of the last step that left requests

    # --- called by vLLM ---

    def record(
        self, scheduler_stats: Any | None, iteration_stats: Any | None, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Record a scheduler step, its outputs, or both."""
        self.has_news = True
        if scheduler_stats is not None:
            self._hear(scheduler_stats)
        if iteration_stats is not None:
            num_new_tokens = iteration_stats.num_generation_tokens
            self._stats.num_committed_tokens += num_new_tokens
            self._stats.num_scheduled_tokens += num_new_tokens + iteration_stats.num_prompt_tokens
            self._count(num_preemptions=iteration_stats.num_preempted_reqs)

    def log(self) -> None:
        """Do nothing."""

    def log_engine_initialized(self) -> None:
        """Do nothing."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Do nothing: the engine never sleeps."""

    # --- called by the verifier ---

    def describe(self, requests: Sequence[RequestLoad]) -> EngineLoad:
        """Sample the rates and return the load; to be called at even intervals."""
        self.has_news = False
        self._rates.sample(self._stats, self._clock())
        stats = self._stats
        return EngineLoad(
            num_running=self._num_running,
            num_waiting=self._num_waiting,
            num_decoding=self._num_running,
            kv_usage=self._kv_usage,
            tokens_per_s=self._rates.tokens_per_s,
            mean_step_s=self._rates.mean_step_s,
            counters=dataclasses.replace(
                self._counters,
                num_steps=stats.num_steps,
                num_scheduled_tokens=stats.num_scheduled_tokens,
                num_committed_tokens=stats.num_committed_tokens,
                step_s=stats.step_s.counts(),
            ),
            requests=tuple(requests),
        )

    def _hear(self, step: Any) -> None:
        self._num_running, self._num_waiting = step.num_running_reqs, step.num_waiting_reqs
        self._kv_usage = step.kv_cache_usage
        now_s = self._clock()
        if self._heard_s is not None and now_s - self._heard_s < MAX_STEP_S:
            self._stats.num_steps += 1
            self._stats.step_s.observe(now_s - self._heard_s)
        self._heard_s = now_s if self._num_running else None
        prefixes = step.prefix_cache_stats
        if prefixes is not None:
            self._count(num_prefix_queried_tokens=prefixes.queries, num_prefix_hit_tokens=prefixes.hits)
        if (drafts := step.spec_decoding_stats) is not None:
            self._count(
                num_drafts=drafts.num_drafts,
                num_draft_tokens=drafts.num_draft_tokens,
                num_accepted_tokens=drafts.num_accepted_tokens,
            )

    def _count(self, **more: int) -> None:
        counted = {name: getattr(self._counters, name) + number for name, number in more.items()}
        self._counters = dataclasses.replace(self._counters, **counted)
