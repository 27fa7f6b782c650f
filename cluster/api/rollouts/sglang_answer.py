"""SGLang's native wire format, answer side: /generate's objects.

A stream's events are cumulative: each has the whole text, tokens and log probabilities so far.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.cluster.api.openai.answer import Answer, event_of
from outrider.cluster.api.rollouts.sglang_protocol import GenerateBody, NativePrompt
from outrider.cluster.common.errors import OutriderError
from outrider.cluster.gateway.choice import GatewayChunk, WeightSpan, joined
from outrider.cluster.gateway.logprobs_format import finite
from outrider.cluster.gateway.request_parser import ValidRequest
from outrider.verifier_service.messages.request import FinishReason, SpeculationMetrics, TokenLogprobs


@dataclass(slots=True, kw_only=True)
class NativeAnswer:
    """The answer to one call of /generate."""

    answer: Answer
    body: GenerateBody
    prompts: Sequence[NativePrompt]
    weight_version: str  # of an output without tokens
    began_s: float = field(default_factory=time.monotonic)

    @property
    def id(self) -> str:
        return self.answer.id

    async def unary(self) -> Any:
        """Generate to the end; return the object, or the list of a batch or of several choices."""
        objects = [self._object(index, whole) for index, whole in (await self.answer.whole()).items()]
        return objects if self._is_list else objects[0]

    async def events(self) -> AsyncIterator[bytes]:
        """Yield one event per chunk; with several outputs, each has its `index`."""
        so_far: dict[int, GatewayChunk] = {}
        async with aclosing(self.answer.chunks()) as chunks:  # type: ignore[type-var]
            async for index, chunk in chunks:
                so_far[index] = joined([so_far[index], chunk]) if index in so_far else chunk
                place = {"index": index} if self._is_list else {}
                yield event_of({**self._object(index, so_far[index]), **place})
        yield b"data: [DONE]\n\n"

    def failure(self, error: OutriderError) -> bytes:
        """Return the event of an error in a stream that has begun."""
        return self.answer.failure(error)

    @property
    def _is_list(self) -> bool:
        return self.body.is_batch or self.answer.requests[0].n > 1

    def _object(self, index: int, chunk: GatewayChunk) -> dict[str, Any]:
        num_choices = self.answer.requests[0].n
        request, prompt = self.answer.requests[index // num_choices], self.prompts[index // num_choices]
        prompt_ids = {"prompt_token_ids": list(request.prompt_token_ids)} if self.body.return_prompt_token_ids else {}
        return {
            "text": chunk.text,
            "output_ids": list(chunk.token_ids),
            **prompt_ids,
            "meta_info": self._meta(request, prompt, chunk),
        }

    def _meta(self, request: ValidRequest, prompt: NativePrompt, chunk: GatewayChunk) -> dict[str, Any]:
        spans = chunk.weight_spans or [WeightSpan(version=self.weight_version, start=0, end=0)]
        return {
            "id": chunk.request_id,
            "finish_reason": _finish_reason(chunk, prompt.max_new_tokens),
            "prompt_tokens": len(request.prompt_token_ids),
            "completion_tokens": len(chunk.token_ids),
            "cached_tokens": 0 if chunk.usage is None else chunk.usage.num_cached_tokens,
            "weight_version": spans[-1].version,
            "weight_versions": [asdict(span) for span in spans],
            "num_retractions": 0,
            "e2e_latency": time.monotonic() - self.began_s,
            **(self._logprobs(request, prompt, chunk) if prompt.has_logprobs else {}),
            **_speculation(chunk.speculation, len(chunk.token_ids)),
        }

    def _logprobs(self, request: ValidRequest, prompt: NativePrompt, chunk: GatewayChunk) -> dict[str, Any]:
        """Return the tokens' log probabilities as SGLang's tuples [log probability, id, text]."""
        start, entries = prompt.logprob_start, chunk.prompt_logprobs or ()
        shown = () if start < 0 else list(zip(request.prompt_token_ids, entries, strict=False))[start:]
        tokens = chunk.tokens
        fields: dict[str, Any] = {
            # the first has none: it depends on tokens that were not asked for
            "input_token_logprobs": [
                [None if place == 0 or entry is None else finite(entry.logprob), id_, self._text(id_)]
                for place, (id_, entry) in enumerate(shown)
            ],
            "output_token_logprobs": [
                [None if token.logprobs is None else finite(token.logprobs.logprob), token.id, self._text(token.id)]
                for token in tokens
            ],
            "output_token_logprobs_length": len(chunk.token_ids),
        }
        if prompt.num_top:
            fields["input_top_logprobs"] = [
                None if place == 0 else self._tops(entry, prompt.num_top) for place, (_, entry) in enumerate(shown)
            ]
            fields["output_top_logprobs"] = [self._tops(token.logprobs, prompt.num_top) for token in tokens]
        return fields

    def _tops(self, entry: TokenLogprobs | None, num_top: int) -> list[list[Any]] | None:
        if entry is None:
            return None
        tops = zip(entry.top_logprobs[:num_top], entry.top_token_ids[:num_top], strict=True)
        return [[finite(logprob), id_, self._text(id_)] for logprob, id_ in tops]

    def _text(self, token_id: int) -> str | None:
        return self.answer.gateway.text.token_text(token_id) if self.body.return_text_in_logprobs else None


def _finish_reason(chunk: GatewayChunk, max_new_tokens: int) -> dict[str, Any] | None:
    match chunk.finish_reason:
        case None:
            return None
        case FinishReason.STOP:
            last = chunk.token_ids[-1] if chunk.token_ids else None
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
