"""Draft with the target's own first layers (LayerSkip, Elhoushi et al. 2024; Draft & Verify, Zhang et al. 2024)."""

from __future__ import annotations

import torch

from outrider.drafter_service.engine.tree_growth import DEFAULT_TREES, TreeConfig
from outrider.drafter_service.target.self_drafter import SelfDrafter
from outrider.drafter_service.target.target_view import TargetView

DEFAULT_SHARE = 3  # a third of the layers, where nothing is said


def early_exit_drafter(
    view: TargetView, rng: torch.Generator, *, exit_layer: int | None = None, trees: TreeConfig = DEFAULT_TREES
) -> SelfDrafter:
    """Leave after `exit_layer` layers, by way of the target's own final norm and output embedding.

    Any target can be left early; checkpoints trained for it (LayerSkip) guess far better. Raises `ValueError` when the
    target does not have so many layers.
    """
    num_layers = max(1, view.num_layers // DEFAULT_SHARE) if exit_layer is None else exit_layer
    if not 1 <= num_layers < view.num_layers:
        raise ValueError(f"exit_layer must be in [1, {view.num_layers - 1}]: the target has {view.num_layers} layers")
    return SelfDrafter(view, rng, num_layers=num_layers, trees=trees)
