"""vLLM's `bad_words`: texts become token sequences that the output must not contain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.verifier_service.messages.draft import require

MAX_BAD_WORDS = 128  # as vLLM
MAX_BAD_WORD_CHARS = 1024  # as a stop string

TokenSequence = tuple[int, ...]


def check_bad_words(words: Sequence[str]) -> None:
    """Raise `ValueError` naming `bad_words` if there are too many, or one is blank or too long."""
    require(len(words) <= MAX_BAD_WORDS, "bad_words", f"at most {MAX_BAD_WORDS} texts")
    fits = all(word.strip() and len(word) <= MAX_BAD_WORD_CHARS for word in words)
    require(fits, "bad_words", f"texts of 1 to {MAX_BAD_WORD_CHARS} characters, not of white space alone")


def word_sequences(words: Sequence[str], encode: Callable[[str], TokenSequence]) -> tuple[TokenSequence, ...]:
    """Return each word's tokens at the beginning of a text, and after a space; raises `ValueError`.

    The sequence after a space is left out if it ends in the other one, which then bars both. (vLLM leaves it out in
    more cases, if the two differ in length or begin with the same token: there such a word can still appear.)
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
