"""Turn one choice's tokens into text as they are committed, and find stop strings across token boundaries.

A token's text depends on its neighbours: a character may be split over several tokens, and some decoders drop the
space before the first token. So a short window of tokens is decoded, never a single token. The first window begins with
the prompt's last tokens, if the text goes on in the prompt's: text of prompt + text = text of all tokens.

    tokens   |<- published, forgotten ->|<- context ->|<- new ->|
                                        |<------- window ------>|
    text of window                      |<- num_published_chars ->|<- delta ->|<- held back (unfinished character) ->|

Once the window's text ends in a finished character, `new` becomes the context of the next window: constant work per
token, whatever the length of the text.

Tokens that are bytes need no window: see byte_decoder.py.

Only whole tokens are published, each with its text. So a token is held back while its last character is unfinished, or
while its text may become part of a stop string.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.cluster.gateway.byte_decoder import REPLACEMENT_CHARACTER, ByteDecoder, TokenBytes

MAX_CHARACTER_TOKENS = 4  # a character has at most four bytes, a token at least one
MAX_WINDOW_TOKENS = 24
NUM_PROMPT_TOKENS = 4  # that begin the first window; more, up to the limit, if they would begin within a character
MAX_PROMPT_TOKENS = 16


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    @property
    def all_special_ids(self) -> list[int]: ...

    @property
    def added_tokens_decoder(self) -> dict[int, object]: ...

    def __len__(self) -> int: ...

    def decode(self, token_ids: list[int], **kwargs: bool) -> str: ...


def silent_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the special tokens' ids, which `skip_special_tokens` leaves out of the text."""
    added = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if getattr(token, "special", False)}
    return frozenset(added | set(tokenizer.all_special_ids))


class IncrementalDecoder:
    """Decode a growing token sequence: all deltas and the final flush, joined, are the text of the sequence.

    `prompt_ids`: the tokens before it, whose text it goes on with; a character may be split between them and it.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, silent_ids: frozenset[int] = frozenset(), prompt_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._silent_ids = silent_ids
        self._vocab_size = len(tokenizer)
        self._window, self._num_context_tokens = self._end_of(prompt_ids)
        self._published = self._whole = self._decode(self._window)  # of the window's text
        if self._num_context_tokens < len(self._window):  # without the character that the prompt ends within
            whole = self._decode(self._window[: self._num_context_tokens])
            self._whole = max(whole, self._published.rstrip(REPLACEMENT_CHARACTER), key=len)
        self.is_unfinished = False  # the text ends within a character

    def push(self, token_id: int) -> str:
        """Append one token; return the text that is final now: often the token's own, sometimes none."""
        if self._is_silent(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        final_text = text.rstrip(REPLACEMENT_CHARACTER)
        self.is_unfinished = len(final_text) < len(text)
        num_published_chars = self._num_published_chars(text)
        delta = final_text[num_published_chars:]
        if delta:
            self._published = self._whole = final_text
        if delta and not self.is_unfinished:
            self._forget(self._num_context_tokens)
        elif len(self._window) > MAX_WINDOW_TOKENS:
            delta += self._cut_garbage(text)
        return delta

    def flush(self) -> str:
        """Return the text that was held back; an unfinished character becomes a replacement character."""
        text = self._decode(self._window)
        delta = text[self._num_published_chars(text) :]
        self._published = self._whole = text
        return delta

    def _is_silent(self, token_id: int) -> bool:
        """Return whether a token has no text: a special one, or padding of the model's vocabulary."""
        return token_id in self._silent_ids or token_id >= self._vocab_size

    def _end_of(self, prompt_ids: Sequence[int]) -> tuple[list[int], int]:
        """Return a prompt's last tokens with text, and how many there are before a character that they end within.

        They do not begin within a character: some decoders show its neighbours as replacement characters, too.
        """
        spoken = (id_ for id_ in reversed(prompt_ids) if not self._is_silent(id_))
        last = list(itertools.islice(spoken, MAX_PROMPT_TOKENS))[::-1]
        for num_tokens in range(min(NUM_PROMPT_TOKENS, len(last)), len(last) + 1):
            end = last[len(last) - num_tokens :]
            for size in range(num_tokens, max(0, num_tokens - MAX_CHARACTER_TOKENS), -1):
                if REPLACEMENT_CHARACTER not in self._decode(end[:size]):
                    return end, size
        return last, 0

    def _num_published_chars(self, text: str) -> int:
        """Return how much of the window's text is published.

        A character that the prompt ends within is, as a replacement character, unless the text has the rest of it.
        """
        return len(self._published if text.startswith(self._published) else self._whole)

    def _forget(self, num_tokens: int) -> None:
        """Drop the window's first tokens; the remaining ones, all published, become context."""
        del self._window[:num_tokens]
        self._num_context_tokens = len(self._window)
        self._published = self._whole = self._decode(self._window)

    def _cut_garbage(self, text: str) -> str:
        """Publish the first part of a window that never ends in a whole character: the window must stay short.

        A split is between characters if both sides, decoded apart, join to the same text. The second side keeps enough
        tokens for an unfinished character.
        """
        num_published_chars = self._num_published_chars(text)
        for split in range(len(self._window) - MAX_CHARACTER_TOKENS, 0, -1):
            before, after = self._decode(self._window[:split]), self._decode(self._window[split:])
            if before + after == text and len(before) >= num_published_chars:
                del self._window[:split]
                self._num_context_tokens, self._published, self._whole = 0, "", ""
                return before[num_published_chars:]
        return ""

    def _decode(self, token_ids: list[int]) -> str:
        # clean-up rewrites text that is already published ("do n't" -> "don't")
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@dataclass(slots=True)
class StopStringFinder:
    """Find the first stop string in the texts of tokens; tokens that may be part of one are held back.

    A stop string counts if a token after the first `min_tokens` completes it; it may begin earlier.
    """

    stop: tuple[str, ...]
    include: bool = False  # the text includes the stop string
    min_tokens: int = 0
    found: bool = False
    match: str | None = None  # the stop string that was found
    _num_tokens: int = 0
    _held: list[str] = field(default_factory=list)

    def push(self, token_text: str) -> list[str]:
        """Return the texts of the released tokens, oldest first; once a stop string is found, all, cut to length."""
        if not self.stop:
            return [token_text]
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
    """Cut the joined texts to `num_chars` characters."""
    cut = []
    for text in texts:
        cut.append(text[:num_chars])
        num_chars -= len(cut[-1])
    return cut


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


class Detokenizer:
    """The text of one choice, token by token: incremental decoding, then stop strings."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        table: TokenBytes | None = None,  # of a byte-level tokenizer
        *,
        silent_ids: frozenset[int] = frozenset(),
        prompt_ids: Sequence[int] = (),  # whose text the choice's goes on with
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._decoder: IncrementalDecoder | ByteDecoder
        if table is None:
            self._decoder = IncrementalDecoder(tokenizer, silent_ids=silent_ids, prompt_ids=prompt_ids)
        else:
            self._decoder = ByteDecoder(table, silent_ids=silent_ids, prompt_ids=prompt_ids)
        self._finder = StopStringFinder(stop, include=include_stop, min_tokens=min_tokens)
        self._undecoded: list[str] = []  # texts of the last tokens, which end in an unfinished character

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._finder.found

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._finder.match

    def push(self, token_ids: Sequence[int]) -> list[str]:
        """Append tokens; return the texts that are final now, oldest first.

        Tokens after a stop string are ignored, and have no text.
        """
        final = []
        for token_id in token_ids:
            for text in self._decode(token_id):
                final += self._finder.push(text)
                if self.stopped:
                    return final
        return final

    def flush(self) -> list[str]:
        """Return the texts of all held-back tokens: no more tokens follow."""
        if self._undecoded:
            self._undecoded[-1] += self._decoder.flush()
        final = [text for undecoded in self._undecoded if not self.stopped for text in self._finder.push(undecoded)]
        self._undecoded = []
        return final + self._finder.flush()

    def _decode(self, token_id: int) -> list[str]:
        """Append a token; return the texts that are decoded now. A token with an unfinished character waits."""
        delta = self._decoder.push(token_id)
        if not self._undecoded and not self._decoder.is_unfinished:
            return [delta]
        self._undecoded.append(delta)
        if not self._decoder.is_unfinished:
            num_decoded = len(self._undecoded)
        else:
            num_decoded = len(self._undecoded) - 1 if delta else 0
        decoded, self._undecoded = self._undecoded[:num_decoded], self._undecoded[num_decoded:]
        return decoded


class NoText:
    """In place of a `Detokenizer`: it says nothing, so that tokens are held until their choice ends."""

    stopped: bool = False
    stop_string: str | None = None

    def push(self, token_ids: Sequence[int]) -> list[str]:
        return []

    def flush(self) -> list[str]:
        return []
