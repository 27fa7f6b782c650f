"""What all tests share: reproducible property tests, GPU tests that say why they did not run, and which are slow."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

SLOW_LIST = Path(__file__).with_name("slow.txt")  # functions of which a case takes so long, one a line
SLOW_S = 1.0

settings.register_profile("outrider", derandomize=True, deadline=None, database=None)
settings.load_profile("outrider")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-runs", type=int, default=20, help="How often `make soak` repeats each failure.")
    parser.addoption("--write-slow", action="store_true", help=f"Write {SLOW_LIST.name} from what this run takes.")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-slow") and not hasattr(config, "workerinput"):  # xdist's workers report to this one
        config.pluginmanager.register(Stopwatch())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = slow_functions()
    for item in items:
        if function_of(item.nodeid) in slow:
            item.add_marker("slow")
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _cuda_is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, torch sees none"))


def slow_functions() -> set[str]:
    return set(SLOW_LIST.read_text().splitlines())


def function_of(nodeid: str) -> str:
    """Return a test's file and function, without the parameters of the case."""
    return nodeid.split("[")[0]


class Stopwatch:
    """Adds up what each test takes, what it sets up first included, and writes the list of the slow ones."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Say what this run knows: a function that it did not run stays as it was."""
        known = {function_of(nodeid) for nodeid in self._seconds}
        slow = {function_of(nodeid) for nodeid, seconds in self._seconds.items() if seconds >= SLOW_S}
        names = slow | (slow_functions() - known)
        SLOW_LIST.write_text("".join(f"{name}\n" for name in sorted(names)))


def _cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()
