"""Where the n-grams of a text were last continued, and whether they went on alike before.

The first says what to copy, the second how far a copied token can be trusted: each of the last one, two and three
tokens before it has a *vote*, as contexts have in prediction by partial matching (Cleary and Witten 1984). Of prompt
lookup's first tokens on ShareGPT (`../shared/traces`) 0.17 to 0.59 were accepted where the last three tokens had gone
on in several ways, 0.59 to 0.88 where they had stood there once, 0.86 to 0.99 where they had always gone on alike; the
lower figures are of matches of three tokens, the higher ones of eight and more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

VOTE_SIZES = (1, 2, 3)  # tokens before a guess that vote on it
# What the tokens before a guess say: they stood there once, and it followed; it followed the last two times; it
# followed the last time only, of two; something else followed the last time; they never stood there.
ONCE, AGAIN, CHANGED, AGAINST, UNSEEN = range(5)
MAX_MATCH = 16  # longer matches are as good

Kind = tuple[int, ...]  # of a copied token: the length of its match, halved, and the votes


class NgramIndex:
    """The n-grams of one growing text."""

    def __init__(self, tokens: list[int], sizes: Iterable[int]) -> None:
        """Index n-grams of `sizes` tokens, and of those that vote; what is appended to `tokens` by `catch_up`."""
        self._tokens = tokens
        # n-gram -> position of the token after its last occurrence, times four, and that token's vote: one integer,
        # for a long text has many
        self._places: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in sorted({*sizes, *VOTE_SIZES})}
        self._num_indexed = 0

    def catch_up(self) -> None:
        """Take in the tokens that have been appended."""
        tokens = self._tokens
        for size, places in self._places.items():
            for end in range(max(self._num_indexed, size), len(tokens)):
                gram = tuple(tokens[end - size : end])
                last = places.get(gram)
                vote = ONCE if last is None else AGAIN if tokens[last >> 2] == tokens[end] else CHANGED
                places[gram] = end << 2 | vote
        self._num_indexed = len(tokens)

    def last_end(self, context: Sequence[int], size: int) -> int | None:
        """Return the position of the token that followed a context's last `size` tokens when these last stood here."""
        place = self._place(context, size)
        return None if place is None else place >> 2

    def votes(self, context: Sequence[int], token_id: int) -> tuple[int, ...]:
        """Return what the last tokens of a context say of the token after it, by `VOTE_SIZES`."""
        return tuple(self._vote(self._place(context, size), token_id) for size in VOTE_SIZES)

    def _vote(self, place: int | None, token_id: int) -> int:
        if place is None:
            return UNSEEN
        return place & 3 if self._tokens[place >> 2] == token_id else AGAINST

    def _place(self, context: Sequence[int], size: int) -> int | None:
        return self._places[size].get(tuple(context[-size:]))  # a context of fewer tokens is no key

    def kinds(self, context: Sequence[int], copied: Sequence[int], num_matched: int) -> list[Kind]:
        """Return the kind of each copied token that would follow a context, of which so many tokens matched."""
        text = list(context[-VOTE_SIZES[-1] :])
        kinds: list[Kind] = []
        for depth, token_id in enumerate(copied):
            kinds.append((min(num_matched + depth, MAX_MATCH) // 2, *self.votes(text, token_id)))
            text.append(token_id)
        return kinds

    def check_integrity(self) -> None:
        """Raise `AssertionError` if an n-gram is not where the index says."""
        tokens = self._tokens
        for size, places in self._places.items():
            for gram, place in places.items():
                end = place >> 2
                assert size <= end < len(tokens), "an n-gram that nothing follows"
                assert tuple(tokens[end - size : end]) == gram, "an n-gram is not where the index says"


def match_length(tokens: Sequence[int], begin: int, size: int) -> int:
    """Return how many tokens before `begin` equal the last ones: at least `size`, at most MAX_MATCH."""
    length = size
    while length < min(MAX_MATCH, begin) and tokens[begin - 1 - length] == tokens[-1 - length]:
        length += 1
    return length
