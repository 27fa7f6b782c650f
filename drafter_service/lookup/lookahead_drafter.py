"""Lookahead decoding: the target itself finds n-grams by Jacobi iteration beside its verification (Fu et al. 2024).

A draft is one tree of point masses. A window of W columns and N - 1 rows holds guesses. Row 0 is the last committed
token and a chain after it; below column c of row 0 are rows 1 to N - 2, each the target's guess after the row above:

    (0,0) = root ── (0,1) ── (0,2)        (r, c) is r + c tokens after the root
      │               │        │
    (1,0)           (1,1)    (1,2)        a column and the target's token after it are a new n-gram of the pool

The branches before the window are n-grams of the pool that begin with the last committed token: they get accepted. The
next window drops the top row, adds the target's new tokens at the bottom, and moves on by the committed tokens. The
pool also has the n-grams of the committed text; a chain is drafted from the pool alone.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from outrider.drafter_service.engine.drafter import Ask, SessionKey
from outrider.drafter_service.engine.tree_growth import result_of
from outrider.drafter_service.lookup.token_history import (
    UNBOUNDED_MODEL_LEN,
    GuessTree,
    LookupDrafter,
    LookupSession,
)
from outrider.verifier_service.messages.draft import ROOT, Draft, DraftNeeds, require

POOL_PRIOR = 0.3  # prior acceptance
WINDOW_PRIOR = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadConfig:
    """The paper's W, N and G; a window larger than half of an ask's nodes loses columns."""

    window: int = 5  # W: columns
    ngram: int = 4  # N: tokens of an n-gram
    num_guesses: int = 5  # G: n-grams of the pool in a draft, and in the pool per first token

    def __post_init__(self) -> None:
        require(self.window >= 1, "window", "at least 1")
        require(self.ngram >= 2, "ngram", "at least 2")
        require(self.num_guesses >= 1, "num_guesses", "at least 1")


class NgramPool:
    """The latest n-grams of each first token, up to a limit."""

    def __init__(self, max_per_token: int) -> None:
        self._max_per_token = max_per_token
        self._tails: dict[int, dict[tuple[int, ...], None]] = {}  # a dict is ordered: oldest first

    def add(self, ngram: Sequence[int]) -> None:
        tails = self._tails.setdefault(ngram[0], {})
        tail = tuple(ngram[1:])
        tails.pop(tail, None)
        tails[tail] = None
        if len(tails) > self._max_per_token:
            del tails[next(iter(tails))]

    def tails(self, token_id: int) -> list[tuple[int, ...]]:
        """Return the tokens that followed a token, newest n-gram first."""
        return list(reversed(self._tails.get(token_id, {})))

    def check_integrity(self, ngram: int) -> None:
        """Raise `AssertionError` if it is too large, or an n-gram has another length."""
        for tails in self._tails.values():
            assert 0 < len(tails) <= self._max_per_token, "more n-grams of one token than allowed"
            assert all(len(tail) == ngram - 1 for tail in tails), "an n-gram of another length"


@dataclass(slots=True, kw_only=True)
class _Session(LookupSession):
    """One request's pool and window, and the window's nodes in the last draft."""

    pool: NgramPool
    window: list[list[int]] = field(default_factory=list)  # [num_rows][num_columns] token ids; window[0][0] is the root
    bottoms: list[int] = field(default_factory=list)  # per sent column: node of its last cell


class LookaheadDrafter(LookupDrafter[_Session]):
    """A `Drafter` whose guesses are the target's: it needs the target's prediction after every node of its drafts."""

    def __init__(
        self,
        *,
        vocab_size: int,
        rng: random.Random,
        config: LookaheadConfig | None = None,
        max_model_len: int = UNBOUNDED_MODEL_LEN,
    ) -> None:
        """`rng` picks tokens of the text that fill a new window: any guess is exact."""
        super().__init__(vocab_size=vocab_size, max_model_len=max_model_len, needs=DraftNeeds(predictions=True))
        self._rng = rng
        self._config = config or LookaheadConfig()
        self._num_rows = self._config.ngram - 1

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        super().check_integrity(keys)
        for session in self._sessions.values():
            session.pool.check_integrity(self._config.ngram)
            assert len(session.window) == self._num_rows, "a window of another height"
            assert all(len(row) == self._config.window for row in session.window), "a window of another width"

    # --- learning from the last verification ---

    def _start(self, ask: Ask) -> _Session:
        return _Session(pool=NgramPool(self._config.num_guesses))

    def _advance(self, ask: Ask) -> _Session:
        """Follow an ask: its new tokens move the window and bring n-grams."""
        session, new_ids = self._follow(ask)
        tokens = session.history.token_ids
        if not session.window:
            session.window = [self._fill([], tokens) for _ in range(self._num_rows)]
        elif new_ids:
            predicted = self._harvest(session, ask.predicted_ids)
            self._move(session, predicted, len(new_ids))
        for end in range(max(len(tokens) - len(new_ids) + 1, self._config.ngram), len(tokens) + 1):
            session.pool.add(tokens[end - self._config.ngram : end])
        session.window[0][0] = tokens[-1]
        session.bottoms = []
        return session

    def _harvest(self, session: _Session, predicted_ids: Sequence[int]) -> list[int]:
        """Add each column with the target's next token to the pool; return these tokens, the new last row.

        The draft may have been cut before verification: the last columns, or all, may have no next token.
        """
        predicted: list[int] = []
        for column, node in enumerate(session.bottoms):
            if node + 1 >= len(predicted_ids):
                break
            predicted.append(predicted_ids[node + 1])
            session.pool.add([*[row[column] for row in session.window], predicted[-1]])
        return predicted

    def _move(self, session: _Session, predicted: list[int], num_committed: int) -> None:
        """Move the window to the new root; its cells keep their positions in the text.

        A cell of the next row is one token further on. So with a new last row, one column less is dropped on the left.
        """
        rows = [*session.window[1:], predicted] if predicted else session.window
        num_gone = num_committed - 1 if predicted else num_committed
        session.window = [self._fill(row[num_gone:], session.history.token_ids) for row in rows]

    def _fill(self, row: list[int], tokens: Sequence[int]) -> list[int]:
        return row + [self._rng.choice(tokens) for _ in range(self._config.window - len(row))]

    # --- the next draft ---

    def _answer(self, ask: Ask) -> Draft:
        session = self._advance(ask)
        tree = GuessTree()
        forced = ask.forced_ids[: ask.length]
        root = tree.add_forced(forced)
        max_nodes = ask.max_nodes or ask.length
        num_columns = 0 if forced else self._num_columns(ask)
        room = max_nodes - self._num_window_nodes(num_columns)
        last = forced[-1] if forced else session.history.token_ids[-1]
        tails = session.pool.tails(last)
        for tail in tails if ask.max_nodes else tails[:1]:
            self._add_tail(tree, root, tail[: ask.length - len(forced)], room)
        session.bottoms = self._add_window(tree, session.window, num_columns)
        if not forced:
            session.guesses = tree.guesses()
        return result_of(ask, tree.first(max_nodes))

    def _num_columns(self, ask: Ask) -> int:
        """Return the number of columns that fit into half of the nodes and into the draft's depth."""
        by_nodes = (ask.max_nodes // 2 + 1) // self._num_rows  # the root is a cell, but no node
        by_depth = ask.length - self._num_rows + 2  # the last cell's depth: num_rows - 1 + num_columns - 1, from 1 on
        return max(0, min(self._config.window, by_nodes, by_depth))

    def _num_window_nodes(self, num_columns: int) -> int:
        return max(0, num_columns * self._num_rows - 1)

    def _add_tail(self, tree: GuessTree, root: int, tail: Sequence[int], room: int) -> None:
        """Add an n-gram of the pool, cut to the tree's room."""
        node = root
        for depth, token_id in enumerate(tail):
            if len(tree) >= room:
                return
            kind = ("pool", depth)
            node = tree.add(node, token_id, self._estimate.rate(kind, POOL_PRIOR) * tree.free(node), kind)

    def _add_window(self, tree: GuessTree, window: list[list[int]], num_columns: int) -> list[int]:
        """Add the window's first columns; return the node of each column's last cell."""
        bottoms: list[int] = []
        top = ROOT
        for column in range(num_columns):
            if column:
                top = self._add_cell(tree, top, window, 0, column)
            node = top
            for row in range(1, self._num_rows):
                node = self._add_cell(tree, node, window, row, column)
            bottoms.append(node)
        return bottoms

    def _add_cell(self, tree: GuessTree, parent: int, window: list[list[int]], row: int, column: int) -> int:
        kind = ("window", row)
        rate = self._estimate.rate(kind, WINDOW_PRIOR) * tree.free(parent)
        return tree.add(parent, window[row][column], rate, kind)
