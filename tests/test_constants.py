"""Every constant of the rooms that decide how much is drafted says why it has its value."""

from __future__ import annotations

import ast
import re

import pytest

from checkout import ROOT

ROOMS = ("verifier_service/pricing", "cluster/router")
NAME = re.compile(r"_?[A-Z][A-Z0-9_]*")


def unexplained(source: str) -> list[str]:
    """Return the module-level constants without a comment behind them or on the line before."""
    lines = ["", *source.splitlines()]
    found: list[str] = []
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        is_explained = "  # " in lines[node.end_lineno or node.lineno] or lines[node.lineno - 1].startswith("# ")
        found += [name for name in names if NAME.fullmatch(name) and not is_explained]
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_every_constant_says_why(room: str) -> None:
    files = sorted((ROOT / room).glob("*.py"))
    assert files
    assert {file.name: names for file in files if (names := unexplained(file.read_text()))} == {}


def test_a_bare_constant_is_found() -> None:
    assert unexplained("A = 1\nB = 2  # since\n# since\nC, D = 3, 4\n\nE: int = 5\n") == ["A", "E"]
