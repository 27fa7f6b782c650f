"""Prediction layers of latent attention, experts, windows and sinks, read from the target's checkpoint, draft."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from exactness.drafter_cells import Bench
from outrider.drafter_service.head_drafters.head_runner import HeadRunner
from outrider.drafter_service.heads.head_layer import load_heads
from outrider.drafter_service.heads.mtp import MtpHead
from outrider.drafter_service.heads.switched import SwitchedHeads
from outrider.verifier_service.model.config import ModelConfig
from tiny.hub.prediction_layers import HIDDEN_SIZE, PREDICTION_LAYERS, Reference, pairs, write_prediction_layer
from tiny.models import random_sequences, relative_difference

NUM_BLOCKS = 64
PROMPTS = random_sequences((5, 21, 14))


@pytest.fixture(scope="module", params=sorted(PREDICTION_LAYERS))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, write_prediction_layer(folder, request.param)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def test_its_logits_are_those_of_the_librarys_layer(written: tuple[Path, Reference]) -> None:
    folder, reference = written
    config = ModelConfig(path=str(folder), device="cpu", dtype="float32", num_kv_blocks=NUM_BLOCKS, max_model_len=160)
    heads = load_heads(MtpHead, [folder], config, target=folder)
    runner = HeadRunner.sized_by(SwitchedHeads(heads), config)
    (token_ids,) = random_sequences((24,))
    states = torch.randn(23, HIDDEN_SIZE, generator=torch.Generator().manual_seed(2))
    got = []
    for start, stop in ((0, 17), (17, 18), (18, 23)):
        got.append(runner.execute(pairs(token_ids, start, stop), runner.combine(states[start:stop])).logits)
    assert relative_difference(reference.logits(token_ids, states), torch.cat(got)) < 1e-5


def test_drafts_change_no_token(written: tuple[Path, Reference], bench: Bench) -> None:
    folder, _ = written
    options = {"model": str(folder), "seed": 0, "max_model_len": 160, "device": "cpu"}
    speculative = {"method": "mtp", "num_speculative_tokens": 3}
    bench.require_same_tokens(options, speculative, PROMPTS)
