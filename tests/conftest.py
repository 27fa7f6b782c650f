"""What all tests share: reproducible property tests, GPU tests that say why they did not run, and which are slow."""

from __future__ import annotations

import gc
from collections.abc import Mapping

import pytest
from hypothesis import Phase, settings

from slow_list import Stopwatch, function_of, seconds_by_file, slow_functions
from soak_length import FULL_RUNS

gc.disable()  # until all is collected: what is imported stays, and to look through it again and again takes long

settings.register_profile("outrider", derandomize=True, deadline=None, database=None)
# of a planted defect it is enough to know that a test fails: the smallest example takes minutes to find
settings.register_profile("mutants", settings.get_profile("outrider"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("outrider")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak-runs",
        type=int,
        default=FULL_RUNS,
        help="How often `make soak` repeats each failure; with fewer it sends less load, too.",
    )
    parser.addoption("--write-slow", action="store_true", help="Write tests/slow.txt from what this run takes.")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-slow") and not hasattr(config, "workerinput"):  # xdist's workers report to this one
        config.pluginmanager.register(Stopwatch())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = slow_functions()
    _put_in_order(items, seconds_by_file(slow))
    for item in items:
        if function_of(item.nodeid) in slow:
            item.add_marker("slow")
    _require_findable_services(items)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _cuda_is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, torch sees none"))


def _put_in_order(items: list[pytest.Item], seconds: Mapping[str, float]) -> None:
    """Put services with a Ray of their own before those that share one, and long files before short ones.

    A file's tests stay together. One that takes long must not come last, when the other worker has nothing left.
    """
    items.sort(
        key=lambda item: (
            "shared_ray" in getattr(item, "fixturenames", ()),
            0.0 if item.get_closest_marker("service") else -seconds.get(item.nodeid.partition("::")[0], 0.0),
        )
    )


def _require_findable_services(items: list[pytest.Item]) -> None:
    """Raise `pytest.UsageError` unless run_all.sh finds every test that starts a service: it looks for the words."""
    for path in {item.path for item in items if item.get_closest_marker("service")}:
        if "mark.service" not in path.read_text():
            raise pytest.UsageError(f"{path}: tests that start a service say so with pytest.mark.service in their file")


def pytest_collection_finish() -> None:
    """Leave what was imported and collected, which stays, out of every garbage collection to come."""
    gc.collect()
    gc.freeze()
    gc.enable()


def _cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()
