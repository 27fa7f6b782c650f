"""Plant every defect and see which test finds it: `make mutants` prints a table and writes docs/results/mutants.md.

python -m mutants.run [NAME ...]     the defects whose id, file or room begins with one of the names, or all
"""

from __future__ import annotations

import datetime
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from checkout import ROOT
from mutants.planting import Mutant, Run, run_tests

PAGE = ROOT / "docs/results/mutants.md"
UNCHANGED_TIMEOUT_S = 3600.0  # of the tests that found all defects
_NUM_SHOWN_LINES = 12


def found(mutant: Mutant) -> Run:
    """Plant one defect, and run the tests that must catch it."""
    with _folder() as folder:
        return run_tests(mutant.caught_by, Path(folder), mutant)


def of_unchanged_code(tests: Sequence[str]) -> Run:
    """Run the tests that failed over a copy without a defect: what is red there has found nothing."""
    with _folder() as folder:
        return run_tests(tests, Path(folder), None, UNCHANGED_TIMEOUT_S)


def _folder() -> tempfile.TemporaryDirectory[str]:
    """Make a folder where the package can be copied to by hard links: beside it."""
    (ROOT / "build").mkdir(exist_ok=True)
    return tempfile.TemporaryDirectory(prefix="mutant-", dir=ROOT / "build")


def runs(mutants: Sequence[Mutant], num_at_once: int) -> Iterator[tuple[Mutant, Run]]:
    with ThreadPoolExecutor(num_at_once) as threads:
        yield from zip(mutants, threads.map(found, mutants), strict=True)


def line(mutant: Mutant, run: Run) -> str:
    """Return a line of the table."""
    verdict = "red" if run.is_red else "SURVIVED"
    text = f"{verdict:8} {mutant.id:34} {mutant.room:31} {run.seconds:5.1f} s  {run.first_failed}"
    shown = run.output.strip().splitlines()[-_NUM_SHOWN_LINES:]
    return text if run.is_red else "\n".join([text, *(f"    {each}" for each in shown)])


def page(mutants: Sequence[Mutant], survivors: Sequence[str], seconds: float) -> str:
    """Return the page of a run of all defects."""
    by_room = Counter(mutant.room for mutant in mutants)
    rows = [f"| {room} | {count} |" for room, count in sorted(by_room.items())]
    left = f"Survived: {', '.join(survivors)}." if survivors else "None survived."
    day = datetime.datetime.now(datetime.UTC).date()
    return "\n".join(
        [
            "# Planted defects",
            "",
            f"{len(mutants)} defects in {len(by_room)} rooms, each planted alone, each looked for by the tests that it "
            f"names. {left}",
            "",
            f"Written by `make mutants` on {os.cpu_count()} cores on {day}, after {seconds / 60:.0f} minutes. An entry "
            "names a file, a symbol, a text that occurs once in it, what takes its place, and files or tests that must "
            "fail; they are in `tests/mutants/planted`. The package is copied by hard links, the one file is changed "
            "in the copy, and the tests run over it until the first fails. The tests that failed pass over a copy "
            "without a defect.",
            "",
            "`tests/mutants/test_entries.py` fails where an entry no longer applies: who moves code moves its entry. A "
            "new room brings its own.",
            "",
            "| room | defects |",
            "|---|---:|",
            *rows,
            "",
        ]
    )


def main(names: Sequence[str]) -> int:
    mutants = [mutant for mutant in Mutant.read_all() if not names or mutant.is_named(names)]
    begin_s = time.monotonic()
    survivors: list[str] = []
    failed: set[str] = set()
    for mutant, run in runs(mutants, os.cpu_count() or 1):
        click.echo(line(mutant, run))
        survivors += [] if run.is_red else [mutant.id]
        failed |= {run.first_failed} if run.is_red else set()
    unchanged = of_unchanged_code(sorted(failed))
    click.echo(unchanged.output if not unchanged.has_passed else f"{len(failed)} tests, green without a defect")
    seconds = time.monotonic() - begin_s
    click.echo(" ".join([f"{len(mutants)} defects, {len(survivors)} survived, {seconds:.0f} s", *survivors]))
    if not names and unchanged.has_passed:
        PAGE.write_text(page(mutants, survivors, seconds))
    return 0 if unchanged.has_passed and not survivors else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
