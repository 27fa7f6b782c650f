"""Every planted defect applies to the code of today, and names tests that are there."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from checkout import ROOT
from mutants.planting import Mutant, copy_package, problem_of, run_tests

MUTANTS = Mutant.read_all()
KNOWN = MUTANTS[0]
# rooms where nothing is decided that a client, a trainer or an operator would miss
WITHOUT = {"cluster/web", "cluster/cli", "cluster/client", "drafter_service/embedded", "drafter_service/shipped"}
MIN_LINES = 200  # of a room that needs one


def needing() -> set[str]:
    """Return the rooms that serve and are of some size."""
    lines: Counter[str] = Counter()
    for layer in ("verifier_service", "drafter_service", "cluster"):
        for path in (ROOT / layer).rglob("*.py"):
            lines[str(path.parent.relative_to(ROOT))] += path.read_text().count("\n")
    return {room for room, count in lines.items() if count >= MIN_LINES} - WITHOUT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_it_applies(mutant: Mutant) -> None:
    mutant.planted((ROOT / mutant.file).read_text())
    assert mutant.caught_by
    assert not [problem for test in mutant.caught_by if (problem := problem_of(test))]


def test_no_two_have_one_name() -> None:
    assert [id_ for id_, count in Counter(mutant.id for mutant in MUTANTS).items() if count > 1] == []


def test_every_room_that_serves_has_one() -> None:
    assert needing() - {mutant.room for mutant in MUTANTS} == set()


# The rules.


@pytest.mark.parametrize(
    "wrong",
    [
        replace(KNOWN, symbol="no_such_function"),
        replace(KNOWN, text="a text that is not there"),
        replace(KNOWN, text="="),  # more than once
        replace(KNOWN, replacement=KNOWN.text),
        replace(KNOWN, replacement="("),
    ],
)
def test_an_entry_that_does_not_apply_is_refused(wrong: Mutant) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        wrong.planted((ROOT / wrong.file).read_text())


def test_a_missing_test_is_named() -> None:
    own = "tests/mutants/test_entries.py"
    assert problem_of(f"{own}::test_a_missing_test_is_named") is None
    assert problem_of(f"{own}::test_none") == f"no test_none in {own}"
    assert problem_of("tests/mutants/none.py") == "no tests/mutants/none.py"


def test_a_copy_has_the_defect_and_the_checkout_has_not(tmp_path: Path) -> None:
    source = (ROOT / KNOWN.file).read_text()
    copy_package(tmp_path, KNOWN)
    assert (tmp_path / "outrider" / KNOWN.file).read_text() == KNOWN.planted(source)
    assert (ROOT / KNOWN.file).read_text() == source
    others = [path for path in (ROOT / KNOWN.file).parent.glob("*.py") if path.name != Path(KNOWN.file).name]
    assert all((tmp_path / "outrider" / path.relative_to(ROOT)).samefile(path) for path in others)


def test_the_tests_see_the_copy_and_a_survivor_is_told(tmp_path: Path) -> None:
    for name in ("caught", "survives"):
        (tmp_path / name).mkdir()
    known = next(mutant for mutant in MUTANTS if mutant.id == "waiting-discarded-served")
    run = run_tests(["tests/verifier_service/scheduling/test_waiting_queue.py"], tmp_path / "caught", known)
    assert run.is_red, run.output
    assert run.first_failed.startswith("tests/verifier_service/scheduling/test_waiting_queue.py::")
    run = run_tests(["tests/verifier_service/messages/test_tree.py"], tmp_path / "survives", known)
    assert run.has_passed, run.output
    assert not run.is_red
