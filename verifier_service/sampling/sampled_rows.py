"""Unseeded requests: each draft is judged by its request's rule, then the last token of each request is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.verifier_service.gpu.transfers import upload
from outrider.verifier_service.messages.request import AcceptanceRule
from outrider.verifier_service.sampling.block_verification import Blocks
from outrider.verifier_service.sampling.draft_rows import DraftRows
from outrider.verifier_service.sampling.entries import VerificationEntry, first_rows
from outrider.verifier_service.sampling.rejection_sampler import Families, judge_siblings, last_uniforms, left_over
from outrider.verifier_service.sampling.sampler import choose
from outrider.verifier_service.sampling.typical_acceptance import TypicalRows
from outrider.verifier_service.sampling.unread import UnreadTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """The drafts of unseeded requests, each to be judged by its rule."""

    drafts: DraftRows
    families: Families | None  # None: no draft tokens that are judged by rejection or by blocks
    blocks: Blocks | None
    typical: TypicalRows | None
    uniforms: torch.Tensor  # float64 [num_rows]
    last_uniforms: torch.Tensor  # int64 [num_rows] the row whose uniform number draws the last token after each row

    @classmethod
    def of(
        cls,
        entries: Sequence[VerificationEntry],
        uniforms: np.ndarray,
        vocab_size: int,
        device: torch.device,
        unread: UnreadTokens | None = None,
    ) -> SampledRows:
        """uniforms float64 [num_rows]; an entry uses the numbers of its own rows, in the order of the references.

        `unread`: what the drafts' placeholders stand for.
        """
        assert uniforms.shape == (sum(entry.num_rows for entry in entries),), uniforms.shape
        assert uniforms.dtype == np.float64, uniforms.dtype
        drafts = [entry.draft for entry in entries]
        by_blocks = [entry.rule is AcceptanceRule.BLOCK for entry in entries]
        judged = [None if entry.rule is AcceptanceRule.TYPICAL else entry.draft for entry in entries]
        starts = first_rows(entries)
        families = Families.of(judged, starts, len(uniforms), vocab_size, device)
        if families is not None and unread is not None:
            families = families.filled(unread)
        last = [row for entry, start in zip(entries, starts, strict=True) for row in _last_uniforms(entry, start)]
        sent, last_rows = upload([uniforms, np.array(last, np.int64)], device)
        return cls(
            drafts=DraftRows.of(drafts, device, by_blocks, unread),
            families=families,
            blocks=Blocks.of(drafts, starts, by_blocks, families),
            typical=TypicalRows.of(entries, device),
            uniforms=sent,
            last_uniforms=last_rows,
        )

    def judge(self, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row in which each path ends, and the last tokens: both int64 [num_entries].

        probs float32 [num_rows, vocab_size] are the target's laws.
        """
        families, uniforms = self.families, self.uniforms
        is_right = torch.zeros_like(uniforms, dtype=torch.bool)
        if families is not None:
            found = families.found(probs)
            taken = judge_siblings(families, found, uniforms, is_right)
            if self.blocks is not None:
                self.blocks.judge(families, found, uniforms, is_right, taken)
        if self.typical is not None:
            self.typical.judge(probs, self.drafts, is_right)
        ends = self.drafts.ends(is_right)
        # without drafts each row is an end
        weights = (probs if len(ends) == len(probs) else probs.index_select(0, ends)).double()
        if families is not None:
            owners = families.of_rows[ends]
            token_ids = families.token_ids[owners].clamp(max=families.vocab_size - 1)  # nothing is taken outside
            weights = left_over(weights, token_ids, taken[owners])
        return ends, choose(weights, uniforms[self.last_uniforms[ends]])


def _last_uniforms(entry: VerificationEntry, start: int) -> list[int]:
    """Return the row whose uniform number draws the last token after each of the entry's rows."""
    if entry.rule is AcceptanceRule.BLOCK:
        return [start + entry.num_rows - 1] * entry.num_rows
    if entry.rule is AcceptanceRule.TYPICAL:
        return [start] * entry.num_rows
    return last_uniforms(entry.draft, start)
