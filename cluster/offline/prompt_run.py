"""A running prompt: its outputs' tokens become text as they are committed, as in the gateway."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from outrider.cluster.gateway.choice import Choice, GatewayChunk, joined
from outrider.cluster.gateway.text_codec import TextCodec
from outrider.cluster.monitoring.metrics import GatewayMetrics
from outrider.cluster.offline.outputs import (
    CompletionOutput,
    RequestOutput,
    TextPiece,
    logprobs_by_id,
    prompt_logprobs_by_id,
)
from outrider.cluster.offline.sampling_params import SamplingParams, structure_warnings
from outrider.verifier_service.messages.lossy import require_lossless
from outrider.verifier_service.messages.request import (
    AcceptanceRule,
    FinishReason,
    GenerationRequest,
    LogprobsMode,
    SpeculationMetrics,
    SpeculationPlan,
)
from outrider.verifier_service.messages.request import RequestOutput as EngineOutput
from outrider.verifier_service.messages.request import SamplingParams as EngineSamplingParams

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """The context of all prompts of one `LLM`."""

    codec: TextCodec
    max_model_len: int
    eos_token_ids: frozenset[int]
    plan: SpeculationPlan
    acceptance: AcceptanceRule  # of prompts that name none
    logprobs_mode: LogprobsMode  # the same
    rollouts: bool  # whether responses are remembered, and lossy rules are refused
    metrics: GatewayMetrics  # not exposed: a `Choice` needs counters
    clock: Callable[[], float]  # monotonic, seconds


@dataclass(slots=True, kw_only=True)
class OutputRun:
    """A running output, whose tokens become text."""

    choice: Choice
    chunks: list[GatewayChunk] = field(default_factory=list)
    error: str | None = None

    @property
    def is_finished(self) -> bool:
        return bool(self.chunks) and self.chunks[-1].finish_reason is not None

    @property
    def num_cached_tokens(self) -> int:
        return self.choice.num_cached_tokens

    @property
    def finish_reason(self) -> str | None:
        reason = self.chunks[-1].finish_reason if self.chunks else None
        return FinishReason.ERROR.value if self.error is not None else reason and reason.value

    def absorb(self, output: EngineOutput) -> GatewayChunk:
        """Add a step's tokens, and return the chunk; an error ends this output alone."""
        if output.finish_reason is FinishReason.ERROR:
            self.error = output.error or "the engine failed"
            self.chunks.append(self.choice.aborted_chunk())
        else:
            self.chunks.append(self.choice.absorb(output))
        return self.chunks[-1]

    def whole(self) -> GatewayChunk:
        """Return a finished output as one chunk."""
        return joined(self.chunks)


@dataclass(slots=True, kw_only=True)
class TokenRun:
    """A running output without text: its steps are joined once, at the end."""

    nothing: GatewayChunk  # the empty chunk that all steps but the last add
    steps: list[EngineOutput] = field(default_factory=list)
    error: str | None = None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_cached_tokens(self) -> int:
        return max((step.num_cached_tokens for step in self.steps), default=0)

    @property
    def finish_reason(self) -> str | None:
        reason = self.steps[-1].finish_reason if self.steps else None
        return reason and reason.value

    def absorb(self, output: EngineOutput) -> GatewayChunk:
        """Add a step's tokens, and return the chunk; an error ends this output alone."""
        self.steps.append(output)
        if output.finish_reason is FinishReason.ERROR:
            self.error = output.error or "the engine failed"
        return self.nothing if output.finish_reason is None else self.whole()

    def whole(self) -> GatewayChunk:
        """Return a finished output as one chunk."""
        return dataclasses.replace(
            self.nothing,
            texts=("",) * sum(len(step.token_ids) for step in self.steps),
            token_ids=_column(step.token_ids for step in self.steps),
            origins=_column(step.origins for step in self.steps),
            logprobs=_column(step.logprobs or () for step in self.steps),
            weight_versions=_column((step.weight_version,) * len(step.token_ids) for step in self.steps),
            prompt_logprobs=next((step.prompt_logprobs for step in self.steps if step.prompt_logprobs), None),
            finish_reason=self.steps[-1].finish_reason,
            speculation=next((step.speculation for step in reversed(self.steps) if step.speculation), None),
        )


class PromptRun:
    """A running prompt: one engine request per output."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        context: RunContext,
        *,
        is_new_text: bool = False,  # as in `RequestInput`
        history_key: str | None = None,
    ) -> None:
        self.request_id, self._prompt, self.prompt_token_ids = request_id, prompt, prompt_token_ids
        self._sampling, self._context, self._is_new_text = sampling, context, is_new_text
        if context.rollouts:
            require_lossless(AcceptanceRule(sampling.rejection_sample_method or context.acceptance))
        engine_sampling = sampling.for_engine(
            max_model_len=context.max_model_len,
            acceptance=context.acceptance,
            logprobs_mode=context.logprobs_mode,
            bad_words=context.codec.word_sequences_now(sampling.bad_words or ()),
        )
        self._warnings = structure_warnings(sampling.structured_outputs)
        self.requests = [
            GenerationRequest(
                request_id=f"{request_id}-{index}",
                prompt_token_ids=prompt_token_ids,
                sampling=dataclasses.replace(engine_sampling, choice_index=sampling.choice_index + index),
                plan=context.plan,
                group_id=request_id if sampling.n > 1 else None,
                history_key=history_key,
            )
            for index in range(sampling.n)
        ]
        self._runs = {request.request_id: self._run(index, request) for index, request in enumerate(self.requests)}

    @property
    def is_finished(self) -> bool:
        return all(run.is_finished for run in self._runs.values())

    def absorb(self, output: EngineOutput) -> TextPiece:
        """Add a step's tokens to their output; return the new piece of its text."""
        run = self._runs[output.request_id]
        chunk = run.absorb(output)
        return TextPiece(
            request_id=self.request_id,
            index=chunk.index,
            text=chunk.text,
            finish_reason=run.finish_reason,
            error=run.error,
        )

    def whole(self, request_id: str) -> tuple[GatewayChunk, str | None]:
        """Return a finished output as one chunk, and its error."""
        run = self._runs[request_id]
        return run.whole(), run.error

    def output(self) -> RequestOutput:
        """Return the finished prompt and its outputs."""
        runs = list(self._runs.values())
        chunks = [run.whole() for run in runs]
        counters = [chunk.speculation for chunk in chunks if chunk.speculation is not None]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            outputs=[self._completion(run, chunk) for run, chunk in zip(runs, chunks, strict=True)],
            prompt_logprobs=prompt_logprobs_by_id(
                chunks[0].prompt_logprobs, self._context.codec, self._sampling.prompt_logprobs
            ),
            error=next((run.error for run in runs if run.error is not None), None),
            warnings=self._warnings,
            num_cached_tokens=max(run.num_cached_tokens for run in runs),
            metrics=functools.reduce(SpeculationMetrics.plus, counters) if counters else SpeculationMetrics(),
        )

    def _completion(self, run: OutputRun | TokenRun, chunk: GatewayChunk) -> CompletionOutput:
        num_top = self._sampling.logprobs
        assert run.finish_reason is not None
        return CompletionOutput(
            index=chunk.index,
            text=chunk.text,
            token_ids=list(chunk.token_ids),
            logprobs=None if num_top is None else logprobs_by_id(chunk.tokens, self._context.codec, num_top),
            cumulative_logprob=None if num_top is None else sum(entry.logprob for entry in chunk.logprobs),
            finish_reason=run.finish_reason,
            stop_reason=self._stop_reason(chunk, self.requests[chunk.index].sampling),
        )

    def _stop_reason(self, chunk: GatewayChunk, sampling: EngineSamplingParams) -> int | str | None:
        if chunk.stop_string is not None or chunk.finish_reason is not FinishReason.STOP:
            return chunk.stop_string
        last = chunk.token_ids[-1]
        is_stop = last in sampling.stop_token_ids and last not in self._end_ids(sampling)
        return last if is_stop else None

    def _end_ids(self, sampling: EngineSamplingParams) -> frozenset[int]:
        return frozenset() if sampling.ignore_eos else self._context.eos_token_ids

    def _run(self, index: int, request: GenerationRequest) -> OutputRun | TokenRun:
        if not self._sampling.detokenize:
            return TokenRun(nothing=GatewayChunk(request_id=self.request_id, index=index))
        return OutputRun(choice=self._choice(index, request))

    def _choice(self, index: int, request: GenerationRequest) -> Choice:
        context, own = self._context, self._sampling
        stop_ids = self._end_ids(request.sampling) | set(request.sampling.stop_token_ids)
        return Choice(
            request_id=self.request_id,
            index=index,
            message=request,
            silent_stop_ids=frozenset() if own.include_stop_str_in_output else stop_ids,
            detokenizer=context.codec.detokenizer(
                skip_special_tokens=own.skip_special_tokens,
                prompt_ids=() if self._is_new_text else self.prompt_token_ids,
                stop=own.stop_strings,
                include_stop=own.include_stop_str_in_output,
                min_tokens=own.min_tokens,
            ),
            is_prompt_only=False,
            metrics=context.metrics,
            clock=context.clock,
            started_s=context.clock(),
        )


def _column(steps: Iterable[tuple[ItemT, ...]]) -> tuple[ItemT, ...]:
    return tuple(itertools.chain.from_iterable(steps))
