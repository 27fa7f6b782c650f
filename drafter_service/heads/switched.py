"""Parameter switching: another set of parameters for each position of a draft.

PRISM ("Parametrically Refactoring Inference for Speculative Sampling Draft Models", arXiv 2602.01762) gives each step
of a draft parameters of its own: a draft then costs what one set costs, while all sets together hold more. Here the
sets are heads of one shape: position j of a draft is computed with set j, what is longer with the last one. They share
the cached keys and values; those of the committed tokens are set 0's, as is the first position of every draft.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafter_service.heads.head_layer import DraftHead, HeadError


class SwitchedHeads:
    """Heads by draft position; a plain head is the only one of its kind."""

    def __init__(self, heads: Sequence[DraftHead]) -> None:
        """Raises `HeadError` naming what differs between sets that have to share it."""
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
        """The set of the committed tokens, and so of the first token of each draft."""
        return self._heads[0]

    def set_index(self, draft_position: int) -> int:
        """Return which set computes the pair that predicts the draft's token at a position."""
        return min(draft_position, len(self._heads) - 1)

    def __getitem__(self, index: int) -> DraftHead:
        return self._heads[index]
