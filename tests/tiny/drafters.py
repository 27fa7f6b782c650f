"""Drafters over paged KV as tests build them: of all tokens that the model has, where they say nothing else."""

from __future__ import annotations

from typing import Any

import torch

from outrider.drafter_service.engine.paged_drafter import Forward, PagedDrafter
from outrider.drafter_service.engine.tree_growth import DraftRules
from outrider.drafter_service.head_drafters.eagle_drafter import HeadForward
from outrider.drafter_service.models.model_drafter import ModelForward
from outrider.drafter_service.models.one_pass_drafter import CanvasForward, OnePassModel
from outrider.drafter_service.models.parallel_drafter import MaskedModel


def _over(
    forward: type[Forward[Any]],
    model: Any,
    rng: torch.Generator,
    *,
    num_ahead_branches: int = 0,
    vocab_size: int | None = None,
    **rules: Any,
) -> PagedDrafter[Any]:
    size = model.vocab_size if vocab_size is None else vocab_size
    made = forward(model, DraftRules(rng=rng, vocab_size=size, **rules))  # type: ignore[call-arg]
    return PagedDrafter(made, num_ahead_branches=num_ahead_branches)


def model_drafter(runner: Any, rng: torch.Generator, **options: Any) -> PagedDrafter[Any]:
    return _over(ModelForward, runner, rng, **options)


def eagle_drafter(runner: Any, rng: torch.Generator, **options: Any) -> PagedDrafter[Any]:
    return _over(HeadForward, runner, rng, **options)


def one_pass_drafter(model: OnePassModel, rng: torch.Generator, **options: Any) -> PagedDrafter[Any]:
    return _over(CanvasForward, model, rng, **options)


def parallel_drafter(runner: Any, rng: torch.Generator, *, mask_token_id: int, **options: Any) -> PagedDrafter[Any]:
    return one_pass_drafter(MaskedModel(runner, mask_token_id), rng, **options)
