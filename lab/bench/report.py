"""What `outrider bench latency` and `throughput` show of a result."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from outrider.lab.bench import figures as bench_figures
from outrider.lab.bench.figures import LIBRARY_ASSISTED, OFF, BenchResult, Row
from outrider.lab.report import Column, Report, Section, number

ARM = Column[Row]("arm", lambda row: row.arm)
SPEED = (
    Column[Row]("tokens/s", lambda row: number(row.figures.tokens_per_s, 1)),
    Column[Row]("ratio", lambda row: number(row.ratio, 2)),
)
ACCEPTANCE = (
    Column[Row]("accepted", lambda row: number(row.figures.acceptance_rate, 0, 100, " %")),
    Column[Row]("accept. length", lambda row: number(row.figures.mean_acceptance_length, 2)),
)
LATENCY = (
    Column[Row]("first token p50", lambda row: number(row.figures.time_to_first_token_p50_s, 1, 1e3, " ms")),
    Column[Row]("inter-token p50", lambda row: number(row.figures.inter_token_p50_s, 2, 1e3, " ms")),
    Column[Row]("p99", lambda row: number(row.figures.inter_token_p99_s, 2, 1e3, " ms")),
)
COST = (
    Column[Row]("bandwidth", lambda row: number(row.figures.bandwidth_share, 0, 100, " %")),
    Column[Row]("target steps", lambda row: number(row.figures.num_target_steps, 0)),
)
THROUGHPUT_COLUMNS = (ARM, *SPEED, *ACCEPTANCE, *LATENCY, *COST)
LATENCY_COLUMNS = (ARM, *LATENCY, *SPEED, *ACCEPTANCE, *COST)


def report_of(result: BenchResult, columns: Sequence[Column[Row]]) -> Report[Row]:
    """Return a result as it is shown."""
    workload = result.workload
    return Report(
        title=(
            f"{result.machine}. {len(workload.prompts)} prompts x {workload.max_tokens} tokens, "
            f"temperature {workload.temperature:g}, drafts of {workload.num_speculative_tokens}, "
            f"medians of {result.repeats} interleaved repeats."
        ),
        columns=columns,
        sections=sections_of(result.rows),
        notes=footnotes(result),
        definitions=(bench_figures.__doc__ or "").strip(),
        document=document_of(result),
    )


def sections_of(rows: Sequence[Row]) -> list[Section[Row]]:
    """Put the rows of one pair at one concurrency together under a title."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(f"{row.pair}, concurrency {row.concurrency}", []).append(row)
    return [Section(title, rows) for title, rows in found.items()]


def document_of(result: BenchResult) -> dict[str, Any]:
    """Describe the result for programs: every repeat's figures, times in seconds, rates as fractions."""
    workload = dataclasses.asdict(result.workload)
    prompts = workload.pop("prompts")
    return {
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
    if empty := [(row, row.figures.num_empty_rounds) for row in result.rows if row.figures.num_empty_rounds]:
        counts = "; ".join(f"{_place(row)}: {count:.0f}" for row, count in empty)
        notes.append(f"Decode steps of a request that ran without a draft though speculation was on: {counts}.")
    return [*notes, *_differences(result)]


def _differences(result: BenchResult) -> list[str]:
    """Say which tokens differed from plain decoding's, the arm `OFF`."""
    if result.workload.temperature > 0.0:
        return ["Sampled tokens are not compared."]
    what = f"Prompts (of {len(result.workload.prompts)}) whose greedy tokens differ from {OFF}'s"
    rows = [row for row in result.rows if row.first_differences]
    if not rows:
        return [f"{what}: none, in any arm."]
    counts = "; ".join(f"{_place(row)}: {len(row.first_differences or {})}" for row in rows)
    found = "; ".join(map(str, result.tallies))
    return [f"{what}: {counts}. In all other rows none.", f"Of Outrider's own, over all repeats: {found}."]


def _place(row: Row) -> str:
    return f"{row.pair}, concurrency {row.concurrency}, {row.arm}"
