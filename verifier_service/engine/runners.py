"""The engine's interface to the model."""

from __future__ import annotations

from typing import Protocol

import torch

from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.model.state_pool import StatePool


class Runner(Protocol):
    """Executes a scheduled batch on every rank of a model."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    eos_token_ids: tuple[int, ...]
    states: StatePool | None  # hidden states of all computed tokens; None: no drafter reads them

    def execute(self, batch: ScheduledBatch, chosen: torch.Tensor | None = None) -> torch.Tensor:
        """Return float32 logits [len(batch.logits_indices), vocab_size].

        `chosen` int64 [num_chosen], on the model's device: the tokens that placeholders (`placeholder_token`) index.
        """
