"""Shared by drafters without a model: sessions, their tokens, and acceptance estimates by kind of guess.

Their drafts are point masses, which are exact however they are chosen: the estimates may learn from outcomes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from outrider.drafter_service.engine.acceptance import AcceptanceEstimate
from outrider.drafter_service.engine.draft_tree import ChosenNodes, DraftTree
from outrider.drafter_service.engine.drafter import Ask, SessionKey
from outrider.verifier_service.messages.draft import ROOT, Draft, DraftNeeds

UNBOUNDED_MODEL_LEN = 1 << 31  # the context of a drafter without a model


@dataclass(slots=True)
class TokenHistory:
    """A drafter's own copy of the committed tokens of one session."""

    token_ids: list[int] = field(default_factory=list)
    _source: Sequence[int] | None = None

    def is_continued_by(self, token_ids: Sequence[int]) -> bool:
        """Return whether an ask's tokens begin with this history: O(1) for the session's own list, which only grows.

        Another list, as after a resync, is compared token by token.
        """
        num_known = len(self.token_ids)
        if len(token_ids) < num_known:
            return False
        if token_ids is self._source:
            return num_known == 0 or token_ids[num_known - 1] == self.token_ids[-1]
        return list(token_ids[:num_known]) == self.token_ids

    def extend_to(self, token_ids: Sequence[int]) -> list[int]:
        """Extend the history to an ask's tokens; return the new ones."""
        new_ids = list(token_ids[len(self.token_ids) :])
        self.token_ids += new_ids
        self._source = token_ids
        return new_ids


@dataclass(slots=True)
class Guesses:
    """The guesses of a draft: each token's kind and parent (parents None: a chain)."""

    token_ids: Sequence[int] = ()
    parents: Sequence[int] | None = None
    kinds: Sequence[Hashable] = ()

    def teach(self, estimate: AcceptanceEstimate, new_ids: Sequence[int]) -> None:
        """Update an estimate from the tokens committed since.

        Only guesses with a right parent and a committed token count, so that a cut draft teaches nothing wrong.
        """
        right_depths = {ROOT: -1}  # depth of each right guess
        num_new = len(new_ids)
        for index, token_id in enumerate(self.token_ids):
            depth = right_depths.get(index - 1 if self.parents is None else self.parents[index], num_new) + 1
            if depth >= num_new:
                if self.parents is None:
                    break
                continue
            is_right = token_id == new_ids[depth]
            if is_right:
                right_depths[index] = depth
            estimate.observe(self.kinds[index], is_accepted=is_right)


@dataclass(slots=True)
class GuessTree:
    """A draft tree under construction from several sources: equal paths are one node."""

    tree: DraftTree = field(default_factory=DraftTree)
    kinds: list[Hashable] = field(default_factory=list)
    _children: dict[tuple[int, int], int] = field(default_factory=dict)
    _taken: dict[int, float] = field(default_factory=dict)  # total probability of a node's children

    def __len__(self) -> int:
        return len(self.kinds)

    def free(self, parent: int) -> float:
        """Return the probability that no child of a node is right."""
        return max(0.0, 1.0 - self._taken.get(parent, 0.0))

    def add(self, parent: int, token_id: int, prob: float, kind: Hashable) -> int:
        """Return a node's child for a token, an existing or a new one."""
        index = self._children.get((parent, token_id))
        if index is None:
            prob = min(prob, self.free(parent))
            index = self._children[parent, token_id] = self.tree.add(parent, token_id, prob)
            self._taken[parent] = self._taken.get(parent, 0.0) + prob
            self.kinds.append(kind)
        return index

    def add_forced(self, token_ids: Sequence[int]) -> int:
        """Add a chain of tokens that cannot be others; return the last one's node."""
        node = ROOT
        for token_id in token_ids:
            node = self.add(node, token_id, 1.0, None)
        return node

    def best(self, max_nodes: int) -> ChosenNodes:
        return self.tree.best(max_nodes)

    def first(self, max_nodes: int) -> ChosenNodes:
        """Keep the first added nodes, in this order."""
        return self.tree.chosen(range(min(len(self), max_nodes)))

    def guesses(self) -> Guesses:
        return Guesses(self.tree.token_ids, self.tree.parents, self.kinds)


@dataclass(slots=True, kw_only=True)
class LookupSession:
    """One request's text and the last guesses."""

    history: TokenHistory = field(default_factory=TokenHistory)
    guesses: Guesses = field(default_factory=Guesses)


SomeSession = TypeVar("SomeSession", bound=LookupSession)


class LookupDrafter(Generic[SomeSession]):
    """A `Drafter` without a model, which answers every ask at once."""

    def __init__(self, *, vocab_size: int, max_model_len: int, needs: DraftNeeds) -> None:
        self.vocab_size, self.max_model_len, self.needs = vocab_size, max_model_len, needs
        self._estimate = AcceptanceEstimate()
        self._sessions: dict[SessionKey, SomeSession] = {}

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[Draft]:
        """Answer every ask; `max_num_tokens` is ignored, since no model runs."""
        return [self._answer(ask) for ask in asks]

    def release(self, key: SessionKey) -> None:
        self._sessions.pop(key, None)

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        assert self._sessions.keys() <= set(keys), "a text of a session that is gone"

    @abstractmethod
    def _answer(self, ask: Ask) -> Draft: ...

    @abstractmethod
    def _start(self, ask: Ask) -> SomeSession:
        """Return a session without a text, for an ask's request."""

    def _is_continued_by(self, session: SomeSession, ask: Ask) -> bool:
        return session.history.is_continued_by(ask.token_ids)

    def _follow(self, ask: Ask) -> tuple[SomeSession, list[int]]:
        """Extend a session to its ask's tokens, or start a new one; learn from the new tokens, and return them."""
        session = self._sessions.get(ask.key)
        if session is None or not self._is_continued_by(session, ask):
            self.release(ask.key)
            session = self._sessions[ask.key] = self._start(ask)
        new_ids = session.history.extend_to(ask.token_ids)
        session.guesses.teach(self._estimate, new_ids)
        session.guesses = Guesses()
        return session, new_ids
