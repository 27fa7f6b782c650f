"""For each n-gram of a text: its last continuation, and whether it continued in the same way before.

The first is copied; the second gives the copied token's confidence: its contexts of one, two and three tokens each have
a *vote*, as in prediction by partial matching (Cleary and Witten 1984). Of prompt lookup's first tokens on ShareGPT
(`../shared/traces`), accepted were 0.17 to 0.59 if the last three tokens had continued in several ways, 0.59 to 0.88 if
they had occurred once, 0.86 to 0.99 if they had always continued in the same way. Lower figures are of matches of three
tokens, higher ones of eight and more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

VOTE_SIZES = (1, 2, 3)  # context lengths that vote on a guess
# A context's vote on a guess: it occurred once, before this guess; the guess followed the last two times; the guess
# followed the last time, but not before; another token followed the last time; the context never occurred.
ONCE, AGAIN, CHANGED, AGAINST, UNSEEN = range(5)
MAX_MATCH = 16  # longer matches are no better

Kind = tuple[int, ...]  # of a copied token: half of its match length, and the votes


class NgramIndex:
    """The n-grams of one growing text."""

    def __init__(self, tokens: list[int], sizes: Iterable[int]) -> None:
        """Index n-grams of `sizes` and of `VOTE_SIZES`; after appending to `tokens`, call `catch_up`."""
        self._tokens = tokens
        # n-gram -> 4 * position of the token after its last occurrence + that token's vote; one integer saves memory
        self._places: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in sorted({*sizes, *VOTE_SIZES})}
        self._num_indexed = 0

    def catch_up(self) -> None:
        """Index the appended tokens."""
        tokens = self._tokens
        for size, places in self._places.items():
            for end in range(max(self._num_indexed, size), len(tokens)):
                gram = tuple(tokens[end - size : end])
                last = places.get(gram)
                vote = ONCE if last is None else AGAIN if tokens[last >> 2] == tokens[end] else CHANGED
                places[gram] = end << 2 | vote
        self._num_indexed = len(tokens)

    def last_end(self, context: Sequence[int], size: int) -> int | None:
        """Return the position of the token after the last occurrence of a context's last `size` tokens."""
        place = self._place(context, size)
        return None if place is None else place >> 2

    def votes(self, context: Sequence[int], token_id: int) -> tuple[int, ...]:
        """Return a context's votes on the token after it, by `VOTE_SIZES`."""
        return tuple(self._vote(self._place(context, size), token_id) for size in VOTE_SIZES)

    def _vote(self, place: int | None, token_id: int) -> int:
        if place is None:
            return UNSEEN
        return place & 3 if self._tokens[place >> 2] == token_id else AGAINST

    def _place(self, context: Sequence[int], size: int) -> int | None:
        return self._places[size].get(tuple(context[-size:]))  # a shorter context is no key

    def kinds(self, context: Sequence[int], copied: Sequence[int], num_matched: int) -> list[Kind]:
        """Return the kind of each copied token after a context, of which `num_matched` tokens matched."""
        text = list(context[-VOTE_SIZES[-1] :])
        kinds: list[Kind] = []
        for depth, token_id in enumerate(copied):
            kinds.append((min(num_matched + depth, MAX_MATCH) // 2, *self.votes(text, token_id)))
            text.append(token_id)
        return kinds

    def check_integrity(self) -> None:
        """Raise `AssertionError` if an indexed position is wrong."""
        tokens = self._tokens
        for size, places in self._places.items():
            for gram, place in places.items():
                end = place >> 2
                assert size <= end < len(tokens), "an n-gram that nothing follows"
                assert tuple(tokens[end - size : end]) == gram, "an n-gram is not where the index says"


def match_length(tokens: Sequence[int], begin: int, size: int) -> int:
    """Return how many tokens before `begin` equal the last ones: `size` to MAX_MATCH."""
    length = size
    while length < min(MAX_MATCH, begin) and tokens[begin - 1 - length] == tokens[-1 - length]:
        length += 1
    return length
