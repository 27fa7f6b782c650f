"""A pool's student, warm from a folder that serves, without its target: of that, only the tensors that heads borrow.

A student is in float32. It is written in the format that it was read in, so that a drafter takes it as new weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer

from outrider.drafter_service.heads.eagle import EagleHead
from outrider.drafter_service.heads.eagle3 import Eagle3Head
from outrider.drafter_service.heads.medusa import MedusaHeads, target_lm_head
from outrider.drafter_service.heads.mlp_speculator import MlpSpeculator
from outrider.drafter_service.learning.served_lessons import Reading
from outrider.drafter_service.service.drafter_spec import DrafterSpec
from outrider.drafter_service.service.methods import METHODS, Kind, Method
from outrider.drafter_service.training.draft_model import DraftModelStudent
from outrider.drafter_service.training.medusa import MedusaStudent
from outrider.drafter_service.training.mlp_speculator import MlpStudent
from outrider.drafter_service.training.student import Student
from outrider.drafter_service.training.unrolled import UnrolledStudent
from outrider.verifier_service.formats.checkpoint import WeightError
from outrider.verifier_service.formats.quantized import open_checkpoint
from outrider.verifier_service.model.architectures import read_description, resolve_description, resolve_folder
from outrider.verifier_service.model.weights import require_alike, require_finite

MAX_POSITIONS = 4  # draft positions per root in training, where the drafter's shape does not say


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """What a student knows of a target that is not loaded."""

    device: torch.device
    vocab_size: int

    def tapping(self, taps: tuple[int, ...]) -> TargetSpec:
        """Return itself: states come with the samples."""
        return self


@dataclass(slots=True)
class StudentMaker:
    """Loads the students of one pool."""

    spec: DrafterSpec
    device: torch.device
    method: Method = field(init=False)

    def __post_init__(self) -> None:
        (self.method,) = self.spec.speculative.weighted_methods

    def first_folder(self) -> Path:
        """Return the folder that the pool started from."""
        assert self.spec.model is not None, "the drafter has no checkpoint"
        return resolve_folder(self.spec.model)

    def load(self, folder: Path) -> tuple[Student, Reading]:
        """Load a student to train. Raises `ValueError` naming a tensor or setting that does not fit the target."""
        student, reading = METHODS[self.method].student(self, folder)
        return student, reading

    def require_alike(self, served: Student, folder: Path) -> None:
        """Raise `ValueError` unless drafters that serve the one can take the other's weights."""
        if not folder.is_dir():
            raise WeightError(f"there is no folder {folder}")
        try:
            loaded, _ = self.load(folder)
        except WeightError:
            raise
        except Exception as error:  # whatever is wrong with the folder
            raise WeightError(f"{folder}: {error}") from error
        require_finite(loaded.module)
        if METHODS[self.method].kind is Kind.MODEL:
            ours, theirs = (_shapes(student.module) for student in (served, loaded))
            name = next((name for name in sorted(ours.keys() | theirs) if ours.get(name) != theirs.get(name)), None)
            if name is not None:
                raise WeightError(f"{folder}: {name!r} is {theirs.get(name)}, the served model's is {ours.get(name)}")
        else:
            require_alike(served.module, loaded.module)

    @property
    def target(self) -> TargetSpec:
        return TargetSpec(self.device, self._description().vocab_size)

    def _description(self) -> Any:
        return read_description(resolve_description(self.spec.target), self.spec.target)

    @property
    def num_positions(self) -> int:
        return min(MAX_POSITIONS, max(1, self.spec.speculative.num_speculative_tokens))

    def fitting(self, reading: Reading, folder: Path, num_taps: int) -> Reading:
        width = num_taps * self._description().hidden_size
        if reading.state_width != width:
            raise WeightError(f"{folder}: it reads states of width {reading.state_width}, the target's have {width}")
        return reading


def draft_model(maker: StudentMaker, folder: Path) -> tuple[Student, Reading]:
    vocab_size = min(maker.target.vocab_size, AutoConfig.from_pretrained(folder).get_text_config().vocab_size)
    target = TargetSpec(maker.device, vocab_size)
    tokenizer: Any = _Tokenizer(maker.first_folder())
    student = DraftModelStudent.load(folder, target, tokenizer, num_positions=maker.num_positions)
    return student, Reading(vocab_size=vocab_size)


def medusa(maker: StudentMaker, folder: Path) -> tuple[Student, Reading]:
    lent = target_lm_head(resolve_folder(maker.spec.target))
    heads = MedusaHeads.from_folder(folder, target_lm_head=lent).to(maker.device)
    _train(heads, frozen=("lm_heads.0.weight",) if heads.shares_lm_head else ())
    reading = Reading(state_width=heads.hidden_size, vocab_size=heads.vocab_size)
    return MedusaStudent(heads, maker.target), maker.fitting(reading, folder, 1)


def mlp_speculator(maker: StudentMaker, folder: Path) -> tuple[Student, Reading]:
    speculator = MlpSpeculator.from_folder(folder).to(maker.device)
    _train(speculator)
    reading = Reading(state_width=speculator.emb_dim, vocab_size=speculator.vocab_size)
    return MlpStudent(speculator, maker.target), maker.fitting(reading, folder, 1)


def _head(maker: StudentMaker, kind: type[Eagle3Head] | type[EagleHead], folder: Path) -> tuple[Student, Reading]:
    with open_checkpoint(resolve_folder(maker.spec.target)) as target:
        num_layers = maker.spec.num_target_layers()
        head = kind.from_folder(folder, target=target, num_target_layers=num_layers, device=maker.device)
    _train(head, frozen={"embed_tokens.weight", *head.borrowed})
    reading = Reading(state_width=head.state_size, attends=True, vocab_size=head.vocab_size)
    student = UnrolledStudent(head, maker.target, num_positions=maker.num_positions, write=kind.save)
    return student, maker.fitting(reading, folder, len(head.taps))


def eagle(maker: StudentMaker, folder: Path) -> tuple[Student, Reading]:
    return _head(maker, EagleHead, folder)


def eagle3(maker: StudentMaker, folder: Path) -> tuple[Student, Reading]:
    return _head(maker, Eagle3Head, folder)


class _Tokenizer:
    """The tokenizer of the pool's own checkpoint, as `export` writes it beside a model; nothing if there is none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save_pretrained(self, folder: Path, **options: Any) -> None:
        if (self._folder / "tokenizer_config.json").exists() or (self._folder / "tokenizer.json").exists():
            AutoTokenizer.from_pretrained(self._folder).save_pretrained(folder, **options)


def _train(module: nn.Module, frozen: Any = ()) -> None:
    """Make a loaded head's parameters trainable, all but some by name."""
    module.train()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)


def _shapes(module: nn.Module) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in module.state_dict().items()}
