"""Where `make fuzz` leaves its table; importing `budget` registers its profile before pytest looks for it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fuzz.budget import PROFILE
from fuzz.tally import GUIDED, TALLY

TABLE = Path(__file__).resolve().parents[2] / "docs" / "results" / "fuzz.md"
_STARTED_S = time.monotonic()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    is_complete = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    is_everything = session.config.getoption("--hypothesis-profile") == PROFILE and not session.config.option.keyword
    if is_complete and is_everything and TALLY.outcomes.keys() > {GUIDED}:
        seconds = time.monotonic() - _STARTED_S
        TABLE.write_text(TALLY.markdown(num_failed=session.testsfailed, seconds=seconds), encoding="utf-8")
