"""One prompt under way: its outputs' tokens become text as they are committed, as in the gateway."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.cluster.gateway.choice import Choice, GatewayChunk, joined
from outrider.cluster.gateway.text_codec import TextCodec
from outrider.cluster.monitoring.metrics import GatewayMetrics
from outrider.cluster.offline.outputs import CompletionOutput, RequestOutput, logprobs_by_id, prompt_logprobs_by_id
from outrider.cluster.offline.sampling_params import SamplingParams
from outrider.verifier_service.messages.request import (
    AcceptanceRule,
    FinishReason,
    GenerationRequest,
    SpeculationMetrics,
    SpeculationPlan,
)
from outrider.verifier_service.messages.request import RequestOutput as EngineOutput
from outrider.verifier_service.messages.request import SamplingParams as EngineSamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What all prompts of one `LLM` share."""

    codec: TextCodec
    max_model_len: int
    eos_token_ids: frozenset[int]
    plan: SpeculationPlan
    acceptance: AcceptanceRule  # of those who name none
    metrics: GatewayMetrics  # of no page: a `Choice` counts there
    clock: Callable[[], float]  # monotonic, seconds


@dataclass(slots=True, kw_only=True)
class OutputRun:
    """One output under way."""

    choice: Choice
    chunks: list[GatewayChunk] = field(default_factory=list)
    error: str | None = None

    @property
    def is_finished(self) -> bool:
        return bool(self.chunks) and self.chunks[-1].finish_reason is not None

    def absorb(self, output: EngineOutput) -> None:
        """Take in what one step brought; an error ends this output alone."""
        if output.finish_reason is FinishReason.ERROR:
            self.error = output.error or "the engine failed"
            self.chunks.append(self.choice.aborted_chunk())
        else:
            self.chunks.append(self.choice.absorb(output))


class PromptRun:
    """One prompt under way: a request to the engine for each of its outputs."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        context: RunContext,
    ) -> None:
        self._request_id, self._prompt, self._prompt_token_ids = request_id, prompt, prompt_token_ids
        self._sampling, self._context = sampling, context
        engine_sampling = sampling.for_engine(max_model_len=context.max_model_len, acceptance=context.acceptance)
        self.requests = [
            GenerationRequest(
                request_id=f"{request_id}-{index}",
                prompt_token_ids=prompt_token_ids,
                sampling=dataclasses.replace(engine_sampling, choice_index=sampling.choice_index + index),
                plan=context.plan,
                group_id=request_id if sampling.n > 1 else None,
            )
            for index in range(sampling.n)
        ]
        self._runs = {
            request.request_id: OutputRun(choice=self._choice(index, request))
            for index, request in enumerate(self.requests)
        }

    @property
    def is_finished(self) -> bool:
        return all(run.is_finished for run in self._runs.values())

    def absorb(self, output: EngineOutput) -> bool:
        """Take in what one step brought for one of the outputs; return whether that one has ended."""
        run = self._runs[output.request_id]
        run.absorb(output)
        return run.is_finished

    def output(self) -> RequestOutput:
        """Return what came of the prompt, once all is finished."""
        runs = list(self._runs.values())
        chunks = [joined(run.chunks) for run in runs]
        counters = [chunk.speculation for chunk in chunks if chunk.speculation is not None]
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=list(self._prompt_token_ids),
            outputs=[self._completion(run, chunk) for run, chunk in zip(runs, chunks, strict=True)],
            prompt_logprobs=prompt_logprobs_by_id(
                chunks[0].prompt_logprobs, self._context.codec, self._sampling.prompt_logprobs
            ),
            error=next((run.error for run in runs if run.error is not None), None),
            num_cached_tokens=max(run.choice.num_cached_tokens for run in runs),
            metrics=functools.reduce(SpeculationMetrics.plus, counters) if counters else SpeculationMetrics(),
        )

    def _completion(self, run: OutputRun, chunk: GatewayChunk) -> CompletionOutput:
        num_top, codec = self._sampling.logprobs, self._context.codec
        entries = [token.logprobs for token in chunk.tokens if token.logprobs is not None]
        reason = FinishReason.ERROR if run.error is not None else chunk.finish_reason
        assert reason is not None
        return CompletionOutput(
            index=chunk.index,
            text=chunk.text,
            token_ids=list(chunk.token_ids),
            logprobs=None if num_top is None else [logprobs_by_id(entry, codec, num_top) for entry in entries],
            cumulative_logprob=None if num_top is None else sum(entry.logprob for entry in entries),
            finish_reason=reason.value,
            stop_reason=self._stop_reason(chunk, run.choice.message.sampling),
        )

    def _stop_reason(self, chunk: GatewayChunk, sampling: EngineSamplingParams) -> int | str | None:
        if chunk.stop_string is not None or chunk.finish_reason is not FinishReason.STOP:
            return chunk.stop_string
        last = chunk.token_ids[-1]
        is_stop = last in sampling.stop_token_ids and last not in self._end_ids(sampling)
        return last if is_stop else None

    def _end_ids(self, sampling: EngineSamplingParams) -> frozenset[int]:
        return frozenset() if sampling.ignore_eos else self._context.eos_token_ids

    def _choice(self, index: int, request: GenerationRequest) -> Choice:
        context, own = self._context, self._sampling
        stop_ids = self._end_ids(request.sampling) | set(request.sampling.stop_token_ids)
        return Choice(
            request_id=self._request_id,
            index=index,
            message=request,
            silent_stop_ids=frozenset() if own.include_stop_str_in_output else stop_ids,
            detokenizer=context.codec.detokenizer(
                skip_special_tokens=own.skip_special_tokens,
                stop=own.stop_strings,
                include_stop=own.include_stop_str_in_output,
                min_tokens=own.min_tokens,
            ),
            is_prompt_only=False,
            metrics=context.metrics,
            clock=context.clock,
            started_s=context.clock(),
        )
