"""The target for a drafter in training: its law at every position, and its tapped states."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.drafter_service.training.laws import DenseLaw, TargetLaw
from outrider.drafter_service.training.precision import is_fast_in_half_precision
from outrider.verifier_service.messages.draft import FINAL_TAP


class Target(Protocol):
    """What a student knows of its target beside lessons."""

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int: ...

    def tapping(self, taps: tuple[int, ...]) -> Self:
        """Return the same target with other taps, as in `DraftNeeds`."""


SomeTarget = TypeVar("SomeTarget", bound=Target)


class Lesson(Protocol):
    """Windows of text with what the target says of them."""

    @property
    def token_ids(self) -> Tensor:
        """int64 [rows, window]"""

    @property
    def states(self) -> Tensor:
        """float32 [rows, window, width]; the taps' hidden states, concatenated; width 0 without taps."""

    def law(self, vocab_ids: Tensor | None, *, start: int = 0) -> TargetLaw:
        """Return the law after each token from `start` on, over a drafter's vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtLesson:
    """Windows of text with a live target's outputs."""

    token_ids: Tensor  # int64 [rows, window]
    final: Tensor  # float32 [rows, window, hidden_size], input of the output embedding; without `table`: the logits
    table: Tensor | None = None  # [vocab_size, hidden_size]; the output embedding
    likeliest: Tensor  # int64 [rows, window]; the target's greedy choice after each token
    states: Tensor  # float32 [rows, window, width]; the taps' hidden states, concatenated; width 0 without taps
    counted: Tensor  # bool [rows, window]; whether the token after each may be drafted

    def logits(self, vocab_ids: Tensor | None = None, *, start: int = 0) -> Tensor:
        """Return the logits after each token from `start` on: float32 [rows, window - start, vocab_size].

        With `vocab_ids`, int64 [draft_vocab_size], only theirs.
        """
        final = self.final[:, start:]
        if self.table is None:
            return final if vocab_ids is None else final[..., vocab_ids]
        return F.linear(final, self.table if vocab_ids is None else self.table[vocab_ids]).float()

    def law(self, vocab_ids: Tensor | None, *, start: int = 0) -> DenseLaw:
        """Renormalise the target's rows from `start` on over a reduced vocabulary."""
        counted = self.counted[:, start:]
        if vocab_ids is not None:
            counted = counted & torch.isin(self.likeliest[:, start:], vocab_ids)
        return DenseLaw.of(self.logits(vocab_ids, start=start).softmax(-1), counted)


class Teacher:
    """A frozen target."""

    def __init__(self, model: PreTrainedModel, taps: tuple[int, ...] = ()) -> None:
        """`taps` are as in `DraftNeeds`."""
        self.model = model.eval().requires_grad_(False)
        self.taps = taps
        check_taps(taps, self.num_layers)

    @classmethod
    def load(cls, folder: Path, device: torch.device, *, dtype: torch.dtype | str = "auto") -> Teacher:
        """Load a target's checkpoint; by default in its own dtype, or float32 on a device that is slow in it."""
        if dtype == "auto" and not is_fast_in_half_precision(device):
            dtype = torch.float32
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return cls(model.to(device))

    def tapping(self, taps: tuple[int, ...]) -> Teacher:
        """Return the same target with other taps."""
        return Teacher(self.model, taps)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def hidden_size(self) -> int:
        """The width of a hidden state."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def vocab_size(self) -> int:
        return self.head.shape[0]

    @property
    def num_layers(self) -> int:
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def embedding(self) -> Tensor:
        """[vocab_size, hidden_size]"""
        return self.model.get_input_embeddings().weight

    @property
    def head(self) -> Tensor:
        """[vocab_size, hidden_size]"""
        return self.model.get_output_embeddings().weight

    def has_parameter(self, patterns: Iterable[str]) -> bool:
        """Return whether the name of a target's tensor matches one of the regular expressions."""
        return any(re.search(pattern, name) for pattern in patterns for name, _ in self.model.named_parameters())

    @torch.no_grad()
    def lesson(self, token_ids: Tensor, counted: Tensor | None = None) -> TaughtLesson:
        """Run the target over windows of text: int64 [rows, window].

        `counted`, bool [rows, window], are the tokens that may be drafted, by default all; the token after a window
        counts if the last one does.
        """
        token_ids = token_ids.to(self.device)
        counted = torch.ones_like(token_ids, dtype=torch.bool) if counted is None else counted.to(self.device)
        output = self.model(input_ids=token_ids, use_cache=False, output_hidden_states=bool(self.taps))
        hidden = output.hidden_states  # the input of each layer, then of the output embedding
        tapped = [hidden[-1 if tap == FINAL_TAP else tap] for tap in self.taps]
        states = torch.cat(tapped, dim=-1) if tapped else output.logits.new_zeros((*token_ids.shape, 0))
        return TaughtLesson(
            token_ids=token_ids,
            final=output.logits.float(),
            likeliest=output.logits.argmax(-1),
            states=states.float(),
            counted=asked_for(counted),
        )


def asked_for(counted: Tensor) -> Tensor:
    """Return after which tokens the next one counts: bool [rows, window]."""
    return torch.cat([counted[:, 1:], counted[:, -1:]], dim=1)


def check_taps(taps: tuple[int, ...], num_layers: int) -> None:
    """Raise `ValueError` for a tap that is no layer of the target."""
    for tap in taps:
        if tap != FINAL_TAP and not 0 <= tap < num_layers:
            raise ValueError(f"taps: {tap} is no layer of a target with {num_layers} layers")


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Return EAGLE-3's three taps (2, N/2, N-3); for a shallow target, where these coincide, three layers."""
    taps = (2, num_layers // 2, num_layers - 3)
    return taps if taps[0] < taps[1] < taps[2] else (1, num_layers // 2, num_layers - 1)
