"""A runner of a tiny checkpoint, and whether its logits are the library's."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.runner import ModelRunner
from outrider.verifier_service.model.step_graphs import GraphBackend
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from tiny.models import full_logits, random_sequences, scattered_batches

NUM_BLOCKS, BLOCK_SIZE = 64, 4


def make_runner(folder: Path, backend: GraphBackend | None = None, **fields: object) -> ModelRunner:
    options = {"num_kv_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "device": "cpu", "dtype": "float32", **fields}
    return ModelRunner(ModelConfig(path=str(folder), **options), TensorParallelGroup.single(), backend)


def require_equal(runner: ModelRunner, model: PreTrainedModel) -> None:
    """Logits within 1e-4, and the same likeliest tokens."""
    sequences = random_sequences((41, 9, 26))
    expected = [full_logits(model, sequence) for sequence in sequences]
    for batch, rows in scattered_batches(sequences, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE):
        got, wanted = runner.execute(batch), torch.stack([expected[index][position] for index, position in rows])
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(got.argmax(1), wanted.argmax(1))
