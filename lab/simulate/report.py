"""Show what a simulation found: tables for the terminal, a document for programs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outrider.cluster.common.terminal import NOTHING
from outrider.lab.report import FORMAT_VERSION, Column, number, table_of
from outrider.lab.simulate import figures as simulate_figures
from outrider.lab.simulate.apart import ApartRow
from outrider.lab.simulate.break_even import BreakEven, SteadyLayout
from outrider.lab.simulate.figures import RunFigures
from outrider.lab.simulate.kv import KvRow, KvStudy, PipelineRow
from outrider.lab.simulate.money import Worth
from outrider.lab.simulate.stages import LOADS, StageRow, StagesStudy, lines_of
from outrider.lab.simulate.steady import SteadyState
from outrider.lab.simulate.studies import DayStudy, FleetStudy, Layout, Plan

COLUMNS = (
    Column[RunFigures]("arm", lambda row: row.name),
    Column[RunFigures]("requests/s", lambda row: number(row.qps, 1)),
    Column[RunFigures]("accelerators", lambda row: str(row.num_accelerators)),
    Column[RunFigures]("tokens/s", lambda row: number(row.tokens_per_s, 0)),
    Column[RunFigures]("per accelerator", lambda row: number(row.tokens_per_s_per_accelerator, 0)),
    Column[RunFigures]("goodput", lambda row: number(row.goodput_tokens_per_s, 0)),
    Column[RunFigures]("in SLO", lambda row: f"{row.good_share:.0%}"),
    Column[RunFigures]("TTFT p50 ms", lambda row: number(row.ttft_p50_s, 0, 1e3)),
    Column[RunFigures]("p99", lambda row: number(row.ttft_p99_s, 0, 1e3)),
    Column[RunFigures]("TPOT p50 ms", lambda row: number(row.tpot_p50_s, 1, 1e3)),
    Column[RunFigures]("p99", lambda row: number(row.tpot_p99_s, 1, 1e3)),
    Column[RunFigures]("drafted", lambda row: number(row.draft_length, 1)),
    Column[RunFigures]("length", lambda row: number(row.mean_acceptance_length, 2)),
)


def runs_table(rows: Sequence[RunFigures], title: str) -> Table:
    """Draw one line per run."""
    return table_of(COLUMNS, rows, title)


def fleet_table(study: FleetStudy) -> RenderableType:
    """Draw one fleet's figures and the simulation's own speed."""
    speed = (
        f"{study.figures.num_requests:,} requests, {study.figures.num_steps:,} steps, {study.figures.num_events:,} "
        f"events in {study.wall_s:.1f} s: {study.events_per_s:,.0f} events/s, {study.requests_per_s:,.0f} requests/s"
    )
    return Group(runs_table([study.figures], "Simulated fleet"), Text(speed))


def stages_table(study: StagesStudy) -> RenderableType:
    """Draw what drafts bring over none: on stages by each way, and with experts over devices."""

    def cell(row: StageRow) -> str:
        return f"{row.ratio:.2f} ({row.draft_length}, {row.num_groups})"

    def column(place: int) -> Column[list[StageRow]]:
        return Column(f"{LOADS[place]} requests", lambda line: cell(line[place]))

    columns = [
        Column[list[StageRow]]("parts", lambda line: str(line[0].parts)),
        Column("drafts", lambda line: line[0].way, is_text=True),
        Column("acceptance", lambda line: f"{line[0].acceptance:g}"),
        *map(column, range(len(LOADS))),
    ]
    titles = ("A target in stages: tokens/s over none (draft length, groups)", "A mixture's experts over devices")
    tables = zip(titles, (study.stages, study.experts), strict=True)
    return Group(*(table_of(columns, lines_of(rows), title) for title, rows in tables))


APART_COLUMNS = (
    Column[ApartRow]("two verifiers", lambda row: row.name),
    Column[ApartRow]("drafts", lambda row: "yes" if row.has_drafts else "no"),
    Column[ApartRow]("streams", lambda row: str(row.num_streams)),
    Column[ApartRow]("prompts/s", lambda row: number(row.qps, 1)),
    Column[ApartRow]("tokens/s", lambda row: number(row.figures.tokens_per_s, 0)),
    Column[ApartRow]("TTFT p50 ms", lambda row: number(row.figures.long_ttft_p50_s, 0, 1e3)),
    Column[ApartRow]("p99", lambda row: number(row.figures.long_ttft_p99_s, 0, 1e3)),
    Column[ApartRow]("streams' p99", lambda row: number(row.figures.short_ttft_p99_s, 0, 1e3)),
    Column[ApartRow]("between outputs p50 ms", lambda row: number(row.figures.gap_p50_s, 1, 1e3)),
    Column[ApartRow]("p99", lambda row: number(row.figures.gap_p99_s, 1, 1e3)),
    Column[ApartRow]("first to second p99", lambda row: number(row.figures.second_p99_s, 1, 1e3)),
    Column[ApartRow]("tokens each", lambda row: number(row.figures.tokens_per_output, 2)),
)


def apart_table(rows: Sequence[ApartRow]) -> Table:
    """Draw prefill and decode apart beside verifiers that do both; times to first token are of long prompts."""
    return table_of(APART_COLUMNS, rows, "Prefill and decode apart, on two accelerators")


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


def _worth_columns() -> list[Column[Any]]:
    def cell(value: Callable[[Worth], float]) -> Callable[[Any], str]:
        return lambda row: number(value(row.worth), 0)

    return [Column(heading, cell(value)) for heading, value in WORTHS]


def plan_table(plan: Plan) -> RenderableType:
    """Draw what each layout needs for the rate, and what it gives for a device and for a price."""

    def bought(name: str, digits: int = 0) -> Callable[[Layout], str]:
        return lambda layout: number(getattr(plan.purchases.get(layout.name), name, None), digits)

    columns: list[Column[Layout]] = [
        Column("layout", lambda layout: layout.name),
        Column("verifiers", bought("num_verifiers")),
        Column("drafters", bought("num_drafters")),
        Column("accelerators", bought("num_accelerators")),
        Column("price/h", bought("price_per_hour", 2)),
        *_worth_columns(),
        Column("TPOT p50 ms", lambda one: NOTHING if one.capacity is None else number(one.capacity.tpot_p50_s, 1, 1e3)),
    ]
    title = f"{plan.qps:g} requests/s, {plan.share:.0%} of them within the bounds"
    return Group(table_of(columns, plan.layouts, title), Text(WORTH_NOTE), Text(plan.verdict))


def break_even_table(study: BreakEven) -> RenderableType:
    """Draw what layouts give in steady states, and up to which price drafters of their own pay."""

    def steady(cell: Callable[[SteadyState], str]) -> Callable[[SteadyLayout], str]:
        return lambda layout: NOTHING if layout.state is None else cell(layout.state)

    columns: list[Column[SteadyLayout]] = [
        Column("layout", lambda layout: layout.name),
        Column("drafters", lambda layout: str(layout.num_drafters)),
        *_worth_columns(),
        Column("requests each", steady(lambda state: str(state.num_decoding))),
        Column("draft", steady(lambda state: str(state.draft_length))),
        Column("TPOT ms", steady(lambda state: number(state.tpot_s, 1, 1e3))),
    ]
    table = table_of(columns, study.layouts, f"{study.num_verifiers} verifiers in a steady state")
    return Group(table, Text(WORTH_NOTE), Text(study.verdict), Text(), _ratios_table(study))


def _ratios_table(study: BreakEven) -> RenderableType:
    Ratios = tuple[float, dict[float, float | None]]

    def ratio(link_ms: float) -> Callable[[Ratios], str]:
        return lambda row: "never" if (at := row[1][link_ms]) is None else number(at, 2)

    links = next(iter(study.ratios.values()))
    columns: list[Column[Ratios]] = [Column("acceptance", lambda row: f"{row[0]:g}")]
    columns += [Column(f"link {link_ms:g} ms", ratio(link_ms)) for link_ms in links]
    wins = sum(at is not None and at >= study.price_ratio for row in study.ratios.values() for at in row.values())
    places = sum(len(row) for row in study.ratios.values())
    title = (
        f"A drafter's {study.draft_accelerator} may cost so much of a verifier's accelerator until drafters stop paying"
    )
    note = f"At the prices given it costs {study.price_ratio:.2f}: drafters pay at {wins} of {places} places."
    return Group(table_of(columns, study.ratios.items(), title), Text(note))


KV_COLUMNS = (
    Column[KvRow]("drafts", lambda row: row.name),
    Column[KvRow]("acceptance", lambda row: NOTHING if row.acceptance is None else f"{row.acceptance:g}"),
    Column[KvRow]("requests/s", lambda row: number(row.qps, 1)),
    Column[KvRow]("pool, blocks", lambda row: f"{row.num_blocks:,}"),
    Column[KvRow]("tokens/s", lambda row: number(row.tokens_per_s, 0)),
    Column[KvRow]("with KV", lambda row: number(row.num_requests, 1)),
    Column[KvRow]("blocks, mean", lambda row: number(row.mean_blocks, 0)),
    Column[KvRow]("peak", lambda row: f"{row.peak_blocks:,}"),
    Column[KvRow]("latency s", lambda row: number(row.latency_s, 2)),
    Column[KvRow]("preempted per 100", lambda row: number(row.preemptions_per_100, 1)),
    Column[KvRow]("computed twice", lambda row: f"{row.lost_share:.1%}"),
    Column[KvRow]("drafted", lambda row: number(row.draft_length, 1)),
    Column[KvRow]("length", lambda row: number(row.acceptance_length, 2)),
)
PIPELINE_COLUMNS = (
    Column[PipelineRow]("stages", lambda row: str(row.num_stages)),
    Column[PipelineRow]("acceptance", lambda row: f"{row.acceptance:g}"),
    Column[PipelineRow]("tokens per pass", lambda row: number(row.acceptance_length, 2)),
    Column[PipelineRow]("sequences, plain", lambda row: str(row.num_stages)),
    Column[PipelineRow]("with drafts", lambda row: number(row.num_sequences, 1)),
    Column[PipelineRow]("drafter as a stage", lambda row: number(row.num_with_stage, 1)),
    Column[PipelineRow]("blocks, plain", lambda row: number(row.plain_blocks, 0)),
    Column[PipelineRow]("with drafts", lambda row: number(row.draft_blocks, 0)),
)


def kv_table(study: KvStudy) -> RenderableType:
    """Draw what drafts save in KV at a load and in a pipeline, and what they cost in a full pool."""
    block = f"blocks of {study.block_size} tokens, {study.bytes_per_block / 1e6:.1f} MB each"
    return Group(
        table_of(KV_COLUMNS, study.loads, f"One verifier, the same requests with drafts and without; {block}"),
        Text(),
        table_of(PIPELINE_COLUMNS, study.pipeline, "A pipeline at as many tokens/s as one sequence per stage"),
        Text(),
        table_of(KV_COLUMNS, study.pools, "A full pool, with a queue before it"),
    )


def to_json(
    value: FleetStudy | DayStudy | Plan | BreakEven | KvStudy | Sequence[RunFigures | ApartRow],
) -> dict[str, Any]:
    """Describe a study for programs: times in seconds, rates as fractions."""
    if isinstance(value, Sequence):
        body: dict[str, Any] = {"runs": [dataclasses.asdict(row) for row in value]}
    else:
        body = dataclasses.asdict(value)
    return {"format_version": FORMAT_VERSION, "definitions": simulate_figures.__doc__, **body}
