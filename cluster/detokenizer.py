"""Turn one choice's tokens into text as they are committed, and find stop strings across token boundaries.

A token's text depends on its neighbours: a character may be split over several tokens, and a decoder may drop the
space in front of the first token it sees. So a short window of tokens is decoded, never a token alone:

    tokens   |<- published, forgotten ->|<- context ->|<- new ->|
                                        |<------- window ------>|
    text of window                      |<- num_published_chars ->|<- delta ->|<- held back (unfinished character) ->|

Once the window's text ends in a finished character, `new` becomes the context of the next window: constant work per
token, whatever the length of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

REPLACEMENT_CHARACTER = "\ufffd"  # what a decoder writes for bytes that are not (yet) a character
MAX_CHARACTER_TOKENS = 4  # a character has at most four bytes, a token at least one
MAX_WINDOW_TOKENS = 24


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that detokenisation needs."""

    @property
    def all_special_ids(self) -> list[int]: ...

    @property
    def added_tokens_decoder(self) -> dict[int, object]: ...

    def __len__(self) -> int: ...

    def decode(self, token_ids: list[int], **kwargs: bool) -> str: ...


def silent_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the special tokens' ids: those whose text `skip_special_tokens` leaves out."""
    added = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if getattr(token, "special", False)}
    return frozenset(added | set(tokenizer.all_special_ids))


class IncrementalDecoder:
    """Decode a growing token sequence; the deltas and the final flush concatenate to the text of the whole sequence."""

    def __init__(self, tokenizer: Tokenizer, *, silent_ids: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._silent_ids = silent_ids
        self._vocab_size = len(tokenizer)
        self._window: list[int] = []
        self._num_context_tokens = 0
        self._num_published_chars = 0

    def push(self, token_id: int) -> str:
        """Append one token and return the text that it makes final, often its own, sometimes none."""
        # Neither kind has text; a model's vocabulary may be padded beyond the tokenizer's.
        if token_id in self._silent_ids or token_id >= self._vocab_size:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        final_text = text.rstrip(REPLACEMENT_CHARACTER)
        delta = final_text[self._num_published_chars :]
        self._num_published_chars += len(delta)
        if delta and len(final_text) == len(text):
            self._forget(self._num_context_tokens)
        elif len(self._window) > MAX_WINDOW_TOKENS:
            delta += self._cut_garbage(text)
        return delta

    def flush(self) -> str:
        """Return the text that was held back; what is no character stays a replacement character."""
        delta = self._decode(self._window)[self._num_published_chars :]
        self._num_published_chars += len(delta)
        return delta

    def _forget(self, num_tokens: int) -> None:
        """Drop the window's first tokens; all that is left is published and becomes context."""
        del self._window[:num_tokens]
        self._num_context_tokens = len(self._window)
        self._num_published_chars = len(self._decode(self._window))

    def _cut_garbage(self, text: str) -> str:
        """Publish the settled part of a window that does not end in a character, so that it cannot grow for ever.

        A split is between characters exactly when both sides decode to the same text apart as together; behind it
        enough tokens are kept for any unfinished character.
        """
        for split in range(len(self._window) - MAX_CHARACTER_TOKENS, 0, -1):
            before, after = self._decode(self._window[:split]), self._decode(self._window[split:])
            if before + after == text and len(before) >= self._num_published_chars:
                delta = before[self._num_published_chars :]
                del self._window[:split]
                self._num_context_tokens = self._num_published_chars = 0
                return delta
        return ""

    def _decode(self, token_ids: list[int]) -> str:
        # clean-up rewrites text that is already published ("do n't" -> "don't")
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@dataclass(slots=True)
class StopStringFinder:
    """Find the first of some stop strings in a text that arrives in pieces, holding back only what may become one."""

    stop: tuple[str, ...]
    found: bool = False
    _held: str = field(default="")

    def push(self, delta: str) -> str:
        """Return the text that is certainly before any stop string."""
        if not self.stop or self.found:
            return "" if self.found else delta
        text = self._held + delta
        starts = [start for stop in self.stop if (start := text.find(stop)) >= 0]
        if starts:
            self.found, self._held = True, ""
            return text[: min(starts)]
        num_safe_chars = len(text) - max(_overlap(text, stop) for stop in self.stop)
        self._held = text[num_safe_chars:]
        return text[:num_safe_chars]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` with which `stop` begins."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Detokenized:
    """What some tokens became: `num_tokens` of them were used, all unless a stop string ended the text."""

    text: str
    num_tokens: int
    stopped: bool = False


class Detokenizer:
    """The text of one choice: incremental decoding, then stop strings."""

    def __init__(
        self, tokenizer: Tokenizer, *, stop: tuple[str, ...] = (), silent_ids: frozenset[int] = frozenset()
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer, silent_ids=silent_ids)
        self._finder = StopStringFinder(stop)

    def push(self, token_ids: Sequence[int]) -> Detokenized:
        """Append tokens; those behind the one that completes a stop string are not used."""
        pieces = []
        for num_tokens, token_id in enumerate(token_ids, start=1):
            pieces.append(self._finder.push(self._decoder.push(token_id)))
            if self._finder.found:
                return Detokenized(text="".join(pieces), num_tokens=num_tokens, stopped=True)
        return Detokenized(text="".join(pieces), num_tokens=len(token_ids))

    def flush(self) -> Detokenized:
        """Return what was held back, once no more tokens will come."""
        text = self._finder.push(self._decoder.flush())
        return Detokenized(text=text + self._finder.flush(), num_tokens=0, stopped=self._finder.found)
