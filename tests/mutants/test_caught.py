"""Every planted defect is caught by a test that it names: `make mutants` does the same and writes the page."""

from __future__ import annotations

import pytest

from mutants.planting import RUN_TIMEOUT_S, Mutant
from mutants.run import found
from soak_length import SoakLength

pytestmark = [pytest.mark.soak, pytest.mark.timeout(RUN_TIMEOUT_S + 60)]

SHORTEST = 40  # of a short soak


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mutants = Mutant.read_all()
    num_taken = SoakLength(metafunc.config.getoption("--soak-runs")).of(len(mutants), at_least=SHORTEST)
    taken = mutants[:: max(1, len(mutants) // num_taken)]  # from every table
    metafunc.parametrize("mutant", taken, ids=lambda mutant: mutant.id)


def test_it_is_caught(mutant: Mutant) -> None:
    run = found(mutant)
    assert run.is_red, f"{mutant.defect}: {run.output}"
