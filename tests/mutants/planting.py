"""Planted defects: read from their tables, planted in a copy of the package, and looked for with the tests they name.

An entry names a symbol and a text that occurs once in it, so that it outlives changes around it, and says so when the
code that it speaks of is gone.
"""

from __future__ import annotations

import ast
import compileall
import functools
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from checkout import ROOT

TABLES = Path(__file__).parent / "planted"
PACKAGES = ("proto", "verifier_service", "drafter_service", "cluster", "lab")
TEST_TIMEOUT_S = 60
RUN_TIMEOUT_S = 300
_FAILED = 1  # pytest's exit status when a test failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One planted defect."""

    id: str
    file: str  # from the root of the checkout
    symbol: str  # a function, a class or Class.method
    text: str  # once in the symbol
    replacement: str
    caught_by: Sequence[str]  # files, folders or tests without parameters
    defect: str

    @property
    def room(self) -> str:
        return str(Path(self.file).parent)

    def is_named(self, names: Sequence[str]) -> bool:
        """Return whether its id, file or room begins with one of the names."""
        return any(self.id.startswith(name) or self.file.startswith(name) for name in names)

    def planted(self, source: str) -> str:
        """Return the file's text with the defect; raises `ValueError` where it does not apply."""
        start, end = span_of(source, self.symbol)
        symbol = source[start:end]
        if symbol.count(self.text) != 1:
            raise ValueError(f"{self.id}: {symbol.count(self.text)} times in {self.file}, {self.symbol}: {self.text}")
        changed = symbol.replace(self.text, self.replacement)
        if ast.dump(ast.parse(textwrap.dedent(changed))) == ast.dump(ast.parse(textwrap.dedent(symbol))):
            raise ValueError(f"{self.id}: the replacement changes nothing")
        return source[:start] + changed + source[end:]

    @classmethod
    def read_all(cls) -> list[Self]:
        """Read all tables, in order."""
        tables = [tomllib.loads(path.read_text()) for path in sorted(TABLES.glob("*.toml"))]
        return [cls(id=id_, **entry) for table in tables for id_, entry in table.items()]


@functools.cache
def symbols_of(source: str) -> dict[str, tuple[int, int]]:
    """Return where each function, class and method of a source begins and ends."""
    ends = [0]
    for line in source.splitlines(keepends=True):
        ends.append(ends[-1] + len(line))
    found: dict[str, tuple[int, int]] = {}

    def note(nodes: Sequence[ast.stmt], prefix: str) -> None:
        for node in nodes:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                found[prefix + node.name] = ends[first - 1], ends[node.end_lineno or node.lineno]
                note(node.body, f"{prefix}{node.name}.")

    note(ast.parse(source).body, "")
    return found


def span_of(source: str, symbol: str) -> tuple[int, int]:
    """Return where a symbol begins and ends; raises `ValueError` if there is none of that name."""
    symbols = symbols_of(source)
    if symbol not in symbols:
        raise ValueError(f"no {symbol}")
    return symbols[symbol]


def problem_of(test: str) -> str | None:
    """Complain of a file, a folder or a test that is not there."""
    path, *names = test.split("::")
    if not (ROOT / path).exists():
        return f"no {path}"
    if not names:
        return None
    defined = re.search(rf"^ *(async )?def {names[-1]}\(", (ROOT / path).read_text(), re.MULTILINE)
    return None if defined else f"no {names[-1]} in {path}"


@functools.cache
def compile_checkout() -> None:
    """Write the bytecode of the checkout, which the copies then have: else each would compile the whole package."""
    for name in PACKAGES:
        compileall.compile_dir(ROOT / name, quiet=2)


def copy_package(folder: Path, mutant: Mutant | None) -> None:
    """Make `folder`/outrider: the package by hard links, of which one file is a copy with the defect."""
    compile_checkout()
    package = folder / "outrider"
    package.mkdir()
    shutil.copy(ROOT / "__init__.py", package)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, package / name, copy_function=os.link)
    if mutant is not None:
        path = package / mutant.file
        planted = mutant.planted(path.read_text())
        path.unlink()  # or the checkout's own file would be written
        path.write_text(planted)


@dataclass(frozen=True, slots=True)
class Run:
    """What the tests said."""

    status: int  # pytest's; -1: it did not end in time
    first_failed: str  # "": none
    seconds: float
    output: str

    @property
    def is_red(self) -> bool:
        """Whether a test failed: one that cannot be collected has found nothing."""
        return self.status == _FAILED

    @property
    def has_passed(self) -> bool:
        return self.status == 0


def run_tests(tests: Sequence[str], folder: Path, mutant: Mutant | None, timeout_s: float = RUN_TIMEOUT_S) -> Run:
    """Run tests over a copy of the package in an empty `folder`, until one fails.

    Processes that the tests start find the copy as well: PYTHONPATH comes before the editable install's finder.
    """
    copy_package(folder, mutant)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # as in run_all.sh
    options = ["-x", "-q", "-rfE", "--tb=line", f"--timeout={TEST_TIMEOUT_S}", "--hypothesis-profile=mutants"]
    options += ["-p", "no:cacheprovider", "-m", "not (service or soak or gpu)"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    start_s = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode() if isinstance(late.stdout, bytes) else ""
        return Run(-1, "", time.monotonic() - start_s, f"{output}\nno end after {timeout_s:g} s")
    failed = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", done.stdout, re.MULTILINE)
    return Run(done.returncode, failed[1] if failed else "", time.monotonic() - start_s, done.stdout + done.stderr)
