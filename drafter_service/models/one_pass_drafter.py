"""Draft all positions in one forward: guesses do not see each other.

A canvas (the last committed token, forced tokens, masks) follows a cached context. One forward gives a row for each
token to guess, and `row_drafts` makes chains and trees of the rows. A canvas is never cached: it is guesses and masks.

tokens   |<- context: computed once, cached ----->| last one |<- forced ->|<- masks ->|
KV       |<- num_cached ->|<- this step's part ->|<- canvas: for one forward -------->|
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from outrider.drafter_service.engine.chain_levels import ChainLevels
from outrider.drafter_service.engine.draft_sampler import select_rows
from outrider.drafter_service.engine.drafter import Ask, ChainsLaunched
from outrider.drafter_service.engine.kv_budget import num_common
from outrider.drafter_service.engine.paged_drafter import Follow, PagedModel
from outrider.drafter_service.engine.paged_state import PagedState, Step
from outrider.drafter_service.engine.row_drafts import Edges, grow_rows, start_rows
from outrider.drafter_service.engine.tree_growth import DraftRules, Growing, Growth
from outrider.verifier_service.gpu.transfers import upload_rows
from outrider.verifier_service.messages.batch import slots_of
from outrider.verifier_service.messages.columns import Int64s, starts_of
from outrider.verifier_service.messages.counts import GraphCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Canvas:
    """The tokens that are computed together after the context, from the last committed one on."""

    token_ids: list[int]
    rows: range  # the canvas tokens whose logits are wanted, one for each guess; empty: nothing can be guessed


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What a step computes for an ask: some of its context and, once that is complete, its canvas."""

    ask: Ask
    begin: int  # context tokens [begin, end) are computed now
    end: int
    canvas: Canvas | None
    block_table: list[int]
    num_cached: int  # slots in use before this step

    def slots(self, count: int, block_size: int) -> Sequence[int]:
        """Return where the KV of the next `count` tokens goes."""
        return slots_of(self.block_table, range(self.num_cached, self.num_cached + count), block_size)


class OnePassModel(PagedModel, Protocol):
    """A model that computes contexts and canvases."""

    @property
    def pages_canvas(self) -> bool:
        """Whether a canvas takes slots of the KV pool while it is computed."""

    @property
    def edges(self) -> Edges | None:
        """What a row's law is once the token before it is known; None: rows are laws."""

    def context(self, ask: Ask) -> range:
        """Return the committed tokens that a context can be made of, all before the last; a gap may precede them."""

    def canvas(self, ask: Ask) -> Canvas:
        """Lay out an ask's canvas."""

    def execute(self, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        """Run one forward: for each chunk with a canvas the float32 logits [num_rows, vocab_size] of its rows.

        With `edges`: what those read of the rows, [num_rows, width].
        """


@dataclass(slots=True)
class CanvasState(PagedState):
    """A session's cached context, and the canvas of its ask."""

    first: int = 0  # token at which the context begins: the model cannot compute those before it
    cached_ids: list[int] = field(default_factory=list)  # the tokens whose KV is in the blocks
    canvas: Canvas = Canvas(token_ids=[], rows=range(0))  # of the ask
    context: range = range(0)  # of the ask
    num_together: int = 0  # tokens of a step that the canvas takes
    num_canvas_slots: int = 0  # that the canvas takes while it is computed

    @property
    def cached_end(self) -> int:
        return self.first + len(self.cached_ids)

    @property
    def num_missing(self) -> int:
        """Count the context tokens that are not cached yet."""
        return max(0, self.context.stop - self.cached_end)

    @property
    def num_slots(self) -> int:
        return len(self.cached_ids)

    def num_slots_after(self, share: int) -> int:
        missing = self.num_missing
        return len(self.cached_ids) + min(share, missing) + self.num_canvas_slots * (share > missing)

    @property
    def num_pending(self) -> int:
        return self.num_missing + self.num_together

    def roll_back(self, num_kept: int) -> None:
        """Keep the KV of the first `num_kept` context tokens."""
        del self.cached_ids[num_kept:]
        if not num_kept:
            self.first = self.context.start

    def lose_kv(self) -> None:
        self.roll_back(0)

    def chunk(self, ask: Ask, share: int) -> Chunk:
        """Return what `share` of an ask's pending tokens are: the canvas comes once the context is complete."""
        begin, missing = self.cached_end, self.num_missing
        return Chunk(
            ask=ask,
            begin=begin,
            end=begin + min(share, missing),
            canvas=self.canvas if share > missing else None,
            block_table=list(self.block_table),
            num_cached=len(self.cached_ids),
        )

    def check_integrity(self) -> None:
        if self.ask is not None:
            known = list(self.ask.token_ids[self.first : self.cached_end])
            assert self.cached_ids == known, "KV of other tokens"


class CanvasForward:
    """A `Forward` over a one-pass model."""

    def __init__(self, model: OnePassModel, rules: DraftRules) -> None:
        self.num_forwards = 0
        self.graph_counts: GraphCounts | None = None
        self.vocab_size, self.max_model_len, self.needs = model.vocab_size, model.max_model_len, model.needs
        self.num_blocks, self.block_size = model.num_blocks, model.block_size
        self._model = model
        self._rules = rules

    def can_draft(self, ask: Ask) -> bool:
        return True  # where nothing can be guessed, the forced tokens alone are the draft

    def new_state(self) -> CanvasState:
        return CanvasState()

    def begin(self, state: CanvasState, ask: Ask, *, max_num_tokens: int, growth: Growth | None) -> None:
        assert growth is None, "a canvas is drafted at once: nobody starts its draft elsewhere"
        known = itertools.takewhile(lambda token_id: token_id < self._rules.vocab_size, ask.forced_ids[: ask.length])
        state.ask = ask = replace(ask, token_ids=list(ask.token_ids), forced_ids=tuple(known))
        self._lay_out(state, ask, max_num_tokens)
        state.growth = start_rows(
            ask, len(state.canvas.rows), trees=self._rules.trees, has_edges=self._model.edges is not None
        )

    def _lay_out(self, state: CanvasState, ask: Ask, max_num_tokens: int) -> None:
        """Give a state an ask's canvas, and roll it back to what the ask has in common with it."""
        state.canvas, state.context = self._model.canvas(ask), self._model.context(ask)
        num_tokens = len(state.canvas.token_ids)
        state.num_together = min(num_tokens, max_num_tokens)
        state.num_canvas_slots = num_tokens if self._model.pages_canvas else 0
        num_kept = num_common(state.cached_ids, ask.token_ids[state.first : state.context.stop])
        can_go_on = state.context.start <= state.first + num_kept  # the model can compute the token after those kept
        state.roll_back(num_kept if can_go_on else 0)

    def run(self, step: Step[CanvasState], follow: Follow[CanvasState]) -> None:
        chunks, rows = self._compute([(state, state.asked, share) for state, share in step.parts])
        ready = [state for state, chunk in zip(step.states, chunks, strict=True) if chunk.canvas is not None]
        drafts = [Growing(state.asked, state.draft, len(state.asked.token_ids)) for state in ready]
        grow_rows(drafts, rows, self._rules, self._model.edges)

    def take_tokens(self, states: Sequence[CanvasState], asks: Sequence[Ask]) -> tuple[int, Int64s] | None:
        """As in `ChainsForward`; not where a chain is longer than its canvas."""
        for state, ask in zip(states, asks, strict=True):
            self._lay_out(state, ask, sys.maxsize)
        are_whole = all(len(state.canvas.rows) == ask.length for state, ask in zip(states, asks, strict=True))
        pending = [state.num_pending for state in states]
        slots = [state.num_slots_after(count) for state, count in zip(states, pending, strict=True)]
        return (sum(pending), np.array(slots, np.int64)) if are_whole else None

    def run_chains(self, states: Sequence[CanvasState], asks: Sequence[Ask], lengths: Int64s) -> ChainsLaunched:
        _, rows = self._compute([(state, ask, state.num_pending) for state, ask in zip(states, asks, strict=True)])
        positions = np.array([len(ask.token_ids) for ask in asks], np.int64)
        levels = ChainLevels([ask.sampling for ask in asks], positions, lengths, self._rules)
        found, edges, starts = torch.cat(rows), self._model.edges, starts_of(lengths)
        if edges is None:
            return levels.guess(found)

        def law(chains: Int64s, level: int, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            return edges(select_rows(found, (starts[chains] + level).tolist()), previous)

        return levels.along(law, upload_rows([ask.token_ids[-1] for ask in asks], found.device))

    def _compute(self, parts: Sequence[tuple[CanvasState, Ask, int]]) -> tuple[list[Chunk], list[torch.Tensor]]:
        """Run one forward over a share of each ask's pending tokens; return it, and the rows of its canvases."""
        chunks = [state.chunk(ask, share) for state, ask, share in parts]
        self.num_forwards += 1
        rows = self._model.execute(chunks)
        for (state, *_), chunk in zip(parts, chunks, strict=True):
            state.cached_ids.extend(chunk.ask.token_ids[chunk.begin : chunk.end])
        return chunks, rows
