"""What a drafter in training is made to lower, over all of its draft positions.

A draft of k tokens earns a position only if all positions before it are accepted:

    acceptance    a_i = sum(min(target, draft)) at position i, of the exact rule
    survival      S_j = a_1 * .. * a_j             tokens per verification: 1 + S_1 + .. + S_k

- `ce`: cross-entropy to the target's law, less its entropy; position k weighs 0.8**k, whatever the drafter can do.
- `tv`: total variation, 1 - a: the chance that a position is rejected; weights as of `ce` (DistillSpec,
  arXiv 2310.08461; LK losses, arXiv 2602.23881).
- `streak`: cross-entropy, position j weighted by the survival S_(j-1) of those before it, which gets no gradient: a
  position that drafts do not reach teaches little (`ce_streak` of SpecDiff-2, arXiv 2511.00606).

SpecDiff-2 takes the draft's probability of the text's token for a_i, since it trains on the verifier's tokens alone.
Here a law is at hand, and the shared mass is what the exact rule accepts, whichever token the text went on with. Where
all that is known of the target is the token that it committed, the shared mass is that very probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import torch
from torch import Tensor

from outrider.drafter_service.training.laws import Comparison, TargetLaw

POSITION_DECAY = 0.8  # weight of a draft position's loss, relative to the position before
FIRST_DRAFTED_ROW = 1  # of root 0: the first drafted token, 2, is predicted by the target's row after token 1


class Objective(StrEnum):
    """The loss of a drafter in training."""

    CE = "ce"
    TV = "tv"
    STREAK = "streak"

    def mean_loss(self, rows: Comparison, reached: Tensor | None = None) -> Tensor:
        """Return the mean loss of one position's rows, each weighted by `reached`, float32 [rows, num_rows]."""
        losses = 1.0 - rows.shared_mass() if self is Objective.TV else rows.divergence()
        return rows.mean(losses if reached is None else losses * reached)


def draft_loss(
    rows: Sequence[Tensor], law: TargetLaw, objective: Objective = Objective.CE, *, deep: Tensor | None = None
) -> Tensor:
    """Return the loss over all draft positions; `rows` are the logits of each: [rows, num_roots, draft_vocab_size].

    `deep`, int64 [num_deep]: roots of the positions after the first, if these do not have all roots.
    """
    positions = [
        law.beside(logits, FIRST_DRAFTED_ROW + position, deep if position else None)
        for position, logits in enumerate(rows)
    ]
    if objective is Objective.STREAK:
        reached = chances_to_reach(positions, deep)
        return torch.stack([objective.mean_loss(*each) for each in zip(positions, reached, strict=True)]).mean()
    weights = [POSITION_DECAY**position for position in range(len(positions))]
    losses = [weight * objective.mean_loss(each) for weight, each in zip(weights, positions, strict=True)]
    return torch.stack(losses).sum() / sum(weights)


@torch.no_grad()
def chances_to_reach(positions: Sequence[Comparison], deep: Tensor | None = None) -> list[Tensor]:
    """Return how likely a draft is accepted up to each position, itself left out: float32 [rows, num_rows] each.

    The first position is always reached; no draft gets past a row that does not count.
    """
    reached = [torch.ones_like(positions[0].entropy)]
    for position, rows in enumerate(positions[:-1]):
        survival = reached[-1] * rows.shared_mass() * rows.counted
        reached.append(survival if position or deep is None else survival[:, deep])
    return reached
