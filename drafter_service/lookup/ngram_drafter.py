"""Prompt lookup: copy what followed an earlier occurrence of the last few tokens (Saxena 2023; vLLM's `ngram`).

The most recent occurrence of the longest repeated n-gram is copied. At the end of the text the copy continues with
itself, as in LZ77, so that a loop is drafted to any length. A token's confidence depends on the length of the match,
and on how its context continued elsewhere in the text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from outrider.drafter_service.engine.drafter import Ask, SessionKey
from outrider.drafter_service.engine.tree_growth import result_of
from outrider.drafter_service.lookup.ngram_index import VOTE_SIZES, Kind, NgramIndex, match_length
from outrider.drafter_service.lookup.token_history import (
    UNBOUNDED_MODEL_LEN,
    Guesses,
    GuessTree,
    LookupDrafter,
    LookupSession,
    TokenHistory,
)
from outrider.verifier_service.messages.draft import NO_NEEDS, Draft, DraftNeeds

PRIOR = 0.5  # prior acceptance of a kind


@dataclass(slots=True, kw_only=True)
class _Session(LookupSession):
    index: NgramIndex


class NgramDrafter(LookupDrafter[_Session]):
    """A `Drafter` that looks up the last tokens in the request's own text, for chains and trees.

    A session costs a dict entry per token and n-gram size (voting sizes included). A draft costs a look-up per size,
    and one per token and vote.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        prompt_lookup_min: int = 2,
        prompt_lookup_max: int = 5,
        max_model_len: int = UNBOUNDED_MODEL_LEN,
        needs: DraftNeeds = NO_NEEDS,
    ) -> None:
        """Match the last `prompt_lookup_max` tokens, or fewer, down to `prompt_lookup_min`."""
        if not 1 <= prompt_lookup_min <= prompt_lookup_max:
            raise ValueError("prompt_lookup_min must be at least 1 and at most prompt_lookup_max")
        super().__init__(vocab_size=vocab_size, max_model_len=max_model_len, needs=needs)
        self._sizes = range(prompt_lookup_min, prompt_lookup_max + 1)

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        super().check_integrity(keys)
        for session in self._sessions.values():
            session.index.check_integrity()

    # --- one ask ---

    def _answer(self, ask: Ask) -> Draft:
        session, _ = self._follow(ask)
        session.index.catch_up()
        forced = list(ask.forced_ids[: ask.length])
        places = self._places(session, forced)
        if ask.max_nodes:
            return self._tree(ask, session, forced, places)
        return self._chain(ask, session, forced, next(places, None))

    def _start(self, ask: Ask) -> _Session:
        history = TokenHistory()
        return _Session(history=history, index=NgramIndex(history.token_ids, self._sizes))

    def _places(self, session: _Session, forced: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield (match length, position of the next token), longest match first."""
        text = self._context(session, forced)
        for size in reversed(self._sizes):
            end = session.index.last_end(text, size)
            if end is not None:
                yield size, end

    def _context(self, session: _Session, forced: Sequence[int]) -> list[int]:
        """Return the last tokens before a draft, as many as the longest n-gram has."""
        return [*session.history.token_ids[-max(self._sizes[-1], VOTE_SIZES[-1]) :], *forced]

    def _chain(self, ask: Ask, session: _Session, forced: Sequence[int], place: tuple[int, int] | None) -> Draft:
        copied: Sequence[int] = ()
        kinds: list[Kind] = []
        if place is not None and len(forced) < ask.length:
            size, begin = place
            tokens = session.history.token_ids
            copied = copy_on(tokens, forced, begin, ask.length - len(forced))
            longest = size if forced else match_length(tokens, begin, size)
            kinds = session.index.kinds(self._context(session, forced), copied, longest)
        if not forced:
            session.guesses = Guesses(copied, None, kinds)
        rates = {kind: self._estimate.rate(kind, PRIOR) for kind in set(kinds)}
        return ask.answer(
            (*forced, *copied),
            confidences=(*[1.0] * len(forced), *[rates[kind] for kind in kinds]),
        )

    def _tree(self, ask: Ask, session: _Session, forced: Sequence[int], places: Iterator[tuple[int, int]]) -> Draft:
        """Branch if longer and shorter n-grams continue differently."""
        tokens = session.history.token_ids
        guesses = GuessTree()
        root = guesses.add_forced(forced)
        context = self._context(session, forced)
        for size, begin in places:
            node = root
            copied = copy_on(tokens, forced, begin, ask.length - len(forced))
            kinds = session.index.kinds(context, copied, size)
            for token_id, kind in zip(copied, kinds, strict=True):
                node = guesses.add(node, token_id, self._estimate.rate(kind, PRIOR) * guesses.free(node), kind)
        if not forced:
            session.guesses = guesses.guesses()
        return result_of(ask, guesses.best(ask.max_nodes))


def copy_on(tokens: list[int], forced: Sequence[int], begin: int, length: int) -> list[int]:
    """Copy `length` tokens from `begin` on; after the text's end (and the forced tokens), copy the copy."""
    copied = tokens[begin : begin + length]
    if len(copied) < length:
        copied = tokens[begin:] + list(forced)
        copied *= -(-length // len(copied))
    return copied[:length]
