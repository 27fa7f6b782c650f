"""An architecture that nobody listed is served exactly if the check at start finds the library's logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.verifier_service.model.architectures import ARCHITECTURES, UnsupportedModelError
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.runner import ModelRunner
from outrider.verifier_service.model.start_check import has_long_window
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from tiny.models import (
    full_logits,
    make_checkpoint,
    make_model,
    random_sequences,
    relative_difference,
    scattered_batches,
)

NUM_BLOCKS, BLOCK_SIZE = 64, 4
GOOD: dict[str, dict[str, Any]] = {
    "arcee": {},
    "cohere2": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "ernie4_5": {},
    "exaone4": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "glm": {},
    "helium": {},
    "nemotron": {},
    "olmo3": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "seed_oss": {},
}
# what keeps something outside of the KV blocks, or attends in ways of its own
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({"n_head": 4, "n_layer": 2}, "0 of 2 layers"),
    "diffllama": ({"num_key_value_heads": 4}, "attends twice"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "2 of 4 layers"),
    "gpt_neox_japanese": ({}, "0 of 2 layers"),
}


def run(folder: Path, **fields: Any) -> ModelRunner:
    config = ModelConfig(path=str(folder), device="cpu", num_kv_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, **fields)
    return ModelRunner(config, TensorParallelGroup.single())


def test_none_of_them_is_listed() -> None:
    assert not (GOOD.keys() | BAD.keys()) & ARCHITECTURES.keys()


@pytest.mark.parametrize("name", GOOD)
def test_it_is_served_where_its_logits_are_the_librarys(tmp_path: Path, name: str) -> None:
    model = make_checkpoint(tmp_path, name, **GOOD[name])
    runner = run(tmp_path)
    sequences = random_sequences((41, 9, 26))
    expected = [full_logits(model, sequence) for sequence in sequences]
    got, wanted = [], []
    for batch, rows in scattered_batches(sequences, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE):
        got.append(runner.execute(batch))
        wanted += [expected[index][position] for index, position in rows]
    assert relative_difference(torch.stack(wanted), torch.cat(got)) < 1e-5


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("check_logits", [True, False])
def test_it_is_refused_with_the_reason_where_they_are_not(tmp_path: Path, name: str, check_logits: bool) -> None:
    fields, reason = BAD[name]
    make_checkpoint(tmp_path, name, **fields)
    with pytest.raises(UnsupportedModelError, match=rf"{name}: .*{reason}"):
        run(tmp_path, check_logits=check_logits)


def test_several_ranks_are_not_tried(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "nemotron")
    with pytest.raises(UnsupportedModelError, match="nemotron: not served with tensor_parallel_size > 1"):
        run(tmp_path, tensor_parallel_size=2)


def test_a_window_longer_than_the_check_is_checked_on_a_tiny_model() -> None:
    assert has_long_window(make_model("mistral", sliding_window=4096).config)
    assert not has_long_window(make_model("mistral", sliding_window=8).config)
    assert not has_long_window(make_model("llama").config)
