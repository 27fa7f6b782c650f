"""Draft with a head over the target's hidden states: EAGLE-1, EAGLE-3 and MTP, chains and trees.

The head computes pairs (state of token i, token i+1) at position i. A pair of committed tokens begins from the target's
state, so after each verification its KV is the target's truth. Pairs beyond begin from the head's own states, and their
KV is scratch that ends with the draft. A session whose first states are gone (marked by NaN) begins after the gap: its
positions stay absolute, and its KV holds what there is.

Running ahead, the head's own states stand for those of the tokens that are being verified. A branch answers at once.
The target's states come with the ask that the branch answers, and are taken in afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from outrider.drafter_service.engine.chain_levels import ChainBatches, ChainLevels
from outrider.drafter_service.engine.draft_sampler import select_rows
from outrider.drafter_service.engine.drafter import Ask, ChainsLaunched
from outrider.drafter_service.engine.paged_drafter import Follow
from outrider.drafter_service.engine.paged_state import Step
from outrider.drafter_service.engine.placeholders import Placeholder, pack_placeholders
from outrider.drafter_service.engine.tree_growth import (
    DraftRules,
    Growing,
    Growth,
    Levels,
    start_growth,
)
from outrider.drafter_service.head_drafters.head_batch import (
    HeadChunk,
    HeadState,
    is_missing,
    num_usable_states,
    pack_pairs,
)
from outrider.drafter_service.head_drafters.head_runner import HeadRows, HeadRunner
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.columns import Int64s
from outrider.verifier_service.messages.counts import GraphCounts
from outrider.verifier_service.messages.draft import ROOT, DraftNeeds


class HeadForward:
    """A `Forward` over a head: one forward for each parameter set in use."""

    def __init__(self, runner: HeadRunner, rules: DraftRules) -> None:
        self.num_forwards = 0
        self.graph_counts: GraphCounts | None = runner.graph_counts
        self.needs = DraftNeeds(taps=runner.heads.first.taps)
        self.vocab_size, self.max_model_len = runner.vocab_size, runner.max_model_len
        self.num_blocks, self.block_size = runner.num_blocks, runner.block_size
        self._runner = runner
        self._rules = rules
        self._is_switched = len(runner.heads) > 1

    def can_draft(self, ask: Ask) -> bool:
        """Return whether the last of the target's states is there, and as wide as the head reads."""
        if ask.states is None or ask.states.shape[1] != self._runner.state_size:
            return False
        num_states = num_usable_states(ask)
        return num_states >= 1 and not is_missing(ask.states, num_states - 1)

    def new_state(self) -> HeadState:
        return HeadState()

    def begin(self, state: HeadState, ask: Ask, *, max_num_tokens: int, growth: Growth | None) -> None:
        """As in `Forward`; each parameter set has its position, so several of them draft a chain."""
        shaped = ask
        if ask.max_nodes and self._is_switched:
            shaped = replace(ask, length=min(ask.length, ask.max_nodes), max_nodes=0)
        if growth is None:  # nodes beside each other are computed in one step
            growth = start_growth(
                shaped, self._rules.trees, vocab_size=self._rules.vocab_size, max_nodes=max_num_tokens
            )
        state.begin(ask, growth)

    def run(self, step: Step[HeadState], follow: Follow[HeadState]) -> None:
        levels = Levels(self._rules)
        chunks = [self._chunk(state, share) for state, share in step.parts]
        growing: list[HeadState] = []
        copies = step.copy_sources, step.copy_targets  # before the first forward
        for set_index in sorted({chunk.set_index for chunk in chunks}):
            of_set = [chunk for chunk in chunks if chunk.set_index == set_index]
            growing += self._run_set(of_set, set_index, copies, levels)
            copies = [], []
        num_following = [0] * len(growing)
        if not self._is_switched:
            num_following = follow(growing)
            levels.follow(_drafts_of(growing), num_following, partial(self._run_open, growing))
        levels.read()
        for state, num_followed in zip(growing, num_following, strict=True):
            state.num_stem += num_followed

    def take_tokens(self, states: Sequence[HeadState], asks: Sequence[Ask]) -> tuple[int, Int64s] | None:
        """As in `ChainsForward`; not for several parameter sets, nor where states are missing at the end."""
        if self._is_switched or not all(map(self.can_draft, asks)):
            return None
        for state, ask in zip(states, asks, strict=True):
            state.begin(ask, None)
            state.settle()
        if any(state.num_states < len(state.tokens) - 1 for state in states):
            return None
        num_pending = sum(state.num_states - state.num_true for state in states)
        slots = [state.num_states - state.first + ask.length - 1 for state, ask in zip(states, asks, strict=True)]
        return num_pending, np.array(slots, np.int64)

    def run_chains(self, states: Sequence[HeadState], asks: Sequence[Ask], lengths: Int64s) -> ChainsLaunched:
        firsts = np.array([state.first for state in states], np.int64)
        begins = np.array([state.num_true for state in states], np.int64)
        ends = np.array([state.num_states for state in states], np.int64)
        tables, num_levels = [state.block_table for state in states], int(lengths.max())
        batches = ChainBatches(tables, begins - firsts, ends - firsts, num_levels, self.block_size, firsts)
        parts = zip((ask.states for ask in asks), begins.tolist(), ends.tolist(), strict=True)
        given = [states_[begin:end] for states_, begin, end in parts if states_ is not None]
        hidden = self._runner.combine(torch.cat(given))

        def forward(batch: ScheduledBatch, numbers: torch.Tensor | None, wanted: Int64s | None) -> torch.Tensor:
            nonlocal hidden
            if wanted is not None:
                hidden = select_rows(hidden, wanted.tolist())
            logits, hidden = self._runner.execute(batch, hidden, chosen=numbers)
            return logits

        levels = ChainLevels([ask.sampling for ask in asks], ends + 1, lengths, self._rules)
        token_ids = [token_id for state in states for token_id in state.tokens[state.num_true + 1 :]]
        launched = levels.grow(batches, token_ids, forward)
        self.num_forwards += num_levels
        for state in states:
            state.num_true = state.num_cached = state.num_states
        return launched

    def _chunk(self, state: HeadState, share: int) -> HeadChunk:
        nodes = state.next_nodes()
        draft_position = state.draft.tree.depths[nodes[-1]] + 1 if nodes else 0
        set_index = self._runner.heads.set_index(draft_position)
        return HeadChunk(state=state, num_tokens=share, nodes=nodes, set_index=set_index)

    def _run_set(
        self, chunks: Sequence[HeadChunk], set_index: int, copies: tuple[list[int], list[int]], levels: Levels
    ) -> list[HeadState]:
        """Run one forward; return the states whose frontiers have their outputs, and were launched as a level."""
        outlets = [chunk.outlets for chunk in chunks]
        batch = pack_pairs(chunks, self.block_size)
        batch = replace(batch, copy_sources=copies[0], copy_targets=copies[1])
        self.num_forwards += 1
        rows = self._runner.execute(batch, self._hidden(chunks), set_index)
        feedback = iter(rows.feedback)
        for chunk, nodes in zip(chunks, outlets, strict=True):
            chunk.state.feedback |= {node: next(feedback) for node in nodes}
            chunk.keep()
        return self._launch(chunks, outlets, rows, levels)

    def _run_open(
        self, states: Sequence[HeadState], opened: dict[int, int], numbers: torch.Tensor, num_open: int
    ) -> torch.Tensor:
        """Run one forward of the pairs of the states' placeholders; see `PlaceholderForward`."""
        tokens: list[Placeholder] = []
        hidden: list[torch.Tensor] = []
        nodes = {index: len(states[index].draft.tree) + num_open for index in opened}
        for index, token_id in opened.items():
            state, node = states[index], nodes[index]
            place = state.num_slots + num_open
            tokens.append(Placeholder(token_id, state.num_cached + node, state.block_table, place))
            hidden.append(state.feedback[node - 1 if node else ROOT])
        self.num_forwards += 1
        found = self._runner.execute(pack_placeholders(tokens, self.block_size), torch.stack(hidden), chosen=numbers)
        for (index, node), own in zip(nodes.items(), found.feedback, strict=True):
            states[index].feedback[node] = own
        return found.logits

    def _hidden(self, chunks: Sequence[HeadChunk]) -> torch.Tensor:
        """Join the states that the pairs start from: [num_tokens, hidden_size]."""
        given = [chunk.target_states for chunk in chunks if chunk.starts_from_target]
        combined = iter(self._runner.combine(torch.cat(given)).split([len(part) for part in given]) if given else ())
        return torch.cat([next(combined) if chunk.starts_from_target else chunk.own_states for chunk in chunks])

    def _launch(
        self, chunks: Sequence[HeadChunk], outlets: Sequence[list[int]], rows: HeadRows, levels: Levels
    ) -> list[HeadState]:
        """Choose children for every frontier that has its outputs."""
        growing: list[HeadState] = []
        wanted: list[int] = []  # rows
        base = 0
        for chunk, nodes in zip(chunks, outlets, strict=True):
            if nodes == chunk.state.draft.frontier and not chunk.state.is_catching_up:
                growing.append(chunk.state)
                wanted += range(base, base + len(nodes))
            base += len(nodes)
        if growing:
            levels.launch(_drafts_of(growing), select_rows(rows.logits, wanted))
        return growing


def _drafts_of(states: Sequence[HeadState]) -> list[Growing]:
    return [Growing(state.asked, state.draft, len(state.tokens)) for state in states]
