"""Show a benchmark's result: a table for the terminal, Markdown for a page, JSON for a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outrider.cluster.common.terminal import NOTHING
from outrider.lab.bench import figures as bench_figures
from outrider.lab.bench.figures import LIBRARY_ASSISTED, OFF, BenchResult, Row

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Column:
    """A heading and how a row's value is written under it."""

    heading: str
    cell: Callable[[Row], str]


def _number(value: float | None, digits: int, scale: float = 1.0, unit: str = "") -> str:
    return NOTHING if value is None else f"{value * scale:.{digits}f}{unit}"


ARM = Column("arm", lambda row: row.arm)
SPEED = (
    Column("tokens/s", lambda row: _number(row.figures.tokens_per_s, 1)),
    Column("ratio", lambda row: _number(row.ratio, 2)),
)
ACCEPTANCE = (
    Column("accepted", lambda row: _number(row.figures.acceptance_rate, 0, 100, " %")),
    Column("accept. length", lambda row: _number(row.figures.mean_acceptance_length, 2)),
)
LATENCY = (
    Column("first token p50", lambda row: _number(row.figures.time_to_first_token_p50_s, 1, 1e3, " ms")),
    Column("inter-token p50", lambda row: _number(row.figures.inter_token_p50_s, 2, 1e3, " ms")),
    Column("p99", lambda row: _number(row.figures.inter_token_p99_s, 2, 1e3, " ms")),
)
COST = (
    Column("bandwidth", lambda row: _number(row.figures.bandwidth_share, 0, 100, " %")),
    Column("target steps", lambda row: _number(row.figures.num_target_steps, 0)),
)
THROUGHPUT_COLUMNS = (ARM, *SPEED, *ACCEPTANCE, *LATENCY, *COST)
LATENCY_COLUMNS = (ARM, *LATENCY, *SPEED, *ACCEPTANCE, *COST)


def sections(result: BenchResult) -> list[tuple[str, list[Row]]]:
    """Put the rows of one pair at one concurrency together under a title."""
    found: dict[str, list[Row]] = {}
    for row in result.rows:
        found.setdefault(f"{row.pair}, concurrency {row.concurrency}", []).append(row)
    return list(found.items())


def to_table(result: BenchResult, columns: Sequence[Column]) -> RenderableType:
    """Draw the result for a terminal."""
    table = Table(title=headline(result), title_justify="left", caption_justify="left")
    for column in columns:
        table.add_column(column.heading, justify="left" if column is ARM else "right", no_wrap=True)
    for title, rows in sections(result):
        table.add_row(Text(title, style="bold"))
        for row in rows:
            table.add_row(*(column.cell(row) for column in columns))
        table.add_section()
    return Group(table, *(Text(note) for note in footnotes(result)))


def to_markdown(result: BenchResult, columns: Sequence[Column]) -> str:
    """Write the result as a page: the same cells and notes as the table's."""
    lines = [headline(result), ""]
    for title, rows in sections(result):
        lines += [f"**{title}**", ""]
        lines.append("| " + " | ".join(column.heading for column in columns) + " |")
        lines.append("|" + "|".join("---" if column is ARM else "---:" for column in columns) + "|")
        lines += ["| " + " | ".join(column.cell(row) for column in columns) + " |" for row in rows]
        lines.append("")
    lines += [f"- {note}" for note in footnotes(result)]
    return "\n".join(lines) + "\n"


def to_json(result: BenchResult) -> dict[str, Any]:
    """Describe the result for programs: every repeat's figures, times in seconds, rates as fractions."""
    workload = dataclasses.asdict(result.workload)
    prompts = workload.pop("prompts")
    return {
        "format_version": FORMAT_VERSION,
        "definitions": bench_figures.__doc__,
        "machine": dataclasses.asdict(result.machine),
        "target": result.target,
        "draft": result.draft,
        "baseline": result.baseline,
        "workload": {"num_prompts": len(prompts), **workload},
        "num_repeats": result.repeats,
        "read_bytes_per_s": {str(threads): speed for threads, speed in result.read_bytes_per_s.items()},
        "rows": [_row_json(row) for row in result.rows],
        "notes": footnotes(result),
    }


def _row_json(row: Row) -> dict[str, Any]:
    differences = row.first_differences
    return {
        "pair": row.pair,
        "concurrency": row.concurrency,
        "arm": row.arm,
        "ratio": row.ratio,
        **dataclasses.asdict(row.figures),
        "repeats": [dataclasses.asdict(figures) for figures in row.repeats],
        "first_differences": None if differences is None else {str(key): at for key, at in differences.items()},
    }


def headline(result: BenchResult) -> str:
    """Name the machine and the work."""
    workload = result.workload
    return (
        f"{result.machine}. {len(workload.prompts)} prompts x {workload.max_tokens} tokens, "
        f"temperature {workload.temperature:g}, drafts of {workload.num_speculative_tokens}, "
        f"medians of {result.repeats} interleaved repeats."
    )


def footnotes(result: BenchResult) -> list[str]:
    """Say what the table cannot: definitions, reservations, and which tokens differed."""
    reads = ", ".join(f"{speed / 1e9:.1f} GB/s with {n} threads" for n, speed in result.read_bytes_per_s.items())
    notes = [
        f"ratio: tokens/s over {result.baseline} of the same pair, concurrency and repeat.",
        "inter-token: gap between two outputs of a request / tokens in the later one. "
        "first token: from a request's start, waiting for its turn included.",
        "bandwidth: the target's weight bytes x target steps / elapsed, over the read speed measured with the arm's "
        f"threads ({reads}). Above 100 %: the weights stay in the cache.",
        "The end-of-sequence token is ignored: every arm makes the same number of tokens. No prefix cache.",
    ]
    if any(row.arm == LIBRARY_ASSISTED and row.concurrency > 1 for row in result.rows):
        notes.append(f"{LIBRARY_ASSISTED} takes one prompt at a time: concurrent requests run one after another.")
    if any(row.pair.startswith("target inflated") for row in result.rows):
        notes.append(
            "The inflated target computes the same function at a larger price: acceptance is the small pair's own, "
            "the cost ratio of target and draft is made."
        )
    return [*notes, *_empty_rounds(result), *_differences(result)]


def _empty_rounds(result: BenchResult) -> list[str]:
    rows = [row for row in result.rows if row.figures.num_empty_rounds]
    if not rows:
        return []
    counts = "; ".join(f"{_place(row)}: {row.figures.num_empty_rounds:.0f}" for row in rows)
    return [f"Decode steps of a request that ran without a draft though speculation was on: {counts}."]


def _differences(result: BenchResult) -> list[str]:
    if result.workload.temperature > 0.0:
        return ["Sampled tokens are not compared."]
    num_prompts = len(result.workload.prompts)
    what = f"Prompts (of {num_prompts}) whose greedy tokens differ from {OFF}'s"
    rows = [row for row in result.rows if row.first_differences]
    if not rows:
        return [f"{what}: none, in any arm."]
    counts = "; ".join(f"{_place(row)}: {len(row.first_differences or {})}" for row in rows)
    found = "; ".join(map(str, result.tallies))
    return [f"{what}: {counts}. In all other rows none.", f"Of Outrider's own, over all repeats: {found}."]


def _place(row: Row) -> str:
    return f"{row.pair}, concurrency {row.concurrency}, {row.arm}"
