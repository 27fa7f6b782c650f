"""Draft with an MLP speculator (Wertheimer et al. 2024): a recurrence from the target's last hidden state.

Unlike Medusa's heads every step sees the token chosen before it. A level of all asks is one forward: for chains the
last token of each, for trees the beam that `BestFirstGrowth` keeps. A node is read with the state that it was predicted
from, so siblings share theirs.

level     0                1                       2
reads     last committed   its children            …   token
          target's state   what they came from     …   state
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from outrider.drafter_service.engine.drafter import Ask
from outrider.drafter_service.engine.tree_growth import (
    BestFirstGrowth,
    Growing,
    Growth,
    Levels,
    answer_of,
    chain_growth,
)
from outrider.drafter_service.head_drafters.last_state import (
    LastStateDrafter,
    draft_depth,
    first_within,
    has_state,
    last_states,
)
from outrider.drafter_service.heads.mlp_speculator import MlpSpeculator
from outrider.verifier_service.gpu.transfers import upload_rows
from outrider.verifier_service.messages.draft import ROOT, Draft


@dataclass(slots=True)
class _Draft:
    """A draft in the making."""

    ask: Ask
    growth: Growth
    first_row: int = 0  # of its ask among the target's states
    rows: dict[int, int] = field(default_factory=dict)  # of the nodes that were read, among their level's new states

    @property
    def num_forced(self) -> int:
        return min(len(self.ask.forced_ids), self.ask.length)

    def nodes_at(self, level: int) -> list[int]:
        """Return the nodes to be read at a level: the next forced token's parent, then those that want children."""
        if not self.growth.frontier:
            return []
        return [level - 1] if level < self.num_forced else self.growth.frontier  # node -1 is ROOT

    def token_of(self, node: int) -> int:
        return self.ask.token_ids[-1] if node == ROOT else self.growth.tree.token_ids[node]

    def row_for(self, node: int) -> int:
        """Say where the state lies that a node is read with."""
        return self.first_row if node == ROOT else self.rows[self.growth.tree.parents[node]]


class MlpDrafter(LastStateDrafter):
    """A `Drafter` over an MLP speculator."""

    def __init__(self, speculator: MlpSpeculator, *, branching: int = 4, **rules: Any) -> None:
        """`rules` are those of `LastStateDrafter`."""
        super().__init__(branching=branching, **rules)
        self._speculator = speculator

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[Draft]:
        """Answer as many asks as fit, oldest first, level by level, each level of all of them in one forward.

        Drafts are no longer than the speculator has steps. An ask without a state, or whose last token the speculator
        does not know, gets its forced tokens alone.
        """
        depths = [draft_depth(ask, self._num_guesses(ask)) for ask in asks]
        sizes = [max(depth, ask.max_nodes) for ask, depth in zip(asks, depths, strict=True)]
        taken = asks[: first_within(sizes, max_num_tokens)]
        drafts = [_Draft(ask, self._growth(ask, depth)) for ask, depth in zip(taken, depths, strict=False)]
        self._grow([draft for draft in drafts if draft.growth.frontier])
        return [answer_of(draft.ask, draft.growth) for draft in drafts]

    def _num_guesses(self, ask: Ask) -> int:
        is_known = max((ask.token_ids[-1], *ask.forced_ids)) < self._speculator.vocab_size
        return self._speculator.n_predict if is_known and has_state(ask, self._speculator.emb_dim) else 0

    def _growth(self, ask: Ask, depth: int) -> Growth:
        if not ask.max_nodes or not depth:
            return chain_growth(ask, depth)
        return BestFirstGrowth(ask.forced_ids, depth=depth, max_nodes=ask.max_nodes, branching=self._branching)

    @torch.inference_mode()
    def _grow(self, drafts: Sequence[_Draft]) -> None:
        """Complete the drafts."""
        if not drafts:
            return
        weight = next(self._speculator.parameters())
        states = self._speculator.start(last_states([draft.ask for draft in drafts], weight))  # [num_drafts, emb_dim]
        for row, draft in enumerate(drafts):
            draft.first_row = row
        for level in range(self._speculator.n_predict):
            reads = [(draft, node) for draft in drafts for node in draft.nodes_at(level)]
            if not reads:
                return
            rows = upload_rows([draft.row_for(node) for draft, node in reads], states.device)
            token_ids = upload_rows([draft.token_of(node) for draft, node in reads], states.device)
            # [num_reads, vocab_size], [num_reads, inner_dim]
            logits, states = self._speculator.step(level, states[rows], token_ids)
            for row, (draft, node) in enumerate(reads):
                draft.rows[node] = row
            self._add_children([draft for draft in drafts if level >= draft.num_forced], logits.float())

    def _add_children(self, drafts: Sequence[_Draft], logits: torch.Tensor) -> None:
        """Give the nodes that a level has read their children: logits [num_reads, vocab_size]."""
        growing = [draft for draft in drafts if draft.growth.frontier]
        if not growing:
            return
        rows = upload_rows([draft.rows[node] for draft in growing for node in draft.growth.frontier], logits.device)
        levels = Levels(self._rules)
        levels.launch([Growing(draft.ask, draft.growth, len(draft.ask.token_ids)) for draft in growing], logits[rows])
        levels.read()
