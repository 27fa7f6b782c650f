"""Turn one choice's tokens into text as they are committed, and find stop strings across token boundaries.

A token's text depends on its neighbours: a character may be split over several tokens, and a decoder may drop the
space in front of the first token it sees. So a short window of tokens is decoded, never a token alone:

    tokens   |<- published, forgotten ->|<- context ->|<- new ->|
                                        |<------- window ------>|
    text of window                      |<- num_published_chars ->|<- delta ->|<- held back (unfinished character) ->|

Once the window's text ends in a finished character, `new` becomes the context of the next window: constant work per
token, whatever the length of the text.

(`DecodeStream` of tokenizers takes 0.7 µs a token instead of 5.4, but tells neither what it holds back nor that a
character is unfinished, and tokenizers that are not its own have none: a second decoder would have to stay.)

What is published is whole tokens: the texts of the tokens published so far concatenate to the text published so far.
So a token is held back while its last character is unfinished, or while its text may become part of a stop string.
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
        self.is_unfinished = False  # the text ends within a character

    def push(self, token_id: int) -> str:
        """Append one token and return the text that it makes final, often its own, sometimes none."""
        # Neither kind has text; a model's vocabulary may be padded beyond the tokenizer's.
        if token_id in self._silent_ids or token_id >= self._vocab_size:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        final_text = text.rstrip(REPLACEMENT_CHARACTER)
        self.is_unfinished = len(final_text) < len(text)
        delta = final_text[self._num_published_chars :]
        self._num_published_chars += len(delta)
        if delta and not self.is_unfinished:
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
    """Find the first of some stop strings in the texts of tokens, holding back tokens that may be part of one.

    A stop string counts only where a token beyond the first `min_tokens` completes it; it may begin before.
    """

    stop: tuple[str, ...]
    include: bool = False  # keep the stop string in the text
    min_tokens: int = 0
    found: bool = False
    match: str | None = None  # the stop string that was found
    _num_tokens: int = 0
    _held: list[str] = field(default_factory=list)

    def push(self, token_text: str) -> list[str]:
        """Return the texts of the tokens that are settled now, oldest first; all, cut to length, once one is found."""
        self._num_tokens += 1
        self._held.append(token_text)
        text = "".join(self._held)
        if token_text and self._num_tokens > self.min_tokens:
            self._search(text, num_new_chars=len(token_text))
        if self.found:
            return self.flush()
        return self._release(len(text) - max((_overlap(text, stop) for stop in self.stop), default=0))

    def flush(self) -> list[str]:
        held, self._held = self._held, []
        return held

    def _search(self, text: str, num_new_chars: int) -> None:
        """Cut the held texts at the first stop string that ends in the new characters."""
        num_old_chars = len(text) - num_new_chars
        starts = ((text.find(stop, max(0, num_old_chars - len(stop) + 1)), stop) for stop in self.stop)
        matches = [(start, start + len(stop), stop) for start, stop in starts if start >= 0]
        if matches:
            self.found = True
            start, end, self.match = min(matches)
            self._held = _cut(self._held, end if self.include else start)

    def _release(self, num_safe_chars: int) -> list[str]:
        num_chars = num_tokens = 0
        for token_text in self._held:
            num_chars += len(token_text)
            if num_chars > num_safe_chars:
                break
            num_tokens += 1
        released, self._held = self._held[:num_tokens], self._held[num_tokens:]
        return released


def _cut(texts: Sequence[str], num_chars: int) -> list[str]:
    """Shorten texts so that together they have `num_chars`."""
    cut = []
    for text in texts:
        cut.append(text[:num_chars])
        num_chars -= len(cut[-1])
    return cut


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` with which `stop` begins."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


class Detokenizer:
    """The text of one choice, token by token: incremental decoding, then stop strings."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        silent_ids: frozenset[int] = frozenset(),
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer, silent_ids=silent_ids)
        self._finder = StopStringFinder(stop, include=include_stop, min_tokens=min_tokens)
        self._undecoded: list[str] = []  # of the last tokens, where they end in an unfinished character

    @property
    def stopped(self) -> bool:
        """True once a stop string ended the text."""
        return self._finder.found

    @property
    def stop_string(self) -> str | None:
        """Return the stop string that ended the text, where one did."""
        return self._finder.match

    def push(self, token_ids: Sequence[int]) -> list[str]:
        """Append tokens; return the texts of those that are settled now, oldest first.

        Tokens behind the one that completes a stop string are not used, and get no text.
        """
        settled = []
        for token_id in token_ids:
            for text in self._decode(token_id):
                settled += self._finder.push(text)
                if self.stopped:
                    return settled
        return settled

    def flush(self) -> list[str]:
        """Return the texts of the tokens that were held back, once no more will come."""
        if self._undecoded:
            self._undecoded[-1] += self._decoder.flush()
        settled = [text for undecoded in self._undecoded if not self.stopped for text in self._finder.push(undecoded)]
        self._undecoded = []
        return settled + self._finder.flush()

    def _decode(self, token_id: int) -> list[str]:
        """Return the texts of the tokens that are decoded now; the one with an unfinished character waits."""
        delta = self._decoder.push(token_id)
        self._undecoded.append(delta)
        if not self._decoder.is_unfinished:
            num_decoded = len(self._undecoded)
        else:
            num_decoded = len(self._undecoded) - 1 if delta else 0
        decoded, self._undecoded = self._undecoded[:num_decoded], self._undecoded[num_decoded:]
        return decoded
