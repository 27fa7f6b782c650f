"""Log probabilities in the clients' formats: OpenAI's two, and vLLM's for prompts.

As in OpenAI's, a token that is a part of a character is named by its bytes, as in `bytes:\\xe6`. `as_ids`: every token
is named by its id, as in vLLM's `token_id:5`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.cluster.common.errors import RequestFailed
from outrider.cluster.gateway.byte_decoder import REPLACEMENT_CHARACTER
from outrider.cluster.gateway.choice import OutputToken
from outrider.cluster.gateway.text_codec import TextCodec
from outrider.verifier_service.messages.request import LOWEST_LOGPROB, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownToken:
    """A token within the text; a prompt's first token has no log probability."""

    id: int
    text: str
    logprobs: TokenLogprobs | None


def completion_logprobs(
    tokens: Sequence[ShownToken], codec: TextCodec, *, num_top: int, first_offset: int, as_ids: bool = False
) -> dict[str, Any]:
    """Return /v1/completions' four lists; `first_offset` is the first token's offset in the text, in characters."""
    offsets, offset = [], first_offset
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    named = list(zip(tokens, _namings(tokens, codec, first_offset, as_ids=as_ids), strict=True))
    return {
        "tokens": [naming.name(token.id) for token, naming in named],
        "token_logprobs": [token.logprobs and finite(token.logprobs.logprob) for token in tokens],
        "top_logprobs": [token.logprobs and _top_by_name(token.logprobs, naming, num_top) for token, naming in named],
        "text_offset": offsets,
    }


def chat_logprobs(
    tokens: Sequence[ShownToken], codec: TextCodec, *, num_top: int, first_offset: int, as_ids: bool = False
) -> dict[str, Any]:
    """Return /v1/chat/completions' list, an object per token; `first_offset` as in `completion_logprobs`."""
    content = [
        {
            **_chat_token(token.id, token.logprobs.logprob, naming),
            "top_logprobs": [_chat_token(id_, logprob, naming) for id_, logprob in _top(token.logprobs, num_top)],
        }
        for token, naming in zip(tokens, _namings(tokens, codec, first_offset, as_ids=as_ids), strict=True)
        if token.logprobs is not None
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    entries: Iterable[TokenLogprobs | None], codec: TextCodec, *, num_top: int
) -> list[dict[str, Any] | None]:
    """Return vLLM's list: per prompt token an object by token id, the prompt's own token first."""
    return [None if entry is None else _by_id(entry, codec, num_top) for entry in entries]


def are_first(tokens: Sequence[ShownToken | OutputToken], codec: TextCodec, first_offset: int = 0) -> list[bool]:
    """Return which tokens begin a text and lack the space that some decoders drop there: so they are named.

    `first_offset`: the first token's offset in the text, in characters.
    """
    are, offset = [], first_offset
    for token in tokens:
        lacks_space = offset == 0 and codec.token_text(token.id, is_first=True) != codec.token_text(token.id)
        are.append(lacks_space and token.text == codec.token_text(token.id, is_first=True))
        offset += len(token.text)
    return are


def token_name(token_id: int, codec: TextCodec, *, is_first: bool = False) -> str:
    """Return a token's text, or its bytes if they are only a part of a character. `is_first`: it begins a text."""
    text = codec.token_text(token_id, is_first=is_first)
    values = codec.token_bytes(token_id, is_first=is_first)
    if REPLACEMENT_CHARACTER not in text or values is None:
        return text
    return "bytes:" + "".join(f"\\x{value:02x}" for value in values)


def id_name(token_id: int) -> str:
    """Return what vLLM calls a token that is named by its id."""
    return f"token_id:{token_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Naming:
    """How a token is named at one place of a text, and the alternatives to it."""

    codec: TextCodec
    as_ids: bool
    is_first: bool

    def name(self, token_id: int) -> str:
        return id_name(token_id) if self.as_ids else token_name(token_id, self.codec, is_first=self.is_first)

    def values(self, token_id: int) -> list[int] | None:
        """Return the bytes of a token's text; None: unknown."""
        values = self.codec.token_bytes(token_id, is_first=self.is_first)
        return None if values is None else list(values)


def _namings(tokens: Sequence[ShownToken], codec: TextCodec, first_offset: int, *, as_ids: bool) -> list[_Naming]:
    within, first = (_Naming(codec=codec, as_ids=as_ids, is_first=is_first) for is_first in (False, True))
    return [first if is_first else within for is_first in are_first(tokens, codec, first_offset)]


def _by_id(entry: TokenLogprobs, codec: TextCodec, num_top: int) -> dict[str, Any]:
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += [(id_, logprob, rank) for rank, (id_, logprob) in enumerate(_top(entry, num_top), start=1)]
    return {
        str(id_): {"logprob": finite(logprob), "rank": rank, "decoded_token": token_name(id_, codec)}
        for id_, logprob, rank in ranked
    }


def _top_by_name(entry: TokenLogprobs, naming: _Naming, num_top: int) -> dict[str, float]:
    """Return the likeliest tokens and the token itself: up to `num_top` + 1, as OpenAI."""
    named: dict[str, float] = {}
    for id_, logprob in [*_top(entry, num_top), (entry.token_id, entry.logprob)]:
        named.setdefault(naming.name(id_), finite(logprob))  # of two tokens with the same text, the likelier
    return named


def _top(entry: TokenLogprobs, num_top: int) -> list[tuple[int, float]]:
    return list(zip(entry.top_token_ids, entry.top_logprobs, strict=True))[:num_top]


def _chat_token(token_id: int, logprob: float, naming: _Naming) -> dict[str, Any]:
    return {"token": naming.name(token_id), "logprob": finite(logprob), "bytes": naming.values(token_id)}


def finite(logprob: float) -> float:
    """Return a log probability that JSON can say; raises `RequestFailed` for NaN, which tells of a broken model."""
    if math.isnan(logprob):
        raise RequestFailed("the model gave a log probability that is not a number")
    return max(logprob, LOWEST_LOGPROB)
