"""SGLang's native wire format, answer side: /generate's objects.

A stream's events are cumulative: each has the whole text, tokens and log probabilities so far.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.cluster.api.openai.answer import Answer, event_of
from outrider.cluster.api.rollouts.sglang_protocol import GenerateBody, SGLangPrompt
from outrider.cluster.common.errors import OutriderError
from outrider.cluster.gateway.choice import GatewayChunk, WeightSpan
from outrider.cluster.gateway.logprobs_format import finite
from outrider.cluster.gateway.request_parser import ValidRequest
from outrider.verifier_service.messages.request import FinishReason, SpeculationMetrics, TokenLogprobs


@dataclass(slots=True, kw_only=True)
class SGLangAnswer:
    """The answer to one call of /generate."""

    answer: Answer
    body: GenerateBody
    prompts: Sequence[SGLangPrompt]
    weight_version: str  # of an output without tokens
    began_s: float = field(default_factory=time.monotonic)

    @property
    def id(self) -> str:
        return self.answer.id

    async def unary(self) -> Any:
        """Generate to the end; return the object, or the list of a batch or of several choices."""
        objects = []
        for index, whole in (await self.answer.whole()).items():
            output = self._output(index)
            output.add(whole)
            objects.append(output.to_json(whole))
        return objects if self._is_list else objects[0]

    async def events(self) -> AsyncIterator[bytes]:
        """Yield one event per chunk; with several outputs, each has its `index`."""
        outputs: dict[int, _Output] = {}
        async with aclosing(self.answer.chunks()) as chunks:  # type: ignore[type-var]
            async for index, chunk in chunks:
                output = outputs.get(index) or outputs.setdefault(index, self._output(index))
                output.add(chunk)
                place = {"index": index} if self._is_list else {}
                yield event_of({**output.to_json(chunk), **place})
        yield b"data: [DONE]\n\n"

    def failure(self, error: OutriderError) -> bytes:
        """Return the event of an error in a stream that has begun."""
        return self.answer.failure(error)

    @property
    def _is_list(self) -> bool:
        return self.body.is_batch or self.answer.requests[0].n > 1

    def _output(self, index: int) -> _Output:
        place = index // self.answer.requests[0].n
        return _Output(
            request=self.answer.requests[place],
            prompt=self.prompts[place],
            weight_version=self.weight_version,
            began_s=self.began_s,
            returns_prompt=bool(self.body.return_prompt_token_ids),
            token_text=self.answer.gateway.text.token_text if self.body.return_text_in_logprobs else None,
        )


@dataclass(slots=True, kw_only=True)
class _Output:
    """One output so far, which each event shows whole: a chunk is added, and not read again."""

    request: ValidRequest
    prompt: SGLangPrompt
    weight_version: str  # if it has no tokens
    began_s: float
    returns_prompt: bool
    token_text: Callable[[int], str] | None  # None: log probabilities go without texts
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    weight_spans: list[WeightSpan] = field(default_factory=list)
    logprobs: list[list[Any]] = field(default_factory=list)
    top_logprobs: list[list[list[Any]] | None] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprobs | None] = ()

    def add(self, chunk: GatewayChunk) -> None:
        """Add the tokens since the last chunk."""
        for span in chunk.weight_spans:
            self._add_span(span.version, len(self.token_ids) + span.end)
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        if self.prompt.has_logprobs:
            self.logprobs += [self._entry(token.id, token.logprobs) for token in chunk.tokens]
            self.top_logprobs += [self._tops(token.logprobs) for token in chunk.tokens]
            self.prompt_logprobs = self.prompt_logprobs or chunk.prompt_logprobs or ()

    def _add_span(self, version: str, end: int) -> None:
        spans = self.weight_spans
        start = spans[-1].end if spans else 0
        if spans and spans[-1].version == version:
            start = spans.pop().start
        spans.append(WeightSpan(version=version, start=start, end=end))

    def to_json(self, chunk: GatewayChunk) -> dict[str, Any]:
        """Return SGLang's object. `chunk`: the last that was added."""
        return {
            "text": self.text,
            "output_ids": self.token_ids,
            **({"prompt_token_ids": list(self.request.prompt_token_ids)} if self.returns_prompt else {}),
            "meta_info": self._meta(chunk),
        }

    def _meta(self, chunk: GatewayChunk) -> dict[str, Any]:
        spans = self.weight_spans or [WeightSpan(version=self.weight_version, start=0, end=0)]
        return {
            "id": chunk.request_id,
            "finish_reason": _finish_reason(chunk, self.token_ids, self.prompt.max_new_tokens),
            "prompt_tokens": len(self.request.prompt_token_ids),
            "completion_tokens": len(self.token_ids),
            "cached_tokens": 0 if chunk.usage is None else chunk.usage.num_cached_tokens,
            "weight_version": spans[-1].version,
            "weight_versions": [asdict(span) for span in spans],
            "num_retractions": 0,
            "e2e_latency": time.monotonic() - self.began_s,
            **(self._logprobs() if self.prompt.has_logprobs else {}),
            **_speculation(chunk.speculation, len(self.token_ids)),
        }

    def _logprobs(self) -> dict[str, Any]:
        """Return the tokens' log probabilities as SGLang's tuples [log probability, id, text]."""
        start = self.prompt.logprob_start
        pairs = list(zip(self.request.prompt_token_ids, self.prompt_logprobs, strict=False))
        # the first has none: it depends on tokens that were not asked for
        shown = [
            (id_, entry if place else None) for place, (id_, entry) in enumerate(pairs[start:] if start >= 0 else ())
        ]
        fields: dict[str, Any] = {
            "input_token_logprobs": [self._entry(id_, entry) for id_, entry in shown],
            "output_token_logprobs": self.logprobs,
            "output_token_logprobs_length": len(self.token_ids),
        }
        if self.prompt.num_top:
            fields["input_top_logprobs"] = [self._tops(entry) for _, entry in shown]
            fields["output_top_logprobs"] = self.top_logprobs
        return fields

    def _entry(self, token_id: int, entry: TokenLogprobs | None) -> list[Any]:
        return [None if entry is None else finite(entry.logprob), token_id, self._text(token_id)]

    def _tops(self, entry: TokenLogprobs | None) -> list[list[Any]] | None:
        if entry is None:
            return None
        tops = zip(entry.top_logprobs, entry.top_token_ids, strict=True)
        return [[finite(logprob), id_, self._text(id_)] for logprob, id_ in list(tops)[: self.prompt.num_top]]

    def _text(self, token_id: int) -> str | None:
        return None if self.token_text is None else self.token_text(token_id)


def _finish_reason(chunk: GatewayChunk, token_ids: Sequence[int], max_new_tokens: int) -> dict[str, Any] | None:
    match chunk.finish_reason:
        case None:
            return None
        case FinishReason.STOP:
            last = token_ids[-1] if token_ids else None
            return {"type": "stop", "matched": last if chunk.stop_string is None else chunk.stop_string}
        case FinishReason.LENGTH:
            return {"type": "length", "length": max_new_tokens}
        case reason:
            return {"type": reason.value, "message": "Aborted", "status_code": None, "err_type": None}


def _speculation(metrics: SpeculationMetrics | None, num_tokens: int) -> dict[str, Any]:
    """Return SGLang's counts, under the names of 0.5.15, which slime reads, and of 0.5.23.

    Every decode step counts as a verification, one without a draft too: slime divides the tokens by them.
    """
    num_steps = 0 if metrics is None else metrics.num_drafts + metrics.num_empty_rounds
    if metrics is None or num_steps == 0:
        return {}
    accepted, drafted = metrics.num_accepted_tokens, metrics.num_draft_tokens
    return {
        "spec_verify_ct": num_steps,
        "spec_accept_token_num": accepted,
        "spec_num_correct_drafts": accepted,
        "spec_draft_token_num": drafted,
        "spec_num_proposed_drafts": drafted,
        "spec_accept_rate": metrics.draft_acceptance_rate or 0.0,
        "spec_accept_length": num_tokens / num_steps,
    }
