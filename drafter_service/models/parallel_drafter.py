"""Draft with a causal language model that was taught to guess ahead over mask tokens: all positions in one forward.

PARD (An et al. 2025, arXiv 2504.18583): an ordinary draft model, adapted to guess the next K tokens from the rows of
the last committed token and K - 1 masks. All masks are one token, which the checkpoint's config names. vLLM serves
the same checkpoints as `parallel_drafting`.

canvas   last committed   forced ...   mask   mask   mask
row      next token       ...          +1     +2     +3     of each, the law of the token after it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from outrider.drafter_service.engine.drafter import Ask
from outrider.drafter_service.models.one_pass_drafter import Canvas, Chunk
from outrider.verifier_service.engine.runners import Runner
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.draft import DraftNeeds

MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # as vLLM reads them: the first that is there


def parse_mask_token_id(config: Mapping[str, Any], vocab_size: int) -> int:
    """Return the mask token of a model's config; raises `ValueError` where it names none, or none of its own."""
    found = [(key, config[key]) for key in MASK_KEYS if config.get(key) is not None]
    if not found:
        raise ValueError(f"{MASK_KEYS[1]}: the model's config names no mask token ({', '.join(MASK_KEYS)})")
    key, value = found[0]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
        raise ValueError(f"{key}: {value!r} is no token of a vocabulary of {vocab_size}")
    return value


class MaskedModel:
    """A `OnePassModel` over a model runner; the canvas is causal, so it is an ordinary end of the sequence."""

    needs = DraftNeeds()
    pages_canvas = True
    edges = None

    def __init__(self, runner: Runner, mask_token_id: int) -> None:
        assert 0 <= mask_token_id < runner.vocab_size, mask_token_id
        self._runner, self._mask_token_id = runner, mask_token_id
        self.vocab_size, self.max_model_len = runner.vocab_size, runner.max_model_len
        self.num_blocks, self.block_size = runner.num_blocks, runner.block_size

    def context(self, ask: Ask) -> range:
        return range(len(ask.token_ids) - 1)

    def canvas(self, ask: Ask) -> Canvas:
        known = [ask.token_ids[-1], *ask.forced_ids]
        masks = [self._mask_token_id] * (ask.length - len(known))
        return Canvas(token_ids=known + masks, rows=range(len(ask.forced_ids), ask.length))

    def execute(self, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        logits = self._runner.execute(_pack(chunks, self.block_size))  # [num_rows, vocab_size]
        return list(logits.split([len(chunk.canvas.rows) for chunk in chunks if chunk.canvas is not None]))


def _pack(chunks: Sequence[Chunk], block_size: int) -> ScheduledBatch:
    """Lay the chunks side by side, each canvas after its context."""
    batch = ScheduledBatch(
        token_ids=[],
        positions=[],
        slot_mapping=[],
        query_lengths=[],
        context_lengths=[],
        block_tables=[chunk.block_table for chunk in chunks],
        logits_indices=[],
    )
    for chunk in chunks:
        tokens = list(chunk.ask.token_ids[chunk.begin : chunk.end])
        if chunk.canvas is not None:
            first = batch.num_tokens + len(tokens)
            batch.logits_indices.extend(first + row for row in chunk.canvas.rows)
            tokens += chunk.canvas.token_ids
        batch.token_ids.extend(tokens)
        batch.positions.extend(range(chunk.begin, chunk.begin + len(tokens)))
        batch.slot_mapping.extend(chunk.slots(len(tokens), block_size))
        batch.query_lengths.append(len(tokens))
        batch.context_lengths.append(chunk.num_cached + len(tokens))
    return batch
