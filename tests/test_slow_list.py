"""The list of slow tests names tests that are there, so that `make check` leaves out what it means to."""

from __future__ import annotations

import re
from pathlib import Path

from slow_list import SLOW_LIST, function_of, slow_functions

ROOT = Path(__file__).resolve().parents[1]


def test_every_slow_test_exists():
    assert slow_functions(), f"{SLOW_LIST.name} is empty: pytest --write-slow writes it"
    for name in slow_functions():
        path, *_, function = name.split("::")
        if function == "runTest":  # hypothesis makes it of a state machine
            continue
        assert re.search(rf"^ *(async )?def {function}\(", (ROOT / path).read_text(), re.MULTILINE), name


def test_cases_of_one_function_are_slow_together():
    assert function_of("tests/test_a.py::TestB::test_c[1-x]") == "tests/test_a.py::TestB::test_c"
