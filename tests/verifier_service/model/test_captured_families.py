"""Steps of the library's models, captured: what a graph may hold, and that a replay gives what an eager step gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outrider.verifier_service.messages.draft import FINAL_TAP
from outrider.verifier_service.model.latent_attention import WIDE_HEAD
from outrider.verifier_service.model.library_model import LibraryModel
from tiny.formats.runners import BLOCK_SIZE, NUM_BLOCKS, make_runner
from tiny.hub.families import FAMILIES, make_family_checkpoint
from tiny.models import TINY_ARCHITECTURES, make_checkpoint, random_sequences, scattered_batches, without_kernels
from tiny.played_graphs import played_backend

NAMES = sorted(FAMILIES.keys() | TINY_ARCHITECTURES.keys())
UNCAPTURED = {"opt": "other_head", **dict.fromkeys(("gpt2", "muse-glimmer", "step-3.5", "step-3.7"), "reads_back")}


@pytest.fixture(autouse=True)
def as_on_an_accelerator() -> Iterator[None]:
    with without_kernels():
        yield


def checkpoint(folder: Path, name: str) -> None:
    (make_family_checkpoint if name in FAMILIES else make_checkpoint)(folder, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_replay_is_an_eager_step(tmp_path: Path, name: str) -> None:
    checkpoint(tmp_path, name)
    eager = make_runner(tmp_path, max_model_len=160)
    if not isinstance(eager.model, LibraryModel):
        return  # tests of `StepGraphs` have our decoder
    captured = make_runner(tmp_path, played_backend(), max_model_len=160)
    assert (captured.graphs is None) == (captured.pool.widest > WIDE_HEAD), (
        "for which the kernel in a graph has no room"
    )
    if captured.graphs is None:
        return
    num_steps = 0
    for batch, _ in scattered_batches(random_sequences((41, 9, 26)), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE):
        expected = eager.execute(batch)
        torch.testing.assert_close(captured.execute(batch), expected, atol=1e-4, rtol=1e-4)
        num_steps += 1
    counts = captured.graphs.counts
    eager_steps = {UNCAPTURED[name]: num_steps} if name in UNCAPTURED else {}
    assert (counts.num_replayed, counts.eager) == (num_steps - sum(eager_steps.values()), eager_steps)


def test_a_replay_leaves_the_states_that_drafters_read(tmp_path: Path) -> None:
    checkpoint(tmp_path, "gpt-oss")
    taps = {"state_taps": (0, 1, FINAL_TAP)}
    eager, captured = make_runner(tmp_path, **taps), make_runner(tmp_path, played_backend(), **taps)
    (batch, _), *_ = scattered_batches(random_sequences((9, 5)), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    found = []
    for runner in (eager, captured):
        runner.execute(batch)
        found.append(runner.states.read(batch.block_tables[0], 0, batch.context_lengths[0]))
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
    assert captured.graphs.counts.num_replayed == 1


def test_what_nobody_listed_is_not_tried(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "arcee")
    runner = make_runner(tmp_path, played_backend())
    assert runner.model.not_captured == "unlisted"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["glm-4.5", "gpt-oss", "hy3", "llama-4", "minimax-m2", "mistral-medium-3.5"])
def test_a_graph_on_a_device_is_an_eager_step(tmp_path: Path, name: str) -> None:
    checkpoint(tmp_path, name)
    options = {"device": "cuda", "dtype": "bfloat16", "max_model_len": 160}
    eager = make_runner(tmp_path, **options, enforce_eager=True)
    captured = make_runner(tmp_path, **options)
    for batch, _ in scattered_batches(random_sequences((41, 9, 26)), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE):
        expected = eager.execute(batch)
        torch.testing.assert_close(captured.execute(batch), expected, atol=0.1, rtol=0.1)
    assert captured.graphs.counts.eager == {}
