"""`RolloutEngine`: a trainer's own engine, in the trainer's process: samples as they finish, weights that change."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.cluster.gateway.text_codec import TextCodec
from outrider.cluster.offline.engine_thread import EngineEndedError, EngineThread
from outrider.cluster.offline.llm import is_priced, planned_config
from outrider.cluster.offline.prompt_run import PromptRun
from outrider.cluster.offline.prompt_runs import PromptRuns, named_prompts
from outrider.cluster.offline.prompts import PromptInput
from outrider.cluster.offline.rollout_sample import RolloutSample, RunningSample, tokens_per_verification
from outrider.cluster.offline.sampling_params import SamplingParams
from outrider.cluster.offline.weights_folder import NamedTensors, weights_folder
from outrider.verifier_service.messages.engine import (
    Cancel,
    ContinueGeneration,
    Control,
    ControlResult,
    PauseGeneration,
    PauseMode,
    UpdateWeights,
)
from outrider.verifier_service.messages.request import RequestOutput, SpeculationMetrics
from outrider.verifier_service.model.tokenizer import load_tokenizer

Arrival = RolloutSample | EngineEndedError
Put = Callable[[Arrival], None]  # called on the engine's reader thread


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStats:
    """What the engine has done since it was opened, and what it does now."""

    num_samples: int  # finished
    num_tokens: int  # of them
    speculation: SpeculationMetrics  # summed over them
    num_unfinished: int
    tokens_per_s: float  # over the last two seconds
    weight_version: str

    @property
    def tokens_per_verification(self) -> float:
        """Return the mean number of tokens that a step brought to a sample: 1.0 without drafts."""
        return tokens_per_verification(self.num_tokens, self.speculation.num_accepted_tokens)


class RolloutEngine:
    """A target model and its drafter for a trainer: no server, weights that change, log probabilities as drawn.

    Takes the options of `LLM` but `drafter_process`. The engine runs on a thread of its own, so calls may come from
    several threads and event loops, and run together. If the engine fails, whatever runs and every later call raises
    `EngineEndedError`.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        """Load the model. Raises as `LLM`."""
        config, plan = planned_config({**options, "model": model, "rollouts": True})
        codec = TextCodec(load_tokenizer(config.verifier_spec.model))
        self._lock = threading.Lock()  # of what follows
        self._running: dict[str, tuple[RunningSample, Put]] = {}
        self._ended: EngineEndedError | None = None
        self._num_samples = self._num_tokens = 0
        self._speculation = SpeculationMetrics()
        self._updating = threading.Lock()
        self._is_paused = False
        self._thread = EngineThread(
            config, prices_drafts=is_priced(plan), on_outputs=self._absorb, on_end=self._end_samples
        )
        opened = self._thread.opened
        self._weight_version = opened.weight_version
        self._prompts = PromptRuns(
            *(config, plan, codec), max_model_len=opened.max_model_len, eos_token_ids=opened.eos_token_ids
        )

    async def generate(
        self,
        prompts: PromptInput | Iterable[PromptInput],
        n: int | None = None,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        history_keys: Sequence[str | None] | None = None,
    ) -> AsyncGenerator[RolloutSample]:
        """Yield `n` samples of each prompt (None: as `sampling` says), each as soon as it has finished.

        Prompts and sampling are those of `LLM.generate`. `history_keys`, one for each prompt: whose responses it
        drafts from and joins (None: those of its own tokens, "": nobody's). Closing the iterator cancels the samples
        that are not finished. Raises `ValueError` naming the bad field; a prompt that the engine refuses has an
        `error` in its samples instead.
        """
        runs = await asyncio.to_thread(self._runs, prompts, n, sampling, history_keys)
        arrived: asyncio.Queue[Arrival] = asyncio.Queue()
        put = functools.partial(_put, asyncio.get_running_loop(), arrived)
        with self._started(runs, put) as num_samples:
            for _ in range(num_samples):
                yield _sample(await arrived.get())

    def generate_all(
        self,
        prompts: PromptInput | Iterable[PromptInput],
        n: int | None = None,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        history_keys: Sequence[str | None] | None = None,
    ) -> list[RolloutSample]:
        """Wait for all samples; return them by prompt, then by index. Otherwise as `generate`."""
        arrived: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        with self._started(self._runs(prompts, n, sampling, history_keys), arrived.put) as num_samples:
            samples = [_sample(arrived.get()) for _ in range(num_samples)]
        return sorted(samples, key=lambda sample: (sample.prompt_index, sample.sample_index))

    async def update_weights(
        self,
        weights: str | os.PathLike[str] | NamedTensors,
        weight_version: str | None = None,
        mode: str = PauseMode.KEEP,
    ) -> None:
        """Take new weights: a folder, or all tensors by the checkpoint's names, as `model.named_parameters()` gives.

        `weight_version` names them (None: by their number). `mode` says what becomes of running samples: `keep`: they
        go on with the KV that they have, under the new weights (see `RolloutSample.weight_versions`); `retract`: they
        go on, and the new weights compute their KV again; `wait`: they finish first, and new ones wait; `abort`: they
        end with finish reason abort. No KV of older weights is found by new samples. A cancelled call goes on in the
        background. Raises `ValueError` if tensors are missing or do not fit, `RuntimeError` during another update:
        nothing changes.
        """
        await asyncio.to_thread(self._update, weights, weight_version, PauseMode(mode))

    async def pause(self, mode: str = PauseMode.KEEP) -> None:
        """Run no step until `resume`; `mode` as in `update_weights`. Returns once that is so."""
        await self._told(PauseGeneration(call_id="", mode=PauseMode(mode)))
        self._is_paused = True

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._told(ContinueGeneration(call_id=""))
        self._is_paused = False

    @property
    def weight_version(self) -> str:
        """What the weights are called that draw tokens now."""
        return self._weight_version

    def stats(self) -> RolloutStats:
        """Return counters of all finished samples, and the present load."""
        load = self._thread.load
        with self._lock:
            return RolloutStats(
                num_samples=self._num_samples,
                num_tokens=self._num_tokens,
                speculation=self._speculation,
                num_unfinished=len(self._running),
                tokens_per_s=0.0 if load is None else load.tokens_per_s,
                weight_version=self.weight_version,
            )

    def close(self) -> None:
        """Free the model and end its processes; iterators that wait raise `EngineEndedError`."""
        self._thread.close()

    def __enter__(self) -> RolloutEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _runs(
        self,
        prompts: PromptInput | Iterable[PromptInput],
        n: int | None,
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        history_keys: Sequence[str | None] | None,
    ) -> list[PromptRun]:
        named = named_prompts(prompts)
        samplings = [sampling or SamplingParams()] * len(named) if not isinstance(sampling, Sequence) else sampling
        asked = [
            dataclasses.replace(each, n=each.n if n is None else n, logprobs=each.logprobs or 0) for each in samplings
        ]
        return self._prompts.runs(named, asked, history_keys)

    @contextlib.contextmanager
    def _started(self, runs: Sequence[PromptRun], put: Put) -> Iterator[int]:
        """Start all samples of `runs`, and return how many; afterwards, cancel those that are not finished."""
        samples = {
            request.request_id: RunningSample(prompt_index=place, sample_index=index, run=run)
            for place, run in enumerate(runs)
            for index, request in enumerate(run.requests)
        }
        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._running |= {request_id: (sample, put) for request_id, sample in samples.items()}
        try:
            for run in runs:
                for request in run.requests:
                    self._thread.tell(request)
            yield len(samples)
        finally:
            with self._lock:
                unfinished = [request_id for request_id in samples if self._running.pop(request_id, None) is not None]
            for request_id in unfinished:
                self._thread.tell(Cancel(request_id=request_id))

    def _absorb(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            with self._lock:
                found = self._running.get(output.request_id)
            if found is None:
                continue  # cancelled, and the engine did not know yet
            running, put = found
            if (sample := running.absorb(output)) is None:
                continue
            if output.finish_reason is None:  # a stop string ended it, which the engine does not see
                self._thread.tell(Cancel(request_id=output.request_id))
            with self._lock:
                if self._running.pop(output.request_id, None) is None:
                    continue
                self._num_samples += 1
                self._num_tokens += len(sample.token_ids)
                self._speculation = self._speculation.plus(sample.metrics)
            put(sample)

    def _end_samples(self, error: EngineEndedError) -> None:
        with self._lock:
            self._ended = error
            running, self._running = self._running, {}
        for _, put in running.values():
            put(error)

    def _update(self, weights: str | os.PathLike[str] | NamedTensors, version: str | None, mode: PauseMode) -> None:
        if not self._updating.acquire(blocking=False):
            raise RuntimeError("another update of the weights is under way")
        try:
            with contextlib.ExitStack() as stack:
                if isinstance(weights, str | os.PathLike):
                    folder = os.fspath(weights)
                else:
                    folder = str(stack.enter_context(weights_folder(weights)))
                stack.enter_context(self._stopped(mode))
                message = UpdateWeights(call_id="", folder=folder, weight_version=version)
                self._weight_version = self._thread.call(message).result().weight_version
        finally:
            self._updating.release()

    @contextlib.contextmanager
    def _stopped(self, mode: PauseMode) -> Iterator[None]:
        """Pause for an update; a pause of the caller's own stays. In mode `keep`, updates come between two steps."""
        if mode is PauseMode.KEEP:
            yield
            return
        was_paused = self._is_paused
        self._thread.call(PauseGeneration(call_id="", mode=mode)).result()
        try:
            yield
        finally:
            if not was_paused:
                self._thread.call(ContinueGeneration(call_id="")).result()

    async def _told(self, message: Control) -> ControlResult:
        """Return the engine's answer, which comes though nobody may wait for it any more."""
        return await asyncio.shield(asyncio.wrap_future(self._thread.call(message)))


def _put(loop: asyncio.AbstractEventLoop, arrived: asyncio.Queue[Arrival], arrival: Arrival) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
        loop.call_soon_threadsafe(arrived.put_nowait, arrival)


def _sample(arrival: Arrival) -> RolloutSample:
    if isinstance(arrival, EngineEndedError):
        raise arrival
    return arrival
