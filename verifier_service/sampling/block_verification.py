"""Block verification of chains: the same law as token by token, never fewer tokens on average (Sun et al. 2024).

Rejection sampling judges each token alone and forgets that those before it were liked far better by the target than by
the drafter. Here a prefix is kept with the probability

    kept[0] = 1,   kept[i] = min(kept[i - 1] * target_prob[i] / draft_prob[i], 1)

which is at least the product of the tokens' own. Prefixes are judged from the shortest to the whole chain, and the
longest one accepted counts (arXiv 2403.10444, algorithm 2). With the residual mass after i tokens,

    residual[i] = sum over the vocabulary of max(kept[i] * target_probs[i + 1] - draft_probs[i + 1], 0)

the prefix of i tokens is accepted with residual[i] / (residual[i] + 1 - kept[i]), the whole chain with its `kept`. The
last token is drawn from that residual law, or from the target's after the whole chain. As with rejection sampling, a
chain's length may depend on its tokens and rows so far. Point masses gain nothing and lose nothing.

Chains only, by what they were *asked* for. A sampled tree that happens to look like a chain must not be judged by
blocks: this rule leans on the laws of tokens further down, so choosing it by a shape that they decided is inexact.

Only the supports of the draft's rows are looked at: the residual's sum is kept[i] less the sum over them of
min(kept[i] * target_probs, draft_probs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.verifier_service.gpu.transfers import upload
from outrider.verifier_service.messages.draft import Draft
from outrider.verifier_service.sampling.rejection_sampler import Families


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Chains that are judged by blocks, the longest first."""

    counts: tuple[int, ...]  # [longest] how many chains, the first ones, have a token at each place
    tokens: torch.Tensor  # int64 [longest, num_chains] the row after each token
    rows: torch.Tensor  # int64 [num_tokens] the row before each token, chain by chain
    families: torch.Tensor  # int64 [num_tokens] that row's family

    @classmethod
    def of(
        cls,
        drafts: Sequence[Draft | None],
        starts: Sequence[int],
        by_blocks: Sequence[bool],
        families: Families | None,
    ) -> Blocks | None:
        """Return None if no draft is judged by blocks."""
        spans = [
            (len(draft.token_ids), start)
            for draft, start, is_block in zip(drafts, starts, by_blocks, strict=True)
            if is_block and draft is not None
        ]
        spans.sort(reverse=True)
        longest = spans[0][0] if spans else 0
        if families is None or longest == 0:
            return None
        tokens = np.zeros((longest, len(spans)), np.int64)
        for column, (length, start) in enumerate(spans):
            tokens[:length, column] = np.arange(start + 1, start + length + 1)
        rows = np.array([row for length, start in spans for row in range(start, start + length)], np.int64)
        sent_tokens, sent_rows = upload([tokens, rows], families.rows.device)
        counts = tuple(sum(length > place for length, _ in spans) for place in range(longest))
        return cls(counts=counts, tokens=sent_tokens, families=families.of_rows[sent_rows], rows=sent_rows)

    def judge(
        self,
        families: Families,
        found: torch.Tensor,
        uniforms: torch.Tensor,
        is_right: torch.Tensor,
        taken: torch.Tensor,
    ) -> None:
        """Overwrite what `judge_siblings` said of these rows: which prefixes are accepted, what is taken after them."""
        law, own_found = families.laws[0, self.families], found[self.families]
        column = families.columns[0, self.families, None]
        next_rows = self.rows + 1
        probs = found.new_zeros(2, len(uniforms))
        probs[0].index_copy_(0, next_rows, own_found.gather(1, column)[:, 0])
        probs[1].index_copy_(0, next_rows, law.gather(1, column)[:, 0])
        kept = found.new_ones(len(uniforms))
        reached = found.new_ones(self.tokens.shape[1])
        for tokens, count in zip(self.tokens.unbind(0), self.counts, strict=True):
            rows = tokens[:count]
            reached = (reached[:count] * probs[0, rows] / probs[1, rows]).clamp(max=1.0)
            kept.index_copy_(0, rows, reached)
        own_kept = kept[self.rows, None]
        residual = (own_kept - torch.minimum(own_kept * own_found, law).sum(dim=1, keepdim=True)).clamp_(min=0.0)
        accepted = kept.index_copy(0, self.rows, _acceptance(own_kept, residual)[:, 0])
        is_right.index_copy_(0, next_rows, uniforms[self.rows] < accepted[next_rows])
        # weights to draw from may have any factor: target - draft / kept is as good as kept * target - draft
        inside = families.token_ids[self.families] < families.vocab_size
        taken.index_copy_(0, self.families, (law / own_kept).masked_fill_(~inside, 0.0))


def _acceptance(kept: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    total = residual + 1.0 - kept
    return torch.where(total > 0.0, residual / total, 1.0)
