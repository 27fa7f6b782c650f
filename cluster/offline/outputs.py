"""The outputs of `LLM`, under vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.cluster.gateway.choice import OutputToken
from outrider.cluster.gateway.logprobs_format import are_first, token_name
from outrider.cluster.gateway.text_codec import TextCodec
from outrider.verifier_service.messages.request import SpeculationMetrics, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """The model's own log probability of a token, before penalties, biases and temperature."""

    logprob: float
    rank: int  # 1: the likeliest
    decoded_token: str  # as over HTTP; a part of a character is `bytes:\xe6`


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One of the `n` outputs for a prompt."""

    index: int
    text: str  # without the stop string, unless it is to be included
    token_ids: list[int]  # including a stop token
    logprobs: list[dict[int, Logprob]] | None = None  # per token a dictionary by id, the token's own first
    cumulative_logprob: float | None = None  # if log probabilities were requested
    finish_reason: str  # stop, length or error
    stop_reason: int | str | None = None  # the stop token id or stop string; None: the EOS token, or no stop


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
    """A piece of an output's text, as it grows."""

    request_id: str
    index: int
    text: str
    finish_reason: str | None = None  # in an output's last piece, as in `CompletionOutput`
    error: str | None = None  # if the finish reason is error


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its outputs. A prompt that was refused or failed has an `error`; other prompts are unaffected."""

    request_id: str
    prompt: str | None  # of a chat: as rendered; None: it was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # per prompt token; None for the first
    finished: bool = True
    error: str | None = None
    warnings: list[str] = field(default_factory=list)  # constraints that the grammar does not enforce
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    metrics: SpeculationMetrics = field(default_factory=SpeculationMetrics)  # summed over all outputs


def logprobs_by_id(tokens: Sequence[OutputToken], codec: TextCodec, num_top: int) -> list[dict[int, Logprob]]:
    """Return each output token's log probability and those of the `num_top` likeliest ones."""
    placed = zip(tokens, are_first(tokens, codec), strict=True)
    return [
        _by_id(token.logprobs, codec, num_top, is_first=is_first)
        for token, is_first in placed
        if token.logprobs is not None
    ]


def prompt_logprobs_by_id(
    entries: Sequence[TokenLogprobs | None] | None, codec: TextCodec, num_top: int | None
) -> list[dict[int, Logprob] | None] | None:
    """Return the same for each token of a prompt; None: not requested."""
    if entries is None or num_top is None:
        return None
    return [None if entry is None else _by_id(entry, codec, num_top) for entry in entries]


def _by_id(entry: TokenLogprobs, codec: TextCodec, num_top: int, *, is_first: bool = False) -> dict[int, Logprob]:
    tops = zip(entry.top_token_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += [(id_, logprob, rank) for rank, (id_, logprob) in enumerate(tops, start=1) if id_ != entry.token_id]
    return {
        id_: Logprob(logprob=logprob, rank=rank, decoded_token=token_name(id_, codec, is_first=is_first))
        for id_, logprob, rank in ranked
    }
