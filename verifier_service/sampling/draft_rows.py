"""Drafts as rows of numbers on the logits' device, and the paths through them that the target takes.

A step's logits have one row after each request's root and one after each draft token. The host knows which row follows
which, so no shape on the device depends on what is accepted:

    each row: is its token right? -> rows whose ancestors are right, too -> the deepest such row of each request
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.verifier_service.gpu.transfers import upload
from outrider.verifier_service.messages.draft import Draft
from outrider.verifier_service.messages.tree import depths
from outrider.verifier_service.sampling.unread import UnreadTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRows:
    """The rows of some requests' drafts, one request after the other."""

    num_requests: int
    token_ids: torch.Tensor  # int64 [num_rows] the draft token that a row follows; -1: the root
    parents: torch.Tensor  # int64 [num_rows] the row before that token; a root is its own parent
    is_root: torch.Tensor  # bool [num_rows]
    requests: torch.Tensor  # int64 [num_rows] the request that a row is of
    jumps: tuple[torch.Tensor, ...]  # each int64 [num_rows]: the row 1, 2, 4, ... tokens above
    keys: torch.Tensor  # int64 [num_rows] deeper rows have larger keys; of equally deep rows the first has the largest

    @classmethod
    def of(
        cls,
        drafts: Sequence[Draft | None],
        device: torch.device,
        alone: Sequence[bool] = (),
        unread: UnreadTokens | None = None,
    ) -> DraftRows:
        """`alone`: the requests whose rows count even if their ancestors are wrong; empty: none of them.

        `unread`: what the drafts' placeholders stand for.
        """
        token_ids: list[int] = []
        counts: list[int] = []  # rows of each request
        for draft in drafts:
            token_ids.append(-1)
            if draft is not None:
                token_ids.extend(draft.token_ids)
            counts.append(1 if draft is None else 1 + len(draft.token_ids))
        num_rows = len(token_ids)
        rows, owners = np.arange(num_rows), np.repeat(np.arange(len(drafts)), counts)
        starts = np.cumsum(counts) - counts
        levels = rows - starts[owners]  # of chains, and their parents; trees have their own
        up = np.maximum(rows - 1, starts[owners])
        for start, draft in zip(starts.tolist(), drafts, strict=True):
            if draft is not None and draft.parents is not None:
                own = slice(start + 1, start + 1 + len(draft.parents))
                up[own], levels[own] = np.array(draft.parents) + start + 1, np.array(depths(draft.parents)) + 1
        is_alone = np.array(alone, bool)[owners] if alone else np.zeros(num_rows, bool)
        jump, jumps = np.where(is_alone, rows, up), []
        for _ in range(max(int(levels.max(initial=0)) - 1, 0).bit_length()):
            jumps.append(jump)
            jump = jump[jump]
        keys = levels * num_rows + rows[::-1]
        first, tokens, *others = upload([up, np.array(token_ids, np.int64), owners, keys, *jumps], device)
        is_root = first == torch.arange(num_rows, device=device)
        return cls(
            num_requests=len(drafts),
            token_ids=tokens if unread is None else unread.fill(tokens).masked_fill_(is_root, -1),
            parents=first,
            is_root=is_root,
            requests=others[0],
            keys=others[1],
            jumps=tuple(others[2:]),
        )

    def are_chosen(self, choices: torch.Tensor) -> torch.Tensor:
        """Say of each row whether it follows its parent's own choice: choices int64 [num_rows] -> bool [num_rows]."""
        return self.token_ids == choices[self.parents]

    def ends(self, is_right: torch.Tensor) -> torch.Tensor:
        """Return the row in which each request's path ends: int64 [num_requests].

        is_right bool [num_rows] says which draft tokens are taken if their parent is. The path of a request is its
        longest one of such tokens, from the root on; of several the first.
        """
        num_rows = len(self.token_ids)
        if num_rows == self.num_requests:  # no drafts: all rows are roots
            return self.parents
        reached = is_right | self.is_root
        for jump in self.jumps:
            reached = reached & reached[jump]
        best = self.keys.new_zeros(self.num_requests).scatter_reduce(0, self.requests, self.keys * reached, "amax")
        return num_rows - 1 - best % num_rows


def found_probs(target_probs: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Look up the tokens of some rows in target_probs [num_rows, vocab_size]: float64, 0 outside the vocabulary."""
    vocab_size = target_probs.shape[1]
    found = target_probs[rows, token_ids.clamp(0, vocab_size - 1)].double()
    return found.masked_fill_(token_ids >= vocab_size, 0.0)
