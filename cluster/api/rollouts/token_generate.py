"""vLLM's /inference/v1/generate: token ids in, token ids, log probabilities and weights' versions out.

Source: vllm 0.32, vllm.entrypoints.scale_out.token_in_token_out.protocol. A stream's events are deltas.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from outrider.cluster.api.openai.answer import Answer, event_of
from outrider.cluster.api.openai.format import metrics_object, usage_object
from outrider.cluster.api.openai.protocol import GenerationBody, ModelBody, parse_body
from outrider.cluster.common.errors import InvalidRequest, OutriderError
from outrider.cluster.gateway.choice import GatewayChunk, joined
from outrider.cluster.gateway.client_fields import TokenIds
from outrider.cluster.gateway.logprobs_format import finite, id_name, prompt_logprobs
from outrider.cluster.gateway.request_parser import RequestInput, ValidRequest
from outrider.verifier_service.messages.request import FinishReason, TokenLogprobs


class TokenSampling(GenerationBody):
    """`sampling_params`: vLLM's own names, which our completions have, too. Trainers' are refused where unknown."""

    passes_over_unknown = False
    passed_fields: ClassVar[frozenset[str]] = frozenset(
        ("output_kind", "detokenize", "spaces_between_special_tokens", "skip_reading_prefix_cache")  # not of the tokens
    )
    logprobs: int | None = None


class TokenBody(ModelBody):
    """The body; `history_key` and `store` are ours."""

    passed_fields: ClassVar[frozenset[str]] = frozenset(("reasoning_ended", "token_offsets"))

    token_ids: TokenIds
    sampling_params: dict[str, Any]
    request_id: str | None = None
    return_token_ids: bool | None = None
    output_mode: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    history_key: str | None = None
    store: bool | None = None

    def input(self, session_id: str | None) -> RequestInput:
        """Return the request; raises `InvalidRequest`. Without `max_tokens` it goes on to the end of the context."""
        if self.output_mode not in (None, "tokens"):
            raise InvalidRequest("output_mode must be tokens", "output_mode")
        sampling = parse_body(self.sampling_params, TokenSampling)
        own = ("request_id", "model", "cache_salt", "priority", "history_key", "store")
        given = {name: value for name in own if (value := getattr(self, name)) is not None}
        fields = sampling.shared_fields() | given  # `sampling_params` may have names of the body's own, such as `store`
        return RequestInput(
            prompt=self.token_ids,
            prompt_field="token_ids",
            default_max_tokens=None,
            logprobs=sampling.logprobs,
            **(fields | {"session_id": session_id}),
        )


@dataclass(slots=True, kw_only=True)
class TokenAnswer:
    """The answer to one call."""

    answer: Answer
    body: TokenBody
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        return self.answer.requests[0].request_id

    @property
    def _request(self) -> ValidRequest:
        return self.answer.requests[0]

    async def unary(self) -> dict[str, Any]:
        """Generate to the end and return the response object."""
        whole = list((await self.answer.whole()).values())
        usages = [chunk.usage for chunk in whole if chunk.usage is not None]
        return {
            **self._envelope([self._choice(chunk) for chunk in whole]),
            "output_mode": "tokens",
            "usage": usage_object(usages, usages[:1]),
            "prompt_logprobs": self._prompt_logprobs(whole[0]),
            "prompt_token_ids": list(self._request.prompt_token_ids) if self.body.return_token_ids else None,
            "kv_transfer_params": None,
            "metrics": metrics_object([chunk.speculation for chunk in whole]),
        }

    async def events(self) -> AsyncIterator[bytes]:
        """Yield an event per chunk, `[DONE]` last; the last of a choice has the versions of the whole choice."""
        parts: defaultdict[int, list[GatewayChunk]] = defaultdict(list)
        async with aclosing(self.answer.chunks()) as chunks:  # type: ignore[type-var]
            async for index, chunk in chunks:
                parts[index].append(chunk)
                spans = {"weight_versions": _spans(joined(parts[index]))} if chunk.finish_reason is not None else {}
                yield event_of(self._envelope([{**self._choice(chunk), "weight_versions": None, **spans}]))
        yield b"data: [DONE]\n\n"

    def failure(self, error: OutriderError) -> bytes:
        """Return the event of an error in a stream that has begun."""
        return self.answer.failure(error)

    def _envelope(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        model = self._request.adapter or self.answer.gateway.model.name
        return {"request_id": self.id, "model": model, "created": self.created, "choices": choices}

    def _choice(self, chunk: GatewayChunk) -> dict[str, Any]:
        num_top = self._request.sampling.logprobs
        entries = chunk.logprobs
        content = None if num_top is None else {"content": [_token(entry, num_top) for entry in entries]}
        return {
            "index": chunk.index,
            "finish_reason": None if chunk.finish_reason is None else chunk.finish_reason.value,
            "stop_reason": self._stop_reason(chunk),
            "token_ids": list(chunk.token_ids),
            "logprobs": content,
            "routed_experts": None,
            "weight_versions": _spans(chunk),
        }

    def _stop_reason(self, chunk: GatewayChunk) -> int | str | None:
        """Return the stop string or token; None: the end-of-sequence token, or no stop."""
        if chunk.stop_string is not None or chunk.finish_reason is not FinishReason.STOP or not chunk.token_ids:
            return chunk.stop_string
        last = chunk.token_ids[-1]
        return last if last in self._request.sampling.stop_token_ids else None

    def _prompt_logprobs(self, chunk: GatewayChunk) -> list[dict[str, Any] | None] | None:
        num_top, entries = self._request.num_prompt_logprobs, chunk.prompt_logprobs
        if num_top is None or entries is None:
            return None
        return prompt_logprobs(entries, self.answer.gateway.text, num_top=num_top)


def _spans(chunk: GatewayChunk) -> list[dict[str, Any]]:
    return [asdict(span) for span in chunk.weight_spans]


def _token(entry: TokenLogprobs, num_top: int) -> dict[str, Any]:
    """Return a token as vLLM 0.32 names it, and as earlier versions did: prime-rl reads the latter."""
    tops = zip(entry.top_token_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
    ranked = [_named(id_, logprob, rank) for rank, (id_, logprob) in enumerate(tops, start=1)]
    return {**_named(entry.token_id, entry.logprob, entry.rank), "top_logprobs": ranked}


def _named(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
    name = {"token_id": token_id, "token": id_name(token_id), "bytes": None}
    return {**name, "logprob": finite(logprob), "rank": rank}
