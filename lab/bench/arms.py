"""The ways to generate that a benchmark compares, each loaded once and measured on cores and threads of its own."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.offline.engine import OfflineEngine
from outrider.lab.bench.figures import (
    APART,
    LIBRARY,
    LIBRARY_ASSISTED,
    OFF,
    SHARED,
    RequestTrace,
    RunTrace,
    Workload,
    added,
)
from outrider.lab.bench.peers import AssistedLibraryArm, LibraryArm, load_library_model
from outrider.verifier_service.messages.request import (
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SamplingParams,
    SpeculationMetrics,
    SpeculationPlan,
)

Clock = Callable[[], float]
PlanOf = Callable[[int], SpeculationPlan]  # of every request, by the number of them in the batch


class BenchError(RuntimeError):
    """An arm could not run the workload."""


class Arm(Protocol):
    """One way to generate, loaded and ready."""

    name: str
    cores: frozenset[int]  # of this process while it runs
    num_threads: int  # torch's, for the target model

    def run(self, workload: Workload, concurrency: int) -> RunTrace:
        """Generate `max_tokens` for every prompt, at most `concurrency` prompts at a time."""


@contextlib.contextmanager
def placed(cores: frozenset[int], num_threads: int) -> Iterator[None]:
    """Keep this process on `cores` with `num_threads` of torch's threads.

    Affinity belongs to a thread: torch's workers that are there already have to be moved as well.
    """
    cores_before, threads_before = frozenset(os.sched_getaffinity(0)), torch.get_num_threads()
    _move(cores)
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)
        _move(cores_before)


def _move(cores: frozenset[int]) -> None:
    for thread_id in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # a thread that ended in between
            os.sched_setaffinity(int(thread_id), cores)


def open_arms(opening: contextlib.ExitStack, config: ServiceConfig, names: Sequence[str], clock: Clock) -> list[Arm]:
    """Load the named arms; their models stay loaded until `opening` is closed."""
    cores = frozenset(os.sched_getaffinity(0))
    shared = config.with_options(threads_per_rank=len(cores))
    apart = config.with_options(threads_per_rank=1)
    arms: list[Arm] = []
    if LIBRARY in names:
        target = load_library_model(config.verifier_spec.model)
        arms.append(LibraryArm(LIBRARY, target, cores=cores, num_threads=len(cores), clock=clock))
        drafter = config.drafter_spec
        if LIBRARY_ASSISTED in names and drafter is not None and drafter.model is not None:
            draft = load_library_model(drafter.model)
            arms.append(
                AssistedLibraryArm(LIBRARY_ASSISTED, target, draft, cores=cores, num_threads=len(cores), clock=clock)
            )
    if OFF in names:
        arms.append(OutriderArm.open(OFF, shared.with_options(num_drafters=0), opening, clock))
    if SHARED in names:
        arms.append(OutriderArm.open(SHARED, shared, opening, clock))
    if APART in names:
        arms.append(OutriderArm.open(APART, apart, opening, clock, drafter_process=True))
    return arms


@dataclass(slots=True)
class _Recording:
    """One request's trace in the making."""

    arrival_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    speculation: SpeculationMetrics = field(default_factory=SpeculationMetrics)

    def take(self, output: RequestOutput, now_s: float) -> None:
        self.times_s.append(now_s)
        self.sizes.append(len(output.token_ids))
        self.token_ids += output.token_ids
        self.speculation = output.speculation or self.speculation

    def trace(self) -> RequestTrace:
        return RequestTrace(
            arrival_s=self.arrival_s,
            output_times_s=tuple(self.times_s),
            output_sizes=tuple(self.sizes),
            token_ids=tuple(self.token_ids),
        )


class OutriderArm:
    """Our engine, kept at `concurrency` requests for as long as there are more."""

    def __init__(
        self,
        name: str,
        engine: OfflineEngine,
        *,
        cores: frozenset[int],
        num_threads: int,
        clock: Clock,
    ) -> None:
        self.name, self.cores, self.num_threads = name, cores, num_threads
        self.offline = engine
        self._clock = clock
        self._num_runs = 0

    @classmethod
    def open(
        cls,
        name: str,
        config: ServiceConfig,
        opening: contextlib.ExitStack,
        clock: Clock,
        *,
        drafter_process: bool = False,
        prices_drafts: bool = False,
    ) -> OutriderArm:
        """Load engine and drafter; the cores that they leave to this process are taken up when the arm runs."""
        all_cores = os.sched_getaffinity(0)
        engine = opening.enter_context(
            OfflineEngine(config, drafter_process=drafter_process, prices_drafts=prices_drafts)
        )
        cores = frozenset(os.sched_getaffinity(0))
        os.sched_setaffinity(0, all_cores)
        return cls(name, engine, cores=cores, num_threads=config.model.threads_per_rank or 1, clock=clock)

    def run(self, workload: Workload, concurrency: int, plan_of: PlanOf | None = None) -> RunTrace:
        """Generate `max_tokens` for every prompt; raises `BenchError` when a request fails.

        Without `plan_of` all drafts are as long as the workload says, whatever that costs.
        """
        self._num_runs += 1
        engine = self.offline.engine
        plan = SpeculationPlan(draft_length=workload.num_speculative_tokens, is_pinned=True)
        recordings = [_Recording() for _ in workload.prompts]
        waiting = deque(enumerate(workload.prompts))
        first_step, begin_s = engine.stats.num_steps, self._clock()
        while waiting or engine.has_work():
            while waiting and len(engine.requests) < concurrency:
                index, prompt = waiting.popleft()
                recordings[index].arrival_s = self._clock()
                self._add(f"{self._num_runs}-{index}", prompt, workload, plan)
            if plan_of is not None and plan != (due := plan_of(len(engine.requests))):
                plan = due
                engine.set_plans(dict.fromkeys(engine.requests, plan))
            outputs, now_s = self.offline.step(), self._clock()
            for output in outputs:
                if output.finish_reason is FinishReason.ERROR:
                    raise BenchError(f"{self.name}: {output.error}")
                recordings[int(output.request_id.rpartition("-")[2])].take(output, now_s)
        return RunTrace(
            elapsed_s=self._clock() - begin_s,
            requests=tuple(recording.trace() for recording in recordings),
            num_target_steps=engine.stats.num_steps - first_step,
            drafts=added(recording.speculation for recording in recordings),
        )

    def _add(self, request_id: str, prompt: tuple[int, ...], workload: Workload, plan: SpeculationPlan) -> None:
        sampling = SamplingParams(temperature=workload.temperature, max_tokens=workload.max_tokens, ignore_eos=True)
        request = GenerationRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling, plan=plan)
        if (failure := self.offline.engine.add(request)) is not None:
            raise BenchError(f"{self.name}: {failure.error}")
