"""Prompt lookup as it was when the traces were recorded: vLLM's, n-grams of 3 to 7 tokens.

It copies what followed the first place at which the longest n-gram stood, where ours takes the last one. That was
compared with the recorded lengths (`../shared/traces`): such copies equal the generated text exactly as far as was
recorded, at every position of gsm8k and at 0.9998 of ShareGPT's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.drafter_service.lookup.ngram_drafter import copy_on
from outrider.drafter_service.lookup.ngram_index import Kind, NgramIndex, match_length

SIZES = range(3, 8)  # tokens of an n-gram


def recorded_kinds(prompt_ids: Sequence[int], generated_ids: Sequence[int], length: int) -> Iterator[list[Kind]]:
    """Yield for each generated position the kinds of its draft's tokens, `length` of them, or none.

    Kinds are those by which our drafter judges what it copies.
    """
    tokens: list[int] = []
    index = NgramIndex(tokens, ())  # for its votes: where to copy from is looked up here
    first_ends: dict[tuple[int, ...], int] = {}  # n-gram -> position of the token after its first occurrence
    for position, token_id in enumerate([*prompt_ids, *generated_ids]):
        if position >= len(prompt_ids):
            place = _longest(first_ends, tokens)
            yield [] if place is None else _kinds(index, tokens, place, length)
        for size in SIZES:
            if size <= position:
                first_ends.setdefault(tuple(tokens[-size:]), position)
        tokens.append(token_id)
        index.catch_up()


def _longest(first_ends: dict[tuple[int, ...], int], tokens: list[int]) -> tuple[int, int] | None:
    """Return the length of the longest n-gram that a text ends with and had before, and where that went on."""
    for size in reversed(SIZES):
        if size <= len(tokens) and (end := first_ends.get(tuple(tokens[-size:]))) is not None:
            return size, end
    return None


def _kinds(index: NgramIndex, tokens: list[int], place: tuple[int, int], length: int) -> list[Kind]:
    size, begin = place
    copied = copy_on(tokens, (), begin, length)
    return index.kinds(tokens, copied, match_length(tokens, begin, size))
