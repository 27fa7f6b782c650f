"""A model's plain decoding, one text at a time and in one chunk: what answers are held against where they differ."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from outrider.lab.same_tokens import Seeded
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.model.batch_invariance import batch_dependent
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.runner import ModelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from outrider.verifier_service.model.tokenizer import load_tokenizer
from outrider.verifier_service.sampling.coupled_sampler import NOISE_FRACTION_BITS, gumbel_noise

NUM_KV_BLOCKS = 256


class PlainDecoding:
    """The `Reference` of `same_tokens`."""

    def __init__(self, config: ModelConfig) -> None:
        """Load the model that a service or an engine had, on one rank and without what it kept for drafters."""
        alone = dataclasses.replace(
            config,
            tensor_parallel_size=1,
            num_kv_blocks=NUM_KV_BLOCKS,
            num_scratch_blocks=0,
            state_taps=(),
            enforce_eager=True,
            check_logits=False,
        )
        self._runner = ModelRunner(alone, TensorParallelGroup.single())
        # by the path that is taken here: a service or an engine on this machine takes the same one
        self.may_tip = self._runner.dtype != torch.float32 and bool(batch_dependent(self._runner.model))

    def margin(self, token_ids: Sequence[int], seeded: Seeded | None) -> float:
        logits = self.logits(token_ids)
        return margin_of(logits) if seeded is None else margin_of(*drawn(logits, seeded, len(token_ids)))

    def text(self, token_ids: Sequence[int]) -> str:
        """Return a text, or the ids themselves where the model has no tokenizer."""
        try:
            return str(self._tokenizer.decode(list(token_ids)))
        except (OSError, ValueError):
            return " ".join(map(str, token_ids))

    @functools.cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self._runner.config)

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return what follows a text: float32 [vocab_size], on the host."""
        length, size = len(token_ids), self._runner.block_size
        batch = ScheduledBatch(
            token_ids=list(token_ids),
            positions=list(range(length)),
            slot_mapping=list(range(length)),
            query_lengths=[length],
            context_lengths=[length],
            block_tables=[list(range(-(-length // size)))],
            logits_indices=[length - 1],
        )
        return self._runner.execute(batch)[0].cpu()


def margin_of(logits: torch.Tensor, noise: torch.Tensor | None = None) -> float:
    """Return by how much the best token leads the second, as a share of the largest |logit|: both [vocab_size]."""
    best, second = (logits if noise is None else logits + noise).topk(2).values.tolist()
    return (best - second) / logits.abs().max().item()


def drawn(logits: torch.Tensor, seeded: Seeded, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the biased logits of a seeded request and the noise at a position, in their units: [vocab_size] both."""
    logits = logits.clone()
    for token_id, bias in seeded.biases:
        logits[token_id] += bias
    noise = gumbel_noise(seeded.seed, 0, torch.tensor([position]), len(logits), "cpu")[0]
    return logits, noise.double() * (seeded.temperature * math.log(2) / (1 << NOISE_FRACTION_BITS))
