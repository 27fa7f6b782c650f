"""Show what was found: tables for the terminal and for a page, JSON for a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider.cluster.common.terminal import NOTHING, markdown_table
from outrider.lab.gateway.figures import Figures
from outrider.lab.gateway.processes import ROLES


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayResult:
    """Everything that is shown."""

    machine: str
    server: str  # what was measured, in words
    repeats: int
    rest_s: Mapping[str, float]  # processor time a second by role, without a request
    figures: tuple[Figures, ...]


def to_json(result: GatewayResult) -> dict[str, Any]:
    """Return the result with all times in seconds."""
    return asdict(result)


def to_markdown(result: GatewayResult) -> str:
    """Return the facts, a table of streams, one of requests, and the errors."""
    how_often = "one run" if result.repeats == 1 else f"medians of {result.repeats} runs"
    dearest = sorted(result.rest_s.items(), key=lambda item: -item[1])
    at_rest = ", ".join(f"{role} {1e3 * seconds:.1f}" for role, seconds in dearest)
    all_rest_ms = 1e3 * sum(result.rest_s.values())
    lines = [
        f"{result.server}; {how_often}. {result.machine}.",
        "",
        f"At rest it takes {all_rest_ms:.0f} ms a second ({at_rest}), which is in the costs.",
    ]
    streams = [one for one in result.figures if one.load.is_streamed]
    single = [one for one in result.figures if not one.load.is_streamed]
    if streams:
        lines += ["", "Processor time a streamed token, in us:", "", *_table(streams, scale=1e6)]
    if single:
        lines += ["", "Processor time a request of one token, in ms:", "", *_table(single, scale=1e3)]
    errors = [f"- {one.load.name}: {error}" for one in result.figures for error in one.errors]
    if errors:
        lines += ["", "**Errors:**", "", *errors]
    return "\n".join(lines) + "\n"


def _table(figures: Sequence[Figures], *, scale: float) -> list[str]:
    is_streamed = figures[0].load.is_streamed
    roles = _roles(figures)
    waits = ["first token p50, ms", "last, ms", "events a token"] if is_streamed else ["p50, ms", "longest, ms"]
    headings = ["door", "with", "streams" if is_streamed else "clients"]
    headings += [*roles, "together", "floor", "÷ floor", "tokens/s" if is_streamed else "requests/s", *waits]
    return markdown_table(headings, (_cells(one, roles, scale) for one in figures), num_left=2)


def _cells(one: Figures, roles: Sequence[str], scale: float) -> list[str]:
    load = one.load
    digits = 0 if load.is_streamed else 2
    size = f"{load.num_clients} x {load.num_tokens}" if load.is_streamed else str(load.num_clients)

    def shown(value: float | None, scale: float, digits: int) -> str:
        return NOTHING if value is None else f"{scale * value:,.{digits}f}"

    cells = [str(load.door), str(load.variant), size]
    cells += [shown(one.costs_s.get(role, 0.0), scale, digits) for role in roles]
    cells += [f"**{shown(one.together_s, scale, digits)}**", shown(one.floor_s, scale, digits + 1)]
    cells += [shown(one.floor_ratio, 1, 1), shown(one.num_per_s, 1, 0)]
    cells += [shown(one.wait_p50_s, 1e3, 1), shown(one.wait_last_s, 1e3, 0)]
    if load.is_streamed:
        cells.append(shown(one.events_per_token, 1, 3))
    if one.errors:
        cells[-1] = f"**{cells[-1]}, see errors**"
    return cells


def _roles(figures: Sequence[Figures]) -> list[str]:
    """Return the columns: our own service's roles in the order of a request's way, then others', dearest first."""
    known = [role for role in ROLES if any(role in one.costs_s for one in figures)]
    strange = {role for one in figures for role in one.costs_s} - set(known)
    worth = {role: max(one.costs_s.get(role, 0.0) / (one.together_s or 1.0) for one in figures) for role in strange}
    return [*sorted(strange, key=lambda role: -worth[role]), *known]
