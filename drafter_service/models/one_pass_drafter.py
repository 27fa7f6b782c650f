"""Draft all positions in one pass: what drafters share whose guesses do not see each other.

A canvas (the last committed token, forced ones, masks) is laid after a cached context, and one forward gives a row for
each token to guess, from which `row_drafts` makes chains and trees. A canvas is never cached: what was guessed is no
truth, and a mask is no token.

tokens   |<- context: computed once, cached ----->| last one |<- forced ->|<- masks ->|
KV       |<- num_cached ->|<- this step's part ->|<- canvas: for one forward -------->|
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from outrider.drafter_service.engine.engine import Ask, DraftResult
from outrider.drafter_service.engine.kv_budget import num_common, reserve, share_budget
from outrider.drafter_service.engine.row_drafts import RowDrafts
from outrider.drafter_service.engine.sessions import SessionKey
from outrider.drafter_service.engine.tree_growth import DEFAULT_TREES, TreeConfig, empty_answer
from outrider.verifier_service.messages.batch import slots_of
from outrider.verifier_service.messages.draft import DraftNeeds
from outrider.verifier_service.scheduling.kv_cache import BlockPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Canvas:
    """What is computed together after the context, starting at the last committed token."""

    token_ids: list[int]
    rows: range  # the tokens of it whose logits are wanted, one for each guess; none: nothing can be guessed


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What a step computes for an ask: some of its context and, once that is complete, its canvas."""

    ask: Ask
    begin: int  # context tokens [begin, end) are computed now
    end: int
    canvas: Canvas | None
    block_table: list[int]
    num_cached: int  # slots in use before this step

    def slots(self, count: int, block_size: int) -> list[int]:
        """Return where the KV of the next `count` tokens goes."""
        return slots_of(self.block_table, range(self.num_cached, self.num_cached + count), block_size)


class OnePassModel(Protocol):
    """What computes contexts and canvases."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def needs(self) -> DraftNeeds: ...

    @property
    def pages_canvas(self) -> bool:
        """Whether a canvas takes slots of the KV pool while it is computed."""

    def context(self, ask: Ask) -> range:
        """Return the committed tokens before the last one that a context can be made of: a gap may precede them."""

    def canvas(self, ask: Ask) -> Canvas:
        """Lay out what is to be computed together."""

    def execute(self, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        """Run one forward: for each chunk with a canvas the float32 logits [num_rows, vocab_size] of its rows."""


@dataclass(slots=True)
class _State:
    """One session's cached context and its unanswered ask."""

    block_table: list[int] = field(default_factory=list)
    first: int = 0  # the context begins here: what is before it was not to be had
    cached_ids: list[int] = field(default_factory=list)  # the tokens whose KV is in the blocks
    ask: Ask | None = None
    canvas: Canvas = Canvas(token_ids=[], rows=range(0))  # of the ask
    context: range = range(0)  # of the ask

    @property
    def cached_end(self) -> int:
        return self.first + len(self.cached_ids)


class OnePassDrafter:
    """A `Drafter` over a one-pass model; many sessions in each forward."""

    def __init__(
        self,
        model: OnePassModel,
        rng: torch.Generator,
        *,
        vocab_size: int | None = None,
        top_n: int = 32,
        trees: TreeConfig = DEFAULT_TREES,
    ) -> None:
        """Propose the first `vocab_size` ids (the target's vocabulary); None: all that the model has."""
        self.vocab_size, self.max_model_len, self.needs = model.vocab_size, model.max_model_len, model.needs
        self._model = model
        self._draft_vocab_size = model.vocab_size if vocab_size is None else vocab_size
        self._drafts = RowDrafts(rng=rng, vocab_size=self._draft_vocab_size, top_n=top_n, trees=trees)
        self._pool = BlockPool(model.num_blocks, model.block_size, enable_prefix_caching=False)
        self._states: dict[SessionKey, _State] = {}  # least recently asked first

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[DraftResult]:
        """Run one forward and answer the asks whose canvas was in it; contexts come in chunks, a canvas never does.

        Where nothing can be guessed the answer is the forced tokens alone; an ask that does not fit even with the KV
        pool to itself gets an empty draft.
        """
        states = [self._state_of(ask) for ask in asks]
        if hopeless := [state for state in states if not state.canvas.rows]:
            return self._answers(hopeless, [torch.empty(0, self.vocab_size)] * len(hopeless))
        num_together = [min(len(state.canvas.token_ids), max_num_tokens) for state in states]
        num_pending = [_num_missing(state) + num for state, num in zip(states, num_together, strict=True)]
        shares = share_budget(num_pending, max_num_tokens, num_together)
        chunks: list[Chunk] = []
        scheduled: list[_State] = []
        for index, (state, share) in enumerate(zip(states, shares, strict=True)):
            chunk = self._schedule(state, share, asked=states, younger=states[index + 1 :])
            if chunk is not None:
                chunks.append(chunk)
                scheduled.append(state)
            elif index == 0:
                return [self._give_up(state)]
        return self._execute(chunks, scheduled)

    def release(self, key: SessionKey) -> None:
        state = self._states.pop(key, None)
        if state is not None:
            self._pool.release(state.block_table)

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        assert self._states.keys() <= set(keys), "KV of a session that is gone"
        self._pool.check_integrity([state.block_table for state in self._states.values()])
        for state in self._states.values():
            assert len(state.block_table) == self._pool.num_blocks_for(len(state.cached_ids)), "blocks without tokens"
            if state.ask is not None:
                known = list(state.ask.token_ids[state.first : state.cached_end])
                assert state.cached_ids == known, "KV of other tokens"

    # --- state ---

    def _state_of(self, ask: Ask) -> _State:
        """Return the session's state, rolled back to the context that its new ask shares."""
        state = self._states.setdefault(ask.key, _State())
        if state.ask is None or state.ask.ask_id != ask.ask_id:
            self._states[ask.key] = self._states.pop(ask.key)  # most recently asked
            self._begin(state, ask)
        return state

    def _begin(self, state: _State, ask: Ask) -> None:
        known = itertools.takewhile(lambda token_id: token_id < self._draft_vocab_size, ask.forced_ids[: ask.length])
        state.ask = ask = replace(ask, token_ids=list(ask.token_ids), forced_ids=tuple(known))
        state.canvas, state.context = self._model.canvas(ask), self._model.context(ask)
        shared = list(ask.token_ids[state.first : state.context.stop])
        num_kept = num_common(state.cached_ids, shared)
        can_go_on = state.context.start <= state.first + num_kept  # what comes next is to be had
        self._roll_back(state, num_kept if can_go_on else 0)

    def _roll_back(self, state: _State, num_kept: int) -> None:
        del state.cached_ids[num_kept:]
        if not num_kept:
            state.first = state.context.start
        self._pool.trim(state.block_table, num_kept)

    def _schedule(
        self, state: _State, share: int, *, asked: Sequence[_State], younger: Sequence[_State]
    ) -> Chunk | None:
        """Plan a session's part of the step in `share` tokens; None: it has to wait.

        One whose KV an older ask has just taken begins again; what that left cannot hold all of its context.
        """
        missing = _num_missing(state)
        canvas = state.canvas if share > missing else None
        num_context = min(share, missing)
        paged = len(canvas.token_ids) if canvas is not None and self._model.pages_canvas else 0
        if share == 0 or not self._reserve(state, num_context + paged, asked=asked, younger=younger):
            return None
        assert state.ask is not None
        return Chunk(
            ask=state.ask,
            begin=state.cached_end,
            end=state.cached_end + num_context,
            canvas=canvas,
            block_table=list(state.block_table),
            num_cached=len(state.cached_ids),
        )

    def _reserve(self, state: _State, num_tokens: int, *, asked: Sequence[_State], younger: Sequence[_State]) -> bool:
        return reserve(
            self._pool,
            state,
            len(state.cached_ids) + num_tokens,
            all_states=self._states.values(),
            asked=asked,
            younger=younger,
            give_up=lambda victim: self._roll_back(victim, 0),
        )

    # --- the step ---

    def _execute(self, chunks: Sequence[Chunk], states: Sequence[_State]) -> list[DraftResult]:
        rows = self._model.execute(chunks)
        complete: list[_State] = []
        for chunk, state in zip(chunks, states, strict=True):
            state.cached_ids.extend(chunk.ask.token_ids[chunk.begin : chunk.end])
            self._roll_back(state, len(state.cached_ids))  # the canvas
            if chunk.canvas is not None:
                complete.append(state)
        return self._answers(complete, rows)

    def _answers(self, states: Sequence[_State], rows: Sequence[torch.Tensor]) -> list[DraftResult]:
        asks: list[Ask] = []
        for state in states:
            assert state.ask is not None
            asks.append(state.ask)
            state.ask = None
        return self._drafts.make(asks, rows)

    def _give_up(self, state: _State) -> DraftResult:
        ask = state.ask
        assert ask is not None
        self.release(ask.key)
        return empty_answer(ask)


def _num_missing(state: _State) -> int:
    """Count the context tokens that are not cached yet."""
    return max(0, state.context.stop - state.cached_end)
