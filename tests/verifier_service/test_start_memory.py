"""What a start has found out holds for the same start again, and for no other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from outrider.verifier_service import start_memory
from outrider.verifier_service.cache import CACHE_VARIABLE
from outrider.verifier_service.start_memory import StartMemory

CPU = torch.device("cpu")
SETTINGS = {"dtype": "auto", "num_threads": 2}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    return checkpoint


def test_a_finding_is_there_at_the_next_start(folder: Path):
    StartMemory(SETTINGS, folder, CPU).remember("profile", {"a": [1, 2.5, None]})
    again = StartMemory(SETTINGS, folder, CPU)
    assert again.recall("profile") == {"a": [1, 2.5, None]}
    assert again.recall("checked") is None


def test_findings_of_one_start_stand_beside_each_other(folder: Path):
    memory = StartMemory(SETTINGS, folder, CPU)
    memory.remember("checked", True)
    memory.remember("profile", 3)
    again = StartMemory(SETTINGS, folder, CPU)
    assert (again.recall("checked"), again.recall("profile")) == (True, 3)


def test_another_start_knows_nothing_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch):
    StartMemory(SETTINGS, folder, CPU).remember("checked", True)
    assert StartMemory(SETTINGS | {"dtype": "float32"}, folder, CPU).recall("checked") is None
    assert StartMemory(SETTINGS, folder, CPU, rank=1).recall("checked") is None
    monkeypatch.setattr(start_memory, "_our_version", lambda: "another")
    assert StartMemory(SETTINGS, folder, CPU).recall("checked") is None


def test_another_checkpoint_in_the_same_place_is_another_start(folder: Path):
    StartMemory(SETTINGS, folder, CPU).remember("checked", True)
    weights = folder / "model.safetensors"
    written_ns = weights.stat().st_mtime_ns
    os.utime(weights, ns=(written_ns, written_ns + 1))
    assert StartMemory(SETTINGS, folder, CPU).recall("checked") is None


def test_it_can_be_found_out_anew(folder: Path):
    StartMemory(SETTINGS, folder, CPU).remember("checked", True)
    anew = StartMemory(SETTINGS, folder, CPU, is_anew=True)
    assert anew.recall("checked") is None
    anew.remember("checked", "again")
    assert StartMemory(SETTINGS, folder, CPU).recall("checked") == "again"


def test_a_spoilt_file_is_as_none(folder: Path):
    StartMemory(SETTINGS, folder, CPU).remember("checked", True)
    (file,) = (folder.parent / "cache" / "starts").iterdir()
    for spoilt in ("{", "[1]", "3"):
        file.write_text(spoilt)
        assert StartMemory(SETTINGS, folder, CPU).recall("checked") is None


def test_a_cache_that_cannot_be_written_costs_only_time(folder: Path, caplog: pytest.LogCaptureFixture):
    (folder.parent / "cache").write_text("a file in the folder's place")
    StartMemory(SETTINGS, folder, CPU).remember("checked", True)
    assert "the next one takes as long" in caplog.text


def test_only_the_last_ones_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(start_memory, "MAX_STARTS", 2)
    for dtype in ("float32", "float16", "bfloat16"):
        StartMemory(SETTINGS | {"dtype": dtype}, folder, CPU).remember("checked", True)
    assert len([*(folder.parent / "cache" / "starts").iterdir()]) == 2
    assert StartMemory(SETTINGS | {"dtype": "bfloat16"}, folder, CPU).recall("checked") is True
