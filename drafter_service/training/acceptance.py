"""A student's acceptance by draft position, on held-out text.

A root counts if all of its positions count. Its earlier draft tokens are the text's (teacher forcing), so that one
forward gives the rows of all positions.

- `greedy`: the drafter's likeliest token is the target's.
- `chain`: the same, at this and every earlier position of the root.
- `rejection`: the acceptance probability of rejection sampling, sum(min(target_probs, draft_probs)) = 1 - total
  variation distance (Leviathan et al., 2023).

The figure of a served drafter differs: `served.py` measures it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from outrider.drafter_service.training.corpus_windows import Windows
from outrider.drafter_service.training.objectives import FIRST_DRAFTED_ROW
from outrider.drafter_service.training.student import TaughtStudent


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionFigures:
    """Mean acceptance at one draft position, over all roots."""

    position: int
    greedy: float
    chain: float
    rejection: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceFigures:
    """Acceptance on held-out text."""

    num_roots: int
    positions: tuple[PositionFigures, ...]
    greedy_length: float  # mean acceptance length, bonus token included: 1 + sum of `chain`
    rejection_length: float  # the same at temperature 1: 1 + sum of the mean running products of shared mass

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@torch.no_grad()
def measure_acceptance(student: TaughtStudent, batches: Iterable[Windows]) -> AcceptanceFigures:
    """Measure a student in full precision on held-out windows. Raises `ValueError` if no root counts."""
    agreements: list[Tensor] = []
    shares: list[Tensor] = []
    for windows in batches:
        agreed, shared = _compare(student, windows)  # [num_positions, num_roots] each
        agreements.append(agreed)
        shares.append(shared)
    agreed, shared = torch.cat(agreements, dim=1), torch.cat(shares, dim=1)
    if agreed.shape[1] == 0:
        raise ValueError("--held-out: no answer in it is as long as a draft")
    chain, running = agreed.cumprod(dim=0), shared.cumprod(dim=0)
    return AcceptanceFigures(
        num_roots=agreed.shape[1],
        positions=tuple(
            PositionFigures(position=position, greedy=greedy, chain=chained, rejection=rejection)
            for position, (greedy, chained, rejection) in enumerate(
                zip(_means(agreed), _means(chain), _means(shared), strict=True)
            )
        ),
        greedy_length=1 + math.fsum(_means(chain)),
        rejection_length=1 + math.fsum(_means(running)),
    )


def _means(figures: Tensor) -> Sequence[float]:
    means: list[float] = figures.mean(dim=1).tolist()
    return means


def _compare(student: TaughtStudent, windows: Windows) -> tuple[Tensor, Tensor]:
    """Return agreement and shared mass, float32 [num_positions, num_roots] each; roots of all rows are flattened."""
    lesson = student.teacher.lesson(windows.token_ids, windows.counted)
    agreements: list[Tensor] = []
    shares: list[Tensor] = []
    counted: list[Tensor] = []
    whole_logits = lesson.logits()
    for position, draft_logits in enumerate(student.position_logits(lesson)):
        start = FIRST_DRAFTED_ROW + position
        target_logits = whole_logits[:, start : start + draft_logits.shape[1]]
        draft_logits = draft_logits[..., : target_logits.shape[-1]]
        likeliest = draft_logits.argmax(-1)  # [rows, num_roots]
        target_probs = target_logits.softmax(-1)
        if student.vocab_ids is not None:
            likeliest, target_probs = student.vocab_ids[likeliest], target_probs[..., student.vocab_ids]
        agreements.append((likeliest == target_logits.argmax(-1)).float().flatten())
        shares.append(torch.minimum(draft_logits.float().softmax(-1), target_probs).sum(-1).flatten())
        counted.append(lesson.counted[:, start : start + draft_logits.shape[1]].flatten())
    roots = torch.stack(counted).all(dim=0)
    return torch.stack(agreements)[:, roots], torch.stack(shares)[:, roots]
