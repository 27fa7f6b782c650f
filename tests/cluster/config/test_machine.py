"""A small machine drafts in the verifier, and its cores are shared out among the ranks that compute."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from outrider.cluster.config.known_models import LOOK_UPS
from outrider.cluster.config.machine import fit_drafting, is_small, num_busy_ranks, share_cores, usable_cores
from outrider.cluster.config.service_config import ServiceConfig


@pytest.mark.parametrize(
    ("asked", "num_ranks", "num_cores", "expected"),
    [(None, 1, 2, 2), (None, 2, 2, 1), (None, 3, 2, 1), (None, 3, 16, 5), (1, 1, 8, 1), (2, 2, 8, 2), (4, 2, 4, 2)],
)
def test_ranks_never_have_more_threads_than_there_are_cores(asked, num_ranks, num_cores, expected):
    config = share_cores(ServiceConfig(threads_per_rank=asked), num_ranks=num_ranks, num_cores=num_cores)
    assert config.model.threads_per_rank == expected
    assert config.verifier_spec.model.num_threads == expected


def test_fewer_than_asked_for_is_said(caplog):
    with caplog.at_level(logging.WARNING):
        share_cores(ServiceConfig(threads_per_rank=2), num_ranks=2, num_cores=2)
    assert caplog.messages == ["threads_per_rank: 2 ranks share 2 cores: 1 each, not 2"]


@pytest.mark.parametrize(("limit", "expected"), [("1", 1), ("", None), ("0", None), ("4,2", None), ("100000", None)])
def test_the_usual_variable_bounds_the_cores(monkeypatch, limit, expected):
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    assert usable_cores() == (expected or len(os.sched_getaffinity(0)))


def test_where_the_cluster_places_ranks_each_has_one():
    assert ServiceConfig().verifier_spec.model.num_threads == 1


@pytest.mark.parametrize(
    ("num_cores", "gpus", "device", "expected"),
    [
        (2, 0, "auto", True),
        (3, 0, "cuda", True),
        (4, 0, "auto", False),
        (2, 1, "auto", False),
        (2, 1, "cpu", True),
    ],
)
def test_a_machine_is_small_by_its_cores_and_without_a_gpu(tmp_path: Path, num_cores, gpus, device, expected):
    for number in range(gpus):
        (tmp_path / f"nvidia{number}").touch()
    assert is_small(ServiceConfig(device=device), num_cores=num_cores, devices=tmp_path) is expected


def test_where_nobody_says_a_small_machine_drafts_in_the_verifier(tmp_path: Path):
    for model in ("smollm2", "a chat model"):
        config = fit_drafting(ServiceConfig(model=model), num_cores=2, devices=tmp_path)
        assert config.drafting.speculative_config == LOOK_UPS
        assert config.who_drafts.endswith("in the verifier")
    kept = fit_drafting(ServiceConfig(model="smollm2"), num_cores=8, devices=tmp_path)
    assert kept == ServiceConfig(model="smollm2")


@pytest.mark.parametrize(
    "options",
    [
        {},  # the embedded pair
        {"model": "smollm2", "num_drafters": 0},
        {"model": "smollm2", "speculative_config": {"method": "eagle3"}},
        {"model": "smollm2", "drafter_pools": ({"name": "lookup", "method": "ngram"},)},
    ],
)
def test_who_says_how_drafts_are_made_is_heard_on_a_small_machine(tmp_path: Path, options):
    config = ServiceConfig(**options)
    assert fit_drafting(config, num_cores=2, devices=tmp_path) is config


def test_other_options_of_drafting_stay(tmp_path: Path):
    config = ServiceConfig(model="smollm2", speculative_config={"suffix_decoding_max_tree_depth": 8})
    assert fit_drafting(config, num_cores=2, devices=tmp_path).speculative.suffix_decoding_max_tree_depth == 8


def test_look_ups_take_no_core():
    assert num_busy_ranks(ServiceConfig()) == 2
    lookups = ServiceConfig(model="a chat model", speculative_config={"method": "suffix"}, num_drafters=3)
    assert (lookups.num_ranks, num_busy_ranks(lookups)) == (4, 1)
