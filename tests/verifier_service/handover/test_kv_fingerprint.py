"""Whether KV may be taken from another verifier: every byte of a checkpoint counts, and names do not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from outrider.verifier_service.handover.kv_bytes import DIGEST, checkpoint_digest, kv_fingerprint
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.runner import ModelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from tiny.models import make_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    make_model(hidden_size=256, num_hidden_layers=4).save_pretrained(folder)
    return folder


def runner_of(folder: Path, **options: bool) -> ModelRunner:
    config = ModelConfig(path=str(folder), device="cpu", check_logits=False, num_kv_blocks=8, block_size=4, **options)
    return ModelRunner(config, TensorParallelGroup.single())


@pytest.mark.parametrize("place", [0.1, 0.31, 0.5, 0.777, 0.999])
def test_one_byte_anywhere_makes_another_model(checkpoint: Path, tmp_path: Path, place: float) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    assert checkpoint_digest(copy) == checkpoint_digest(checkpoint)
    file = copy / "model.safetensors"
    with file.open("r+b") as tensors:
        tensors.seek(int(place * file.stat().st_size))
        (byte,) = tensors.read(1)
        tensors.seek(-1, os.SEEK_CUR)
        tensors.write(bytes([byte ^ 1]))
    assert checkpoint_digest(copy) != checkpoint_digest(checkpoint)
    assert kv_fingerprint(runner_of(copy)) != kv_fingerprint(runner_of(checkpoint))


def test_a_file_is_read_whole_once(checkpoint: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    first = runner_of(copy)
    assert first.memory.recall(DIGEST) is None
    fingerprint = kv_fingerprint(first)
    again = runner_of(copy)
    assert again.memory.recall(DIGEST) == checkpoint_digest(copy)
    assert kv_fingerprint(again) == fingerprint == kv_fingerprint(runner_of(checkpoint)), "names do not count"
    assert runner_of(copy, check_anew=True).memory.recall(DIGEST) is None
    os.utime(copy / "model.safetensors", ns=(0, 0))
    assert runner_of(copy).memory.recall(DIGEST) is None, "a file that was written anew is read anew"
