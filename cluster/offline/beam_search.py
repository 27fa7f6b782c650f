"""Beam search in this process, under vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.cluster.gateway.choice import Choice
from outrider.cluster.gateway.request_parser import ValidRequest
from outrider.cluster.offline.outputs import Logprob, logprobs_by_id
from outrider.cluster.offline.prompt_run import RunContext
from outrider.verifier_service.messages.beam_search import BeamSearch
from outrider.verifier_service.messages.draft import require
from outrider.verifier_service.messages.request import MAX_LOGPROBS, GenerationRequest, RequestOutput
from outrider.verifier_service.messages.request import SamplingParams as EngineSamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """The parameters of one beam search. Raises `ValueError` naming the bad field."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # changes nothing, as in vLLM
    length_penalty: float = 1.0  # as in transformers, over the tokens of the output; vLLM counts the prompt's, too
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: Mapping[str, Any] | None = None  # None alone
    stop: str | Sequence[str] | None = None  # not vLLM's: texts that end a beam

    def __post_init__(self) -> None:
        require(self.structured_outputs is None, "structured_outputs", "left out with beam search")
        require(self.beam_width >= 1, "beam_width", "at least 1")
        is_texts = all(isinstance(text, str) and text for text in self.stop_strings)
        require(is_texts, "stop", "a text or a sequence of them, none of them empty")
        self.for_engine()  # which has more checks

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def for_engine(self) -> EngineSamplingParams:
        return EngineSamplingParams(
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            num_speculative_tokens=0,
            logprobs=min(2 * self.beam_width, MAX_LOGPROBS),
            beams=BeamSearch(width=self.beam_width, length_penalty=self.length_penalty, stop=self.stop_strings),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchSequence:
    """One sequence, with its prompt."""

    tokens: list[int]  # the prompt's and the output's, an end token included
    logprobs: list[dict[int, Logprob]]  # of the output: per token a dictionary by id, the token's own first
    cum_logprob: float
    text: str  # of the prompt, if it was a text, and the output
    finish_reason: str  # stop or length
    stop_reason: str | None = None  # a stop text


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchOutput:
    """What was found for a prompt: `beam_width` sequences, that of the highest score first."""

    sequences: list[BeamSearchSequence]


class BeamRun:
    """A prompt whose beams are searched."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: tuple[int, ...],
        params: BeamSearchParams,
        context: RunContext,
    ) -> None:
        self._prompt, self._params, self._context = prompt, params, context
        self.message = GenerationRequest(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            sampling=params.for_engine(),
            plan=context.plan,
            history_key="",
        )

    def found(self, output: RequestOutput) -> BeamSearchOutput:
        """Return the search's result; raises `ValueError` if the engine has refused it."""
        if not output.beams:
            raise ValueError(output.error or f"the search has ended: {output.finish_reason}")
        return BeamSearchOutput(sequences=[self._sequence(index, beam) for index, beam in enumerate(output.beams)])

    def _sequence(self, index: int, beam: RequestOutput) -> BeamSearchSequence:
        params, context = self._params, self._context
        request = ValidRequest(
            message=self.message,
            n=params.beam_width,
            stop=params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            is_new_text=False,
            num_prompt_logprobs=None,
        )
        choice = Choice.of(
            *(request, index, self.message, context.codec, context.eos_token_ids),
            metrics=context.metrics,
            clock=context.clock,
            started_s=context.clock(),
        )
        chunk = choice.absorb(beam)
        assert chunk.finish_reason is not None, "a beam comes whole"
        num_top = self.message.sampling.logprobs or 0
        return BeamSearchSequence(
            tokens=[*self.message.prompt_token_ids, *chunk.token_ids],
            logprobs=logprobs_by_id(chunk.tokens, context.codec, num_top),
            cum_logprob=sum(entry.logprob for entry in chunk.logprobs),
            text=(self._prompt or "") + chunk.text,
            finish_reason=chunk.finish_reason.value,
            stop_reason=chunk.stop_string,
        )
