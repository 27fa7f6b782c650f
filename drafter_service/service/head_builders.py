"""Build drafters with heads over the target's hidden states.

They need transformers' model code, which takes seconds to import: no other drafter does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from torch import nn

from outrider.drafter_service.engine.drafter import Drafter
from outrider.drafter_service.engine.paged_drafter import PagedDrafter
from outrider.drafter_service.head_drafters.eagle_drafter import HeadForward
from outrider.drafter_service.head_drafters.head_runner import HeadRunner
from outrider.drafter_service.head_drafters.medusa_drafter import MedusaDrafter
from outrider.drafter_service.head_drafters.mlp_drafter import MlpDrafter
from outrider.drafter_service.heads.dflash import DFlashHead
from outrider.drafter_service.heads.eagle import EagleHead
from outrider.drafter_service.heads.eagle3 import Eagle3Head
from outrider.drafter_service.heads.head_layer import DraftHead, SomeHead, load_heads
from outrider.drafter_service.heads.medusa import MedusaHeads, target_lm_head
from outrider.drafter_service.heads.mlp_speculator import MlpSpeculator
from outrider.drafter_service.heads.mtp import MtpHead
from outrider.drafter_service.heads.switched import SwitchedHeads
from outrider.drafter_service.models.dflash_drafter import DFlashModel
from outrider.drafter_service.models.one_pass_drafter import CanvasForward
from outrider.drafter_service.service.drafters import Making
from outrider.verifier_service.model.architectures import resolve_folder
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.settled import with_dtype

SomeModule = TypeVar("SomeModule", bound=nn.Module)


def medusa(making: Making) -> Drafter:
    def read(folder: Path) -> MedusaHeads:
        return MedusaHeads.from_folder(folder, target_lm_head=target_lm_head(resolve_folder(making.spec.target)))

    heads = _last_state_head(making, read, lambda heads: heads.hidden_size)
    return MedusaDrafter(heads, rng=making.rng, **making.limits)


def mlp_speculator(making: Making) -> Drafter:
    speculator = _last_state_head(making, MlpSpeculator.from_folder, lambda speculator: speculator.emb_dim)
    return MlpDrafter(speculator, rng=making.rng, **making.limits)


def _last_state_head(
    making: Making, read: Callable[[Path], SomeModule], width_of: Callable[[SomeModule], int]
) -> SomeModule:
    def load(folder: Path) -> SomeModule:
        head = read(folder)
        if (width := width_of(head)) != making.state_width:
            raise ValueError(f"{folder}: it reads states of width {width}, the target's have {making.state_width}")
        return head.to(making.device)

    head = load(making.folder)
    making.weights.keep_head(head, load)
    return head


def _heads(making: Making, kind: type[SomeHead]) -> tuple[list[SomeHead], ModelConfig]:
    """Load the heads that serve; also return the config that their KV is sized by."""
    spec = making.spec
    is_in_target = kind.is_in_target and (spec.model is None or bool(making.config.methods))
    model = spec.target if is_in_target else spec.model
    assert model is not None, "the drafter has no checkpoint"

    def load(folders: Sequence[Path], model: ModelConfig) -> list[SomeHead]:
        target = folders[0] if is_in_target else resolve_folder(spec.target)
        return load_heads(kind, folders, model, target=target, num_target_layers=spec.num_target_layers())

    paths = making.config.models or (model.path,)
    heads = load([resolve_folder(replace(model, path=path)) for path in paths], model)
    again = with_dtype(model, heads[0].embed_tokens.weight.dtype)
    making.weights.keep_head(heads[0], lambda folder: load([folder], again)[0])
    return heads, model


def _continuing(making: Making, kind: type[DraftHead]) -> Drafter:
    """Build a drafter whose head continues from its own states."""
    heads, model = _heads(making, kind)
    runner = HeadRunner.sized_by(SwitchedHeads(heads), model)
    runner.capture()
    return PagedDrafter(HeadForward(runner, making.rules), num_ahead_branches=making.num_ahead_branches)


def eagle(making: Making) -> Drafter:
    return _continuing(making, EagleHead)


def eagle3(making: Making) -> Drafter:
    return _continuing(making, Eagle3Head)


def mtp(making: Making) -> Drafter:
    return _continuing(making, MtpHead)


def dflash(making: Making) -> Drafter:
    (head,), model = _heads(making, DFlashHead)
    return PagedDrafter(CanvasForward(DFlashModel.sized_by(head, model), making.rules))
