"""The OpenAI wire format, answer side: chunks become response objects. protocol.py has the request side.

With `return_token_ids` every choice also has `token_ids` (as in vLLM) and `token_origins`, and in a stream `tokens`:
`[{"id", "text", "origin"}]`, whose texts join to the text of the choice. `origin` is "accepted", "recovered", "bonus"
or "plain". `weight_versions`, `[{"version", "start", "end"}]`, says which of these tokens which weights drew.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.cluster.common.errors import OutriderError, field_of, mapping_of, text_of
from outrider.cluster.gateway.choice import GatewayChunk, Usage
from outrider.cluster.gateway.logprobs_format import ShownToken, chat_logprobs, completion_logprobs, prompt_logprobs
from outrider.cluster.gateway.request_parser import ValidRequest
from outrider.cluster.gateway.text_codec import TextCodec
from outrider.cluster.replies.reader import ReplyPart, ReplyReader
from outrider.cluster.replies.tools import ToolCall
from outrider.verifier_service.messages.request import FinishReason, SpeculationMetrics


def error_object(error: OutriderError) -> dict[str, Any]:
    """Render an error as OpenAI does."""
    mapping = mapping_of(error)
    content = {"type": mapping.openai_type, "param": field_of(error), "code": mapping.openai_code}
    return {"error": {"message": text_of(error), **content}}


def usage_object(
    usages: Iterable[Usage], prompts: Iterable[Usage], *, num_reasoning_tokens: int | None = None
) -> dict[str, Any]:
    """Sum completion tokens over choices, and prompt tokens over `prompts`, which has one usage per prompt."""
    prompts = list(prompts)
    num_prompt_tokens = sum(usage.num_prompt_tokens for usage in prompts)
    num_completion_tokens = sum(usage.num_completion_tokens for usage in usages)
    details = {} if num_reasoning_tokens is None else {"reasoning_tokens": num_reasoning_tokens}
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.num_cached_tokens for usage in prompts)},
        **({"completion_tokens_details": details} if details else {}),
    }


def metrics_object(speculations: Sequence[SpeculationMetrics | None]) -> dict[str, Any]:
    """Render the sum of the choices' speculation; null if the engine reported none."""
    known = [speculation for speculation in speculations if speculation is not None]
    total = _speculation_object(functools.reduce(SpeculationMetrics.plus, known)) if known else None
    return {"speculative_decoding": total}


def _speculation_object(speculation: SpeculationMetrics) -> dict[str, Any]:
    return {
        "enabled": speculation.enabled,
        "disabled_reason": speculation.disabled_reason,
        "rejection_sample_method": speculation.acceptance.value,
        "is_lossy": speculation.is_lossy,
        "mean_acceptance_length": speculation.mean_acceptance_length,
        "draft_acceptance_rate": speculation.draft_acceptance_rate,
        "num_drafts": speculation.num_drafts,
        "num_draft_tokens": speculation.num_draft_tokens,
        "num_accepted_tokens": speculation.num_accepted_tokens,
        "num_cut_tokens": speculation.num_cut_tokens,
        "num_empty_rounds": speculation.num_empty_rounds,
        "num_accepted_per_position": list(speculation.num_accepted_per_position),
    }


@dataclass(slots=True, kw_only=True)
class ShownChoice:
    """One choice, as far as its client has seen it."""

    index: int  # in the answer
    request: ValidRequest
    codec: TextCodec
    return_token_ids: bool
    names_ids: bool  # log probabilities name tokens by their ids
    reader: ReplyReader | None = None  # None: all text is content
    said: ReplyPart = field(default_factory=ReplyPart)  # of the last chunk
    num_calls: int = 0  # shown before
    num_reasoning_tokens: int = 0
    num_chars: int = 0  # of text shown before
    is_begun: bool = False
    follow: Callable[[str], None] | None = None  # called with the whole content at its end, if no tool was called
    _content: list[str] = field(default_factory=list)  # so far, if there is `follow`

    def take(self, chunk: GatewayChunk) -> None:
        """Read the next chunk into `said`."""
        if self.reader is None:
            self.said = ReplyPart(content=chunk.text)
        else:
            self.said = self.reader.read(chunk.texts, is_last=chunk.finish_reason is not None)
        self.num_reasoning_tokens += self.said.num_reasoning_tokens
        if self.follow is not None:
            self._take_content(self.follow, chunk)

    def _take_content(self, follow: Callable[[str], None], chunk: GatewayChunk) -> None:
        if self.said.calls:
            self.follow = None  # the next message is the tool's
            return
        self._content.append(self.said.content)
        if chunk.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            follow("".join(self._content))

    def advance(self, text: str) -> None:
        self.is_begun = True
        self.num_chars += len(text)
        self.num_calls += sum(bool(call.name) for call in self.said.calls)

    @property
    def is_within_call(self) -> bool:
        """Whether the last chunk ends within a call's arguments."""
        return self.reader is not None and self.reader.is_within_call

    @property
    def _shows_tokens(self) -> bool:
        return self.return_token_ids or self.request.sampling.logprobs is not None

    def shows(self, chunk: GatewayChunk) -> bool:
        """Return whether the last chunk has something to stream."""
        return not self.is_begun or bool(self.said or chunk.finish_reason or (chunk.token_ids and self._shows_tokens))

    def brings_text_alone(self, chunk: GatewayChunk) -> bool:
        """Return whether the last chunk's object differs from the one before in its text alone."""
        has_more = chunk.finish_reason is not None or chunk.prompt_logprobs is not None or self._shows_tokens
        return self.is_begun and not has_more and not (self.said.reasoning or self.said.calls)

    def token_fields(self, chunk: GatewayChunk, *, streamed: bool) -> dict[str, Any]:
        if not self.return_token_ids:
            return {}
        fields: dict[str, Any] = {
            "token_ids": list(chunk.token_ids),
            "token_origins": [origin.value for origin in chunk.origins],
        }
        if spans := [dataclasses.asdict(span) for span in chunk.weight_spans if span.version]:
            fields["weight_versions"] = spans
        if streamed:
            fields["tokens"] = [{"id": t.id, "text": t.text, "origin": t.origin.value} for t in chunk.tokens]
        return fields

    def prompt_fields(self, chunk: GatewayChunk) -> dict[str, Any]:
        """Return the prompt's fields that the client asked for, in a choice's first object."""
        fields: dict[str, Any] = {}
        if self.return_token_ids and not self.is_begun:
            fields["prompt_token_ids"] = list(self.request.prompt_token_ids)
        num_top = self.request.num_prompt_logprobs
        if num_top is not None and chunk.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(chunk.prompt_logprobs, self.codec, num_top=num_top)
        return fields


class Format(Protocol):
    """The objects of an endpoint."""

    id_prefix: str
    object_name: str
    chunk_object_name: str

    def object(
        self, shown: ShownChoice, chunk: GatewayChunk, *, streamed: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a chunk as one of the answer's `choices`, and the fields that it adds to the answer."""
        ...


class CompletionFormat:
    """The objects of /v1/completions; an echoed prompt begins the text."""

    id_prefix = "cmpl-"
    object_name = chunk_object_name = "text_completion"

    def object(
        self, shown: ShownChoice, chunk: GatewayChunk, *, streamed: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        echo = () if shown.is_begun else shown.request.echo
        text = "".join(echo) + chunk.text
        choice = {
            "index": shown.index,
            "text": text,
            "logprobs": _completion_logprobs(shown, chunk, echo),
            "finish_reason": _reason(chunk),
            **shown.token_fields(chunk, streamed=streamed),
            **shown.prompt_fields(chunk),
        }
        shown.advance(text)
        return choice, {}


class ChatFormat:
    """The objects of /v1/chat/completions; a choice's first chunk has the role."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def object(
        self, shown: ShownChoice, chunk: GatewayChunk, *, streamed: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        body = {"delta": _delta(shown)} if streamed else {"message": _message(shown)}
        is_whole = chunk.finish_reason is FinishReason.STOP and not shown.is_within_call
        is_calling = is_whole and bool(shown.num_calls or shown.said.calls)
        choice = {
            "index": shown.index,
            **body,
            "logprobs": _chat_logprobs(shown, chunk),
            "finish_reason": "tool_calls" if is_calling else _reason(chunk),
            **shown.token_fields(chunk, streamed=streamed),
        }
        prompt_fields = shown.prompt_fields(chunk)
        shown.advance(chunk.text)
        return choice, prompt_fields


def _delta(shown: ShownChoice) -> dict[str, Any]:
    said = shown.said
    delta: dict[str, Any] = {} if shown.is_begun else {"role": "assistant"}
    if said.reasoning:
        delta |= _reasoning(said)
    if said.content or not (shown.is_begun or said):
        delta["content"] = said.content
    if said.calls:
        delta["tool_calls"] = list(_call_deltas(said.calls, shown.num_calls))
    return delta


def _reasoning(said: ReplyPart) -> dict[str, str]:
    """Return a thought under both names that clients look for: DeepSeek's, and vLLM's newer one."""
    return {"reasoning_content": said.reasoning, "reasoning": said.reasoning}


def _call_deltas(calls: Iterable[ToolCall], num_before: int) -> Iterator[dict[str, Any]]:
    index = num_before - 1
    for call in calls:
        index += bool(call.name)
        yield {"index": index, **(call_object(call) if call.name else {"function": {"arguments": call.arguments}})}


def _message(shown: ShownChoice) -> dict[str, Any]:
    said = shown.said
    message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
    if said.reasoning:
        message |= _reasoning(said)
    if said.calls:
        message["content"] = said.content or None
        message["tool_calls"] = [call_object(call) for call in said.calls]
    return message


def call_object(call: ToolCall) -> dict[str, Any]:
    """Render a chat's tool call."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _completion_logprobs(shown: ShownChoice, chunk: GatewayChunk, echo: Sequence[str]) -> dict[str, Any] | None:
    num_top = shown.request.sampling.logprobs
    if num_top is None:
        return None
    tokens = _shown_tokens(chunk)
    if echo:
        entries = chunk.prompt_logprobs or ()
        prompt = zip(shown.request.prompt_token_ids, echo, entries, strict=True)
        tokens = [ShownToken(id=id_, text=text, logprobs=entry) for id_, text, entry in prompt] + tokens
    place = {"num_top": num_top, "first_offset": shown.num_chars}
    return completion_logprobs(tokens, shown.codec, **place, as_ids=shown.names_ids)


def _chat_logprobs(shown: ShownChoice, chunk: GatewayChunk) -> dict[str, Any] | None:
    num_top = shown.request.sampling.logprobs
    if num_top is None:
        return None
    place = {"num_top": num_top, "first_offset": shown.num_chars}
    return chat_logprobs(_shown_tokens(chunk), shown.codec, **place, as_ids=shown.names_ids)


def _shown_tokens(chunk: GatewayChunk) -> list[ShownToken]:
    return [ShownToken(id=token.id, text=token.text, logprobs=token.logprobs) for token in chunk.tokens]


def _reason(chunk: GatewayChunk) -> str | None:
    return chunk.finish_reason.value if chunk.finish_reason else None
