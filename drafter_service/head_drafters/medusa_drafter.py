"""Draft with Medusa heads (Cai et al. 2024): every position at once, from the target's last hidden state alone.

The heads do not see each other's guesses: at each depth every node has the same candidates. So a chain drawn from
their rows has exactly those rows as its law, and a tree is part of the Cartesian product of the heads' best tokens. Its
best nodes are found one by one with a heap; the product itself is never made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outrider.drafter_service.engine.drafter import Ask
from outrider.drafter_service.engine.row_drafts import grow_rows, start_rows
from outrider.drafter_service.engine.tree_growth import Growing, Growth, answer_of
from outrider.drafter_service.head_drafters.last_state import (
    LastStateDrafter,
    draft_depth,
    first_within,
    has_state,
    last_states,
)
from outrider.drafter_service.heads.medusa import MedusaHeads
from outrider.verifier_service.messages.draft import Draft


class MedusaDrafter(LastStateDrafter):
    """A `Drafter` over Medusa heads."""

    def __init__(self, heads: MedusaHeads, *, vocab_size: int, branching: int = 10, **rules: Any) -> None:
        """`rules` are those of `LastStateDrafter`."""
        super().__init__(vocab_size=vocab_size, branching=branching, **rules)
        if heads.token_map is not None and int(heads.token_map.min()) >= vocab_size:
            raise ValueError(f"vocab_size: no id of the heads' token_map is below {vocab_size}")
        self._heads = heads

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[Draft]:
        """Answer as many asks as fit, oldest first, by one forward of the heads over all of them.

        Drafts are no longer than there are heads. An ask without a state gets its forced tokens alone.
        """
        depths = [draft_depth(ask, self._num_guesses(ask)) for ask in asks]
        taken = asks[: first_within(depths, max_num_tokens)]
        drafts = [Growing(ask, self._start(ask), len(ask.token_ids)) for ask in taken]
        if guessing := [draft for draft in drafts if draft.growth.frontier]:
            rows = self._rows([draft.ask for draft in guessing])
            grow_rows(guessing, rows, self._rules)
        return [answer_of(draft.ask, draft.growth) for draft in drafts]

    def _num_guesses(self, ask: Ask) -> int:
        return min(ask.length, self._heads.num_heads) if has_state(ask, self._heads.hidden_size) else 0

    def _start(self, ask: Ask) -> Growth:
        return start_rows(ask, max(0, self._num_guesses(ask) - len(ask.forced_ids)), branching=self._branching)

    @torch.inference_mode()
    def _rows(self, asks: Sequence[Ask]) -> list[torch.Tensor]:
        """Return the logits after the forced tokens of each ask: float32 [num_guesses, vocab_size]."""
        states = last_states(asks, next(self._heads.parameters()))  # [num_asks, hidden_size]
        logits = self._heads(states, max(map(self._num_guesses, asks))).float()  # [num_heads, num_asks, vocab_size]
        return [logits[len(ask.forced_ids) : self._num_guesses(ask), index] for index, ask in enumerate(asks)]
