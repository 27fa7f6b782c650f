"""Parameter switching: a set of parameters per draft position.

PRISM ("Parametrically Refactoring Inference for Speculative Sampling Draft Models", arXiv 2602.01762) gives each draft
step its own parameters: more capacity at the cost of one set. Here the sets are heads of one shape: draft position j
uses set j, or the last set if there is none. The sets share the KV cache; KV of committed tokens is computed by set 0,
which also drafts the first position.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafter_service.heads.head_layer import DraftHead, HeadError


class SwitchedHeads:
    """Heads by draft position; a plain head is a single set."""

    def __init__(self, heads: Sequence[DraftHead]) -> None:
        """Raises `HeadError` naming a field that differs between sets but must be shared."""
        if not heads:
            raise HeadError("parameter sets: there must be one at least")
        self._heads = tuple(heads)
        for index, head in enumerate(heads):
            for name in ("vocab_size", "hidden_size", "layer_shape", "taps", "state_size", "max_positions"):
                first, own = getattr(heads[0], name), getattr(head, name)
                if first != own:
                    raise HeadError(f"{name}: {own} in parameter set {index}, {first} in set 0")

    def __len__(self) -> int:
        return len(self._heads)

    @property
    def first(self) -> DraftHead:
        """The set for committed tokens, and so for the first token of each draft."""
        return self._heads[0]

    def set_index(self, draft_position: int) -> int:
        """Return the index of the set that predicts a draft position."""
        return min(draft_position, len(self._heads) - 1)

    def __getitem__(self, index: int) -> DraftHead:
        return self._heads[index]
