"""A running prompt: its outputs' tokens become text as they are committed, as in the gateway."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.cluster.gateway.choice import Choice, GatewayChunk, joined
from outrider.cluster.gateway.request_parser import ValidRequest
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
        self._sampling, self._context = sampling, context
        if context.rollouts:
            require_lossless(AcceptanceRule(sampling.rejection_sample_method or context.acceptance))
        engine_sampling = sampling.for_engine(
            max_model_len=context.max_model_len,
            acceptance=context.acceptance,
            logprobs_mode=context.logprobs_mode,
            bad_words=context.codec.word_sequences_now(sampling.bad_words or ()),
        )
        self._warnings = structure_warnings(sampling.structured_outputs)
        request = ValidRequest(
            message=GenerationRequest(
                request_id=request_id,
                prompt_token_ids=prompt_token_ids,
                sampling=engine_sampling,
                plan=context.plan,
                group_id=request_id if sampling.n > 1 else None,
                history_key=history_key,
            ),
            n=sampling.n,
            stop=sampling.stop_strings,
            include_stop=sampling.include_stop_str_in_output,
            skip_special_tokens=sampling.skip_special_tokens,
            is_new_text=is_new_text,
            num_prompt_logprobs=sampling.prompt_logprobs,
        )
        text = context.codec if sampling.detokenize else None
        started_s = context.clock()
        self.requests = request.choices()
        self._runs = {
            message.request_id: OutputRun(
                choice=Choice.of(
                    request,
                    index,
                    message,
                    text,
                    context.eos_token_ids,
                    metrics=context.metrics,
                    clock=context.clock,
                    started_s=started_s,
                )
            )
            for index, message in enumerate(self.requests)
        }

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

    def _completion(self, run: OutputRun, chunk: GatewayChunk) -> CompletionOutput:
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
        is_end = last in self._context.eos_token_ids and not sampling.ignore_eos
        return last if last in sampling.stop_token_ids and not is_end else None
