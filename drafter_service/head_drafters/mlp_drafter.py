"""Draft with an MLP speculator (Wertheimer et al. 2024): a recurrence from the target's last hidden state.

Unlike Medusa's heads every step sees the token chosen before it. A level of all asks is one forward: for chains the
last token of each, for trees the beam that `BestFirstGrowth` keeps. A node is read with the state that it was predicted
from, so siblings share theirs.

level     0                1                       2
reads     last committed   its children            …   token
          target's state   what they came from     …   state
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from outrider.drafter_service.engine.draft_sampler import Children, launch_children, read_children
from outrider.drafter_service.engine.drafter import Ask, SessionKey
from outrider.drafter_service.engine.tree_growth import BestFirstGrowth, Growth, answer_of, chain_growth
from outrider.drafter_service.head_drafters.last_state import (
    LAST_STATE_NEEDS,
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


class MlpDrafter:
    """A `Drafter` that keeps nothing between two asks."""

    def __init__(
        self,
        speculator: MlpSpeculator,
        *,
        vocab_size: int,
        max_model_len: int,
        rng: torch.Generator,
        top_n: int = 32,
        branching: int = 4,
    ) -> None:
        """Propose ids below `vocab_size`, the target's; the speculator may know fewer or (padding) more.

        Rows on the wire have `top_n` tokens; a node of a tree has at most `branching` children.
        """
        if min(vocab_size, top_n, branching) < 1:
            raise ValueError("vocab_size, top_n and branching must be positive")
        self._speculator = speculator
        self._rng = rng
        self.vocab_size, self.max_model_len, self.needs = vocab_size, max_model_len, LAST_STATE_NEEDS
        self._top_n, self._branching = top_n, branching

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

    def release(self, key: SessionKey) -> None:
        """Do nothing: nothing is kept."""

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        """Do nothing: nothing is kept."""

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
            self._add_children([draft for draft in drafts if level >= draft.num_forced], logits.float(), level)

    def _add_children(self, drafts: Sequence[_Draft], logits: torch.Tensor, level: int) -> None:
        """Give the nodes that a level has read their children: logits [num_reads, vocab_size]."""
        for is_drawn in (True, False):
            growing = [draft for draft in drafts if draft.growth.is_drawn == is_drawn and draft.growth.frontier]
            if not growing:
                continue
            reads = [(draft, node) for draft in growing for node in draft.growth.frontier]
            found = launch_children(
                logits[upload_rows([draft.rows[node] for draft, node in reads], logits.device)],
                [draft.ask.sampling for draft, _ in reads],
                [len(draft.ask.token_ids) + level for draft, _ in reads],
                self._rng,
                vocab_size=self.vocab_size,
                num_children=max(draft.growth.num_children for draft in growing),
                top_n=self._top_n,
                sampled=is_drawn,
            )
            _hand_out(growing, read_children(found))


def _hand_out(drafts: Sequence[_Draft], found: Sequence[Children]) -> None:
    """Divide the children of all frontiers, one after another, among their drafts."""
    begin = 0
    for draft in drafts:
        end = begin + len(draft.growth.frontier)
        draft.growth.grow(found[begin:end])
        begin = end
