"""The cores of one machine are shared out among its ranks."""

from __future__ import annotations

import logging
import os

import pytest

from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.config.threads import share_cores, usable_cores


@pytest.mark.parametrize(
    ("asked", "num_ranks", "num_cores", "expected"),
    [(None, 1, 2, 2), (None, 2, 2, 1), (None, 3, 2, 1), (None, 3, 16, 5), (1, 1, 8, 1), (2, 2, 8, 2), (4, 2, 4, 2)],
)
def test_ranks_never_have_more_threads_than_there_are_cores(asked, num_ranks, num_cores, expected):
    config = share_cores(ServiceConfig(threads_per_rank=asked), num_ranks=num_ranks, num_cores=num_cores)
    assert config.threads_per_rank == expected
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
