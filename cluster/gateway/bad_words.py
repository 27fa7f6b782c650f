"""vLLM's `bad_words`: texts become the token sequences that an output must not have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.verifier_service.messages.draft import require

MAX_BAD_WORDS = 128  # as vLLM
MAX_BAD_WORD_CHARS = 1024  # as a stop string

TokenSequence = tuple[int, ...]


def check_bad_words(words: Sequence[str]) -> None:
    """Raise `ValueError` naming `bad_words` unless all of them are words, and few enough."""
    require(len(words) <= MAX_BAD_WORDS, "bad_words", f"at most {MAX_BAD_WORDS} texts")
    fits = all(word.strip() and len(word) <= MAX_BAD_WORD_CHARS for word in words)
    require(fits, "bad_words", f"texts of 1 to {MAX_BAD_WORD_CHARS} characters, not of white space alone")


def word_sequences(words: Sequence[str], encode: Callable[[str], TokenSequence]) -> tuple[TokenSequence, ...]:
    """Return how words are written in tokens, where a text begins and behind a space; raises `ValueError`.

    vLLM takes the second way only where it has as many tokens as the first, and another first one. Here it is left out
    only where the first way bars it already, being its end: no other way in is left open.
    """
    sequences: list[TokenSequence] = []
    for word in words:
        bare = encode(word.lstrip())
        require(bool(bare), "bad_words", "texts that the tokenizer has tokens for")
        spaced = encode(f" {word.lstrip()}")
        sequences.append(bare)
        if spaced[-len(bare) :] != bare:
            sequences.append(spaced)
    return tuple(dict.fromkeys(sequences))
