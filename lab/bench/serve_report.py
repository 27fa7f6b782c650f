"""Show what a load of a server measured: a table for the terminal, JSON for a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outrider.cluster.common.terminal import NOTHING
from outrider.lab.bench import serve_figures as bench_serve_figures
from outrider.lab.bench.serve import ServeBenchResult
from outrider.lab.bench.serve_figures import Latency, LoadFigures

FORMAT_VERSION = 1
MAX_ERRORS_SHOWN = 10


def _ms(latency: Latency | None, name: str) -> str:
    return NOTHING if latency is None else f"{getattr(latency, name) * 1e3:.1f}"


def _number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return NOTHING if value is None else f"{value * scale:.{digits}f}"


POINTS_PER_TABLE = 5  # a figure a line and a load a column: that fits 80 columns
FIGURES: tuple[tuple[str, Callable[[LoadFigures], str]], ...] = (
    ("completed", lambda row: f"{row.num_completed}/{row.num_requests}"),
    ("errors", lambda row: str(sum(row.errors.values()))),
    ("requests/s", lambda row: _number(row.requests_per_s, 2)),
    ("tokens/s", lambda row: _number(row.tokens_per_s, 1)),
    ("goodput", lambda row: _number(row.goodput_tokens_per_s, 1)),
    ("in SLO", lambda row: f"{row.num_within_slo / row.num_requests:.0%}"),
    ("TTFT p50 ms", lambda row: _ms(row.ttft, "p50_s")),
    ("TTFT p99 ms", lambda row: _ms(row.ttft, "p99_s")),
    ("ITL p50 ms", lambda row: _ms(row.itl, "p50_s")),
    ("ITL p99 ms", lambda row: _ms(row.itl, "p99_s")),
    ("TPOT p50 ms", lambda row: _ms(row.tpot, "p50_s")),
    ("E2EL p50 ms", lambda row: _ms(row.e2el, "p50_s")),
    ("accepted %", lambda row: _number(row.acceptance_rate, 0, 100)),
    ("length", lambda row: _number(row.mean_acceptance_length, 2)),
)


def axis_name(result: ServeBenchResult) -> str:
    """Name what the points differ in."""
    return "requests/s sent" if result.figures[0].point.request_rate is not None else "concurrency"


def to_table(result: ServeBenchResult) -> RenderableType:
    """Draw the result for a terminal; every kind of error is listed with its count."""
    options = result.options
    title = (
        f"{result.model} at {result.url}: {len(options.prompts)} requests a point, at most {options.max_tokens} tokens"
    )
    tables = []
    for first in range(0, len(result.figures), POINTS_PER_TABLE):
        rows = result.figures[first : first + POINTS_PER_TABLE]
        table = Table(title=title if first == 0 else None, title_justify="left")
        table.add_column(axis_name(result), no_wrap=True)
        for row in rows:
            table.add_column(row.point.value, justify="right", no_wrap=True)
        for name, cell in FIGURES:
            table.add_row(name, *(cell(row) for row in rows))
        tables.append(table)
    return Group(*tables, *(Text(note) for note in notes(result)))


def notes(result: ServeBenchResult) -> list[str]:
    """Say what the figures do not: the SLO, repeated prompts, and the errors by their text."""
    slo = result.options.slo
    bounds = [
        f"{name} at most {bound * 1e3:g} ms"
        for name, bound in (("TTFT", slo.ttft_s), ("p99 of a request's gaps", slo.itl_s))
        if bound is not None
    ]
    lines = [f"SLO: {' and '.join(bounds)}." if bounds else "No SLO: goodput is tokens/s."]
    if len(result.figures) > 1:
        lines.append("Every point sends the same prompts: a prefix cache knows them from the second point on.")
    for row in result.figures:
        most_common = sorted(row.errors.items(), key=lambda item: -item[1])
        lines += [f"{row.point.value}: {count} x {text}" for text, count in most_common[:MAX_ERRORS_SHOWN]]
        if rest := most_common[MAX_ERRORS_SHOWN:]:
            lines.append(f"{row.point.value}: {sum(count for _, count in rest)} x {len(rest)} other errors")
    return lines


def to_json(result: ServeBenchResult) -> dict[str, Any]:
    """Describe the result for programs: times in seconds, rates as fractions; an infinite rate is the text "inf"."""
    options = dataclasses.asdict(result.options)
    num_prompts = len(options.pop("prompts"))
    del options["points"]
    return {
        "format_version": FORMAT_VERSION,
        "definitions": bench_serve_figures.__doc__,
        "url": result.url,
        "model": result.model,
        "workload": {**options, "model": result.model, "num_requests": num_prompts},
        "points": [_row_json(row) for row in result.figures],
    }


def _row_json(row: LoadFigures) -> dict[str, Any]:
    fields = dataclasses.asdict(row)
    del fields["point"]
    load = {"concurrency": row.point.concurrency} if row.point.concurrency else {"request_rate": row.point.value}
    return {**load, **fields, "errors": dict(row.errors)}
