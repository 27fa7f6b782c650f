"""How large the house may be: served lines do not grow without a line of CHANGELOG.md that says what for."""

from __future__ import annotations

import re

from rooms import ROOT, reached, sources

_BUDGET = re.compile(r"^- Served lines: ([\d,]+)\b", re.MULTILINE)  # the newest stands first


def budget(changelog: str) -> int:
    """Return how many lines may be served. Raises `ValueError` if the changelog does not say."""
    found = _BUDGET.search(changelog)
    if found is None:
        raise ValueError('CHANGELOG.md has no line "- Served lines: N, ..."')
    return int(found[1].replace(",", ""))


def test_served_lines_keep_their_budget() -> None:
    lines = sum(reached().values())
    allowed = budget((ROOT / "CHANGELOG.md").read_text())
    assert lines <= allowed, f"{lines - allowed:,} lines too many are served: take some away, or say what they are for"


def test_the_newest_line_is_the_budget() -> None:
    assert budget("### Size\n- Served lines: 1,234, for x\n- Served lines: 99, for y\n") == 1234


def test_what_is_reached_is_what_serves() -> None:
    found = reached()
    assert "outrider.verifier_service.engine.engine" in found
    assert "outrider.drafter_service.engine.engine" in found
    assert not any(module.startswith("outrider.lab") for module in found)
    assert len(found) < sum(len(sources(ROOT / layer)) for layer in ("verifier_service", "drafter_service", "cluster"))
