"""Prompt lookup: copy what followed an earlier occurrence of the last few tokens (Saxena 2023; vLLM's `ngram`).

The most recent occurrence of the longest repeated n-gram is copied. At the end of the text the copy continues with
itself, as in LZ77, so that a loop is drafted to any length. A token's confidence depends on the length of the match,
and on how its context continued elsewhere in the text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from outrider.drafter_service.engine.acceptance import AcceptanceEstimate
from outrider.drafter_service.engine.drafter import Ask, SessionKey
from outrider.drafter_service.lookup.ngram_index import VOTE_SIZES, Kind, NgramIndex, match_length
from outrider.drafter_service.lookup.token_history import (
    UNBOUNDED_MODEL_LEN,
    Guesses,
    GuessTree,
    TokenHistory,
)
from outrider.verifier_service.messages.draft import NO_NEEDS, ROOT, Draft, DraftNeeds

PRIOR = 0.5  # prior acceptance of a kind


@dataclass(slots=True)
class _Session:
    """One request's text, its n-grams, and the last guesses."""

    history: TokenHistory
    index: NgramIndex
    guesses: Guesses = field(default_factory=Guesses)

    @classmethod
    def empty(cls, sizes: Iterable[int]) -> _Session:
        history = TokenHistory()
        return cls(history, NgramIndex(history.token_ids, sizes))


class NgramDrafter:
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
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.needs = needs
        self._sizes = range(prompt_lookup_min, prompt_lookup_max + 1)
        self._estimate = AcceptanceEstimate()
        self._sessions: dict[SessionKey, _Session] = {}

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[Draft]:
        """Answer every ask at once; `max_num_tokens` is ignored, since no model runs."""
        return [self._answer(ask) for ask in asks]

    def release(self, key: SessionKey) -> None:
        self._sessions.pop(key, None)

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        assert self._sessions.keys() <= set(keys), "n-grams of a session that is gone"
        for session in self._sessions.values():
            session.index.check_integrity()

    # --- one ask ---

    def _answer(self, ask: Ask) -> Draft:
        session = self._follow(ask)
        forced = list(ask.forced_ids[: ask.length])
        places = self._places(session, forced)
        if ask.max_nodes:
            return self._tree(ask, session, forced, places)
        return self._chain(ask, session, forced, next(places, None))

    def _follow(self, ask: Ask) -> _Session:
        """Extend a session to its ask's tokens; if earlier tokens differ, start a new one."""
        session = self._sessions.get(ask.key)
        if session is None or not session.history.is_continued_by(ask.token_ids):
            session = self._sessions[ask.key] = _Session.empty(self._sizes)
        new_ids = session.history.extend_to(ask.token_ids)
        session.guesses.teach(self._estimate, new_ids)
        session.guesses = Guesses()
        session.index.catch_up()
        return session

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
        root = ROOT
        for token_id in forced:
            root = guesses.add(root, token_id, 1.0, None)
        context = self._context(session, forced)
        for size, begin in places:
            node = root
            copied = copy_on(tokens, forced, begin, ask.length - len(forced))
            kinds = session.index.kinds(context, copied, size)
            for token_id, kind in zip(copied, kinds, strict=True):
                node = guesses.add(node, token_id, self._estimate.rate(kind, PRIOR) * guesses.free(node), kind)
        if not forced:
            session.guesses = guesses.guesses()
        chosen = guesses.best(ask.max_nodes)
        return ask.answer(
            chosen.token_ids,
            parents=chosen.parents,
            confidences=chosen.confidences,
        )


def copy_on(tokens: list[int], forced: Sequence[int], begin: int, length: int) -> list[int]:
    """Copy `length` tokens from `begin` on; after the text's end (and the forced tokens), copy the copy."""
    copied = tokens[begin : begin + length]
    if len(copied) < length:
        copied = tokens[begin:] + list(forced)
        copied *= -(-length // len(copied))
    return copied[:length]
