"""Show what a simulation found: tables for the terminal, JSON for programs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outrider.cluster.common.terminal import NOTHING
from outrider.lab.simulate import figures as simulate_figures
from outrider.lab.simulate.apart import ApartRow
from outrider.lab.simulate.break_even import BreakEven
from outrider.lab.simulate.figures import RunFigures
from outrider.lab.simulate.kv import KvRow, KvStudy, PipelineRow
from outrider.lab.simulate.money import Worth
from outrider.lab.simulate.studies import DayStudy, FleetStudy, Plan

FORMAT_VERSION = 1
T = TypeVar("T")


def _number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return NOTHING if value is None else f"{value * scale:,.{digits}f}"


COLUMNS: tuple[tuple[str, Callable[[RunFigures], str]], ...] = (
    ("arm", lambda row: row.name),
    ("requests/s", lambda row: _number(row.qps, 1)),
    ("accelerators", lambda row: str(row.num_accelerators)),
    ("tokens/s", lambda row: _number(row.tokens_per_s, 0)),
    ("per accelerator", lambda row: _number(row.tokens_per_s_per_accelerator, 0)),
    ("goodput", lambda row: _number(row.goodput_tokens_per_s, 0)),
    ("in SLO", lambda row: f"{row.good_share:.0%}"),
    ("TTFT p50 ms", lambda row: _number(row.ttft_p50_s, 0, 1e3)),
    ("p99", lambda row: _number(row.ttft_p99_s, 0, 1e3)),
    ("TPOT p50 ms", lambda row: _number(row.tpot_p50_s, 1, 1e3)),
    ("p99", lambda row: _number(row.tpot_p99_s, 1, 1e3)),
    ("drafted", lambda row: _number(row.draft_length, 1)),
    ("length", lambda row: _number(row.mean_acceptance_length, 2)),
)


def runs_table(rows: Sequence[RunFigures], title: str) -> Table:
    """Draw one line per run."""
    return _columns_table(COLUMNS, rows, title)


def fleet_table(study: FleetStudy) -> RenderableType:
    """Draw one fleet's figures and the simulation's own speed."""
    speed = (
        f"{study.figures.num_requests:,} requests, {study.figures.num_steps:,} steps, {study.figures.num_events:,} "
        f"events in {study.wall_s:.1f} s: {study.events_per_s:,.0f} events/s, {study.requests_per_s:,.0f} requests/s"
    )
    return Group(runs_table([study.figures], "Simulated fleet"), Text(speed))


APART_COLUMNS: tuple[tuple[str, Callable[[ApartRow], str]], ...] = (
    ("two verifiers", lambda row: row.name),
    ("drafts", lambda row: "yes" if row.has_drafts else "no"),
    ("streams", lambda row: str(row.num_streams)),
    ("prompts/s", lambda row: _number(row.qps, 1)),
    ("tokens/s", lambda row: _number(row.figures.tokens_per_s, 0)),
    ("TTFT p50 ms", lambda row: _number(row.figures.long_ttft_p50_s, 0, 1e3)),
    ("p99", lambda row: _number(row.figures.long_ttft_p99_s, 0, 1e3)),
    ("streams' p99", lambda row: _number(row.figures.short_ttft_p99_s, 0, 1e3)),
    ("between outputs p50 ms", lambda row: _number(row.figures.gap_p50_s, 1, 1e3)),
    ("p99", lambda row: _number(row.figures.gap_p99_s, 1, 1e3)),
    ("first to second p99", lambda row: _number(row.figures.second_p99_s, 1, 1e3)),
    ("tokens each", lambda row: _number(row.figures.tokens_per_output, 2)),
)


def apart_table(rows: Sequence[ApartRow]) -> Table:
    """Draw prefill and decode apart beside verifiers that do both; times to first token are of long prompts."""
    return _columns_table(APART_COLUMNS, rows, "Prefill and decode apart, on two accelerators")


def day_table(study: DayStudy) -> RenderableType:
    """Draw a day's figures and how often the pools changed."""
    verifiers = [sample.num_verifiers for sample in study.samples]
    drafters = [sample.num_drafters for sample in study.samples]
    changes = f"{_num_turns(verifiers)} and {_num_turns(drafters)} turns from growing to shrinking or back"
    pools = f"verifiers {min(verifiers)} to {max(verifiers)}, drafters {min(drafters)} to {max(drafters)}; {changes}"
    return Group(runs_table([study.figures], "Simulated day"), Text(pools))


def _num_turns(sizes: Sequence[int]) -> int:
    moves = [1 if after > before else -1 for before, after in itertools.pairwise(sizes) if after != before]
    return sum(before != after for before, after in itertools.pairwise(moves))


WORTHS: tuple[tuple[str, Callable[[Worth], float]], ...] = (
    ("tokens/s per verifier device", lambda worth: worth.per_verifier_device),
    ("per device", lambda worth: worth.per_device),
    ("per price/h", lambda worth: worth.per_price),
)
WORTH_NOTE = (
    "Tokens/s at the highest load within the bounds, with the best number of drafters; per price/h: for each unit of "
    "price that is paid per hour."
)


def plan_table(plan: Plan) -> RenderableType:
    """Draw what each layout needs for the rate, and what it gives for a device and for a price."""
    table = Table(title=f"{plan.qps:g} requests/s, {plan.share:.0%} of them within the bounds", title_justify="left")
    bought = ("verifiers", "drafters", "accelerators", "price/h")
    for heading in ("layout", *bought, *(heading for heading, _ in WORTHS), "TPOT p50 ms"):
        table.add_column(heading, justify="left" if heading == "layout" else "right")
    for layout in plan.layouts:
        name, best = layout.name, layout.capacity
        if best is None:
            table.add_row(name, *([NOTHING] * len(bought)), *(["0"] * len(WORTHS)), NOTHING)
            continue
        purchase = plan.purchases[name]
        table.add_row(
            name,
            str(purchase.num_verifiers),
            str(purchase.num_drafters),
            str(purchase.num_accelerators),
            _number(purchase.price_per_hour, 2),
            *(_number(value(plan.worths[name]), 0) for _, value in WORTHS),
            _number(best.tpot_p50_s, 1, 1e3),
        )
    return Group(table, Text(WORTH_NOTE), Text(plan.verdict))


def break_even_table(study: BreakEven) -> RenderableType:
    """Draw what layouts give in steady states, and up to which price drafters of their own pay."""
    table = Table(title=f"{study.num_verifiers} verifiers in a steady state", title_justify="left")
    for heading in ("layout", "drafters", *(heading for heading, _ in WORTHS), "requests each", "draft", "TPOT ms"):
        table.add_column(heading, justify="left" if heading == "layout" else "right")
    for layout in study.layouts:
        state = layout.state
        table.add_row(
            layout.name,
            str(layout.num_drafters),
            *(_number(value(layout.worth), 0) for _, value in WORTHS),
            *((NOTHING,) * 3 if state is None else (str(state.num_decoding), str(state.draft_length))),
            *(() if state is None else (_number(state.tpot_s, 1, 1e3),)),
        )
    return Group(table, Text(WORTH_NOTE), Text(study.verdict), Text(), _ratios_table(study))


def _ratios_table(study: BreakEven) -> RenderableType:
    title = (
        f"A drafter's {study.draft_accelerator} may cost so much of a verifier's accelerator until drafters stop paying"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("acceptance")
    for link_ms in next(iter(study.ratios.values())):
        table.add_column(f"link {link_ms:g} ms", justify="right")
    for acceptance, row in study.ratios.items():
        table.add_row(f"{acceptance:g}", *("never" if at is None else _number(at, 2) for at in row.values()))
    wins = sum(at is not None and at >= study.price_ratio for row in study.ratios.values() for at in row.values())
    places = sum(len(row) for row in study.ratios.values())
    note = f"At the prices given it costs {study.price_ratio:.2f}: drafters pay at {wins} of {places} places."
    return Group(table, Text(note))


KV_COLUMNS: tuple[tuple[str, Callable[[KvRow], str]], ...] = (
    ("drafts", lambda row: row.name),
    ("acceptance", lambda row: NOTHING if row.acceptance is None else f"{row.acceptance:g}"),
    ("requests/s", lambda row: _number(row.qps, 1)),
    ("pool, blocks", lambda row: f"{row.num_blocks:,}"),
    ("tokens/s", lambda row: _number(row.tokens_per_s, 0)),
    ("with KV", lambda row: _number(row.num_requests, 1)),
    ("blocks, mean", lambda row: _number(row.mean_blocks, 0)),
    ("peak", lambda row: f"{row.peak_blocks:,}"),
    ("latency s", lambda row: _number(row.latency_s, 2)),
    ("preempted per 100", lambda row: _number(row.preemptions_per_100, 1)),
    ("computed twice", lambda row: f"{row.lost_share:.1%}"),
    ("drafted", lambda row: _number(row.draft_length, 1)),
    ("length", lambda row: _number(row.acceptance_length, 2)),
)
PIPELINE_COLUMNS: tuple[tuple[str, Callable[[PipelineRow], str]], ...] = (
    ("stages", lambda row: str(row.num_stages)),
    ("acceptance", lambda row: f"{row.acceptance:g}"),
    ("tokens per pass", lambda row: _number(row.acceptance_length, 2)),
    ("sequences, plain", lambda row: str(row.num_stages)),
    ("with drafts", lambda row: _number(row.num_sequences, 1)),
    ("drafter as a stage", lambda row: _number(row.num_with_stage, 1)),
    ("blocks, plain", lambda row: _number(row.plain_blocks, 0)),
    ("with drafts", lambda row: _number(row.draft_blocks, 0)),
)


def kv_table(study: KvStudy) -> RenderableType:
    """Draw what drafts save in KV at a load and in a pipeline, and what they cost in a full pool."""
    block = f"blocks of {study.block_size} tokens, {study.bytes_per_block / 1e6:.1f} MB each"
    return Group(
        _columns_table(KV_COLUMNS, study.loads, f"One verifier, the same requests with drafts and without; {block}"),
        Text(),
        _columns_table(PIPELINE_COLUMNS, study.pipeline, "A pipeline at as many tokens/s as one sequence per stage"),
        Text(),
        _columns_table(KV_COLUMNS, study.pools, "A full pool, with a queue before it"),
    )


def _columns_table(columns: Sequence[tuple[str, Callable[[T], str]]], rows: Sequence[T], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for place, (heading, _) in enumerate(columns):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(cell(row) for _, cell in columns))
    return table


def to_json(
    value: FleetStudy | DayStudy | Plan | BreakEven | KvStudy | Sequence[RunFigures | ApartRow],
) -> dict[str, Any]:
    """Describe a study for programs: times in seconds, rates as fractions."""
    if isinstance(value, Sequence):
        body: dict[str, Any] = {"runs": [dataclasses.asdict(row) for row in value]}
    else:
        body = dataclasses.asdict(value)
    return {"format_version": FORMAT_VERSION, "definitions": simulate_figures.__doc__, **body}
