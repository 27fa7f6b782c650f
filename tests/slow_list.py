"""The functions whose cases take half a second or more together, one a line with its seconds.

`make check` leaves them out, and files that take long are begun first. What tests of a file share is put to the account
of the first: where that takes long, the file says `pytest.mark.slow` itself.

`.venv/bin/python -m pytest -m "not (service or soak)" -n 2 --write-slow` writes the list; a run of some files changes
what it says of those alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

SLOW_LIST = Path(__file__).with_name("slow.txt")
SLOW_S = 0.5


def slow_functions() -> dict[str, float]:
    """Return the seconds of every slow function, by its file and name."""
    lines = (line.split(maxsplit=1) for line in SLOW_LIST.read_text().splitlines())
    return {name: float(seconds) for seconds, name in lines}


def seconds_by_file(slow: Mapping[str, float]) -> Counter[str]:
    """Return the seconds of every file that has slow functions."""
    files: Counter[str] = Counter()
    for name, seconds in slow.items():
        files[name.partition("::")[0]] += seconds
    return files


def function_of(nodeid: str) -> str:
    """Return a test's file and function, without the parameters of the case."""
    return nodeid.split("[")[0]


class Stopwatch:
    """A plug-in that adds up what each function takes, what it sets up first included, and writes the list."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[function_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Say what this run knows: a function that it did not run stays as it was."""
        slow = {function: seconds for function, seconds in self._seconds.items() if seconds >= SLOW_S}
        unknown = {name: seconds for name, seconds in slow_functions().items() if name not in self._seconds}
        SLOW_LIST.write_text("".join(f"{seconds:6.1f} {name}\n" for name, seconds in sorted((unknown | slow).items())))
