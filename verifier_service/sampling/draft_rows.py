"""Drafts as rows of numbers, sent to a device before the target has said anything, and the paths that it takes there.

A step's logits have one row after each request's root and one after each draft token. Which row follows which is known
on the host, so that nothing on the device has a shape that depends on what is accepted:

    accepted, row by row -> those whose ancestors all are -> the deepest of each request
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.verifier_service.gpu.transfers import upload
from outrider.verifier_service.messages.draft import Draft
from outrider.verifier_service.messages.tree import depths, parents_of


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRows:
    """The rows of some requests' drafts, one request's after the other's."""

    num_requests: int
    token_ids: torch.Tensor  # int64 [num_rows] the draft token that a row follows, -1: the root
    parents: torch.Tensor  # int64 [num_rows] the row that chose it; a root's is itself
    is_root: torch.Tensor  # bool [num_rows]
    requests: torch.Tensor  # int64 [num_rows] whose it is
    jumps: tuple[torch.Tensor, ...]  # each int64 [num_rows]: the row 1, 2, 4, ... tokens above
    keys: torch.Tensor  # int64 [num_rows] the larger, the deeper; of those as deep, the first is the largest

    @classmethod
    def of(cls, drafts: Sequence[Draft | None], device: torch.device, alone: Sequence[bool] = ()) -> DraftRows:
        """`alone`: whose rows count whatever their ancestors are; none: nobody's."""
        token_ids: list[int] = []
        parents: list[int] = []
        requests: list[int] = []
        levels: list[int] = []
        for request, draft in enumerate(drafts):
            start, above = len(token_ids), parents_of(draft)
            token_ids += [-1, *(() if draft is None else draft.token_ids)]
            parents += [start, *(start + parent + 1 for parent in above)]
            levels += [0, *(depth + 1 for depth in depths(above))]
            requests += [request] * (len(above) + 1)
        num_rows = len(token_ids)
        up, rows, owners = np.array(parents, np.int64), np.arange(num_rows), np.array(requests, np.int64)
        is_alone = np.array(alone, bool)[owners] if alone else np.zeros(num_rows, bool)
        jump, jumps = np.where(is_alone, rows, up), []
        for _ in range(max(max(levels, default=0) - 1, 0).bit_length()):
            jumps.append(jump)
            jump = jump[jump]
        keys = np.array(levels, np.int64) * num_rows + rows[::-1]
        first, tokens, *others = upload([up, np.array(token_ids, np.int64), owners, keys, *jumps], device)
        return cls(
            num_requests=len(drafts),
            token_ids=tokens,
            parents=first,
            is_root=tokens < 0,
            requests=others[0],
            keys=others[1],
            jumps=tuple(others[2:]),
        )

    def are_chosen(self, choices: torch.Tensor) -> torch.Tensor:
        """Say of each row whether it follows its parent's own choice: choices int64 [num_rows] -> bool [num_rows]."""
        return self.token_ids == choices[self.parents]

    def ends(self, is_right: torch.Tensor) -> torch.Tensor:
        """Return the row in which each request's path ends: int64 [num_requests].

        is_right bool [num_rows] says which draft tokens may be taken where the one before is. A path is the longest
        one of such tokens from the root on, the first of several.
        """
        num_rows = len(self.token_ids)
        if num_rows == self.num_requests:  # nobody drafts: all rows are roots
            return self.parents
        reached = is_right | self.is_root
        for jump in self.jumps:
            reached = reached & reached[jump]
        best = self.keys.new_zeros(self.num_requests).scatter_reduce(0, self.requests, self.keys * reached, "amax")
        return num_rows - 1 - best % num_rows


def found_probs(target_probs: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Look up target_probs [num_rows, vocab_size] of tokens in their rows: float64, 0 outside the vocabulary."""
    vocab_size = target_probs.shape[1]
    found = target_probs[rows, token_ids.clamp(0, vocab_size - 1)].double()
    return found.masked_fill_(token_ids >= vocab_size, 0.0)
