"""From the runs of `outrider bench drafters` to its table, for the terminal, a page and a program.

near, far       in the verifier's process, in turns with the target; in a process of its own, on a core of its own
speed-up        tokens/s over plain decoding, measured beside the drafter in the same repeat; the target has the same
                cores in every arm, a far drafter's core comes on top
accept. length  1 + accepted / verifications with a draft
accepted at i   verifications that accept at least i draft tokens / verifications with a draft
drafted         draft tokens verified / verifications with a draft
empty           decode steps of a request that ran without a draft / all of them
B/token         encoded messages between verifier and drafter / committed tokens; the prompt is in there: its ids, and
                its hidden states where a drafter reads them all
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outrider.cluster.common.terminal import NOTHING
from outrider.lab.bench.drafter_arms import OFF, BenchPlan, Measurement, Place
from outrider.lab.bench.figures import Machine, Workload
from outrider.lab.same_tokens import Pair, Reference, Tally, compare, first_difference
from outrider.verifier_service.messages.request import SpeculationMetrics

FORMAT_VERSION = 1
_STATES = "States"
_FROM_DRAFTER = frozenset({"Draft", "Resync"})


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterRow:
    """One line of the table: medians of speeds, sums of counts. None: there was nothing to measure it by."""

    name: str
    place: Place
    concurrency: int
    tokens_per_s: float
    speed_up: float
    mean_acceptance_length: float | None
    acceptance_by_position: tuple[float, ...]
    drafted: float | None
    empty: float | None
    bytes_per_token: Mapping[str, float]  # by type of message; empty: nothing crosses a wire
    num_differing_prompts: int | None  # None: sampled tokens are not compared
    repeats: tuple[float, ...]  # tokens/s of each

    @property
    def bytes_to_drafter(self) -> float | None:
        return self._bytes(self.bytes_per_token.keys() - _FROM_DRAFTER)

    @property
    def bytes_of_states(self) -> float | None:
        return self._bytes(self.bytes_per_token.keys() & {_STATES})

    @property
    def bytes_back(self) -> float | None:
        return self._bytes(self.bytes_per_token.keys() & _FROM_DRAFTER)

    def _bytes(self, kinds: Iterable[str]) -> float | None:
        return sum(self.bytes_per_token[kind] for kind in kinds) if self.bytes_per_token else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftersResult:
    """Everything a report is made of."""

    machine: Machine
    target: str
    pair: str  # what was done to the target
    workload: Workload
    num_tree_nodes: int
    repeats: int
    rows: tuple[DrafterRow, ...]
    tally: Tally | None  # of all answers beside plain decoding's; None: sampled tokens are not compared


# --- figures ---


def result_of(
    plan: BenchPlan, machine: Machine, measurements: Sequence[Measurement], load: Callable[[], Reference]
) -> DraftersResult:
    """Add the runs up; `load` brings plain decoding where tokens differ."""
    is_greedy = plan.workload.temperature == 0.0
    return DraftersResult(
        machine=machine,
        target=plan.target,
        pair=plan.pair,
        workload=plan.workload,
        num_tree_nodes=plan.num_tree_nodes,
        repeats=plan.repeats,
        rows=rows_of(
            measurements,
            num_positions=plan.workload.num_speculative_tokens,
            compares=is_greedy,
        ),
        tally=compare(_pairs(plan.workload, measurements), load) if is_greedy else None,
    )


def rows_of(measurements: Sequence[Measurement], *, num_positions: int, compares: bool) -> tuple[DrafterRow, ...]:
    """Make a line of every arm at every concurrency; with `compares` its tokens are held against plain decoding's."""
    by_arm: dict[tuple[int, str, Place], list[Measurement]] = {}
    for found in measurements:
        by_arm.setdefault((found.concurrency, found.name, found.place), []).append(found)
    baselines = {
        (found.repeat, found.group, found.concurrency): found.tokens_per_s
        for found in measurements
        if found.name == OFF
    }
    plain = _plain(measurements)
    order = sorted(by_arm, key=lambda key: key[0])  # stable: arms stay in the order in which they were first measured
    return tuple(_row(by_arm[key], baselines, num_positions, plain if compares else None) for key in order)


def _plain(measurements: Sequence[Measurement]) -> Sequence[Sequence[int]]:
    return next(found.run.token_ids for found in measurements if found.name == OFF)


def _pairs(workload: Workload, measurements: Sequence[Measurement]) -> list[Pair]:
    """Return every answer beside plain decoding's first one."""
    return [
        Pair(
            what=f"{found.name}, {found.place}, concurrency {found.concurrency}, prompt {index + 1}",
            prompt=prompt,
            expected=expected,
            given=given,
        )
        for found in measurements
        for index, (prompt, expected, given) in enumerate(
            zip(workload.prompts, _plain(measurements), found.run.token_ids, strict=True)
        )
    ]


def _row(
    cell: Sequence[Measurement],
    baselines: Mapping[tuple[int, int, int], float],
    num_positions: int,
    plain: Sequence[Sequence[int]] | None,
) -> DrafterRow:
    first = cell[0]
    counts = _added(found.run.speculation for found in cell)
    num_rounds = counts.num_drafts + counts.num_empty_rounds
    return DrafterRow(
        name=first.name,
        place=first.place,
        concurrency=first.concurrency,
        tokens_per_s=statistics.median(found.tokens_per_s for found in cell),
        speed_up=_ratio(cell, baselines),
        mean_acceptance_length=1 + counts.num_accepted_tokens / counts.num_drafts if counts.num_drafts else None,
        acceptance_by_position=_by_position(counts, num_positions),
        drafted=counts.num_draft_tokens / counts.num_drafts if counts.num_drafts else None,
        empty=counts.num_empty_rounds / num_rounds if num_rounds else None,
        bytes_per_token=_bytes_per_token(cell) if first.place is Place.FAR else {},
        num_differing_prompts=None if plain is None else _num_differing(cell, plain),
        repeats=tuple(found.tokens_per_s for found in cell),
    )


def _by_position(counts: SpeculationMetrics, num_positions: int) -> tuple[float, ...]:
    if not counts.num_drafts:
        return ()
    found = counts.num_accepted_per_position  # no further than drafts went
    return tuple(number / counts.num_drafts for number in (*found, *[0] * (num_positions - len(found))))


def _added(metrics: Iterable[SpeculationMetrics]) -> SpeculationMetrics:
    total = SpeculationMetrics()
    for one in metrics:
        total = total.plus(one)
    return total


def _ratio(cell: Sequence[Measurement], baselines: Mapping[tuple[int, int, int], float]) -> float:
    """Compare with what was measured beside it, so that a machine that slows down in between slows both sides."""
    return statistics.median(
        found.tokens_per_s / baselines[found.repeat, found.group, found.concurrency] for found in cell
    )


def _bytes_per_token(cell: Sequence[Measurement]) -> dict[str, float]:
    num_tokens = sum(found.num_tokens for found in cell)
    sizes: Counter[str] = Counter()
    for found in cell:
        sizes.update(found.run.wire_bytes)
    return {kind: size / num_tokens for kind, size in sorted(sizes.items())}


def _num_differing(cell: Sequence[Measurement], plain: Sequence[Sequence[int]]) -> int:
    """Count the prompts whose tokens differ in any repeat."""
    return sum(
        any(first_difference(found.run.token_ids[prompt], expected) is not None for found in cell)
        for prompt, expected in enumerate(plain)
    )


# --- the report ---


def headings(result: DraftersResult) -> tuple[str, ...]:
    """Name the columns; the first two are text."""
    positions = ", ".join(str(position + 1) for position in range(result.workload.num_speculative_tokens))
    return (
        *("drafter", "where", "tokens/s", "speed-up", "accept. length"),
        *(f"accepted at {positions} (%)", "drafted", "empty", "B/token to drafter", "of them states", "back"),
    )


NUM_TEXT_COLUMNS = 2


def cells(row: DrafterRow) -> list[str]:
    """Write one row under `headings`."""
    return [
        row.name,
        NOTHING if row.name == OFF else row.place.value,
        f"{row.tokens_per_s:.1f}",
        f"{row.speed_up:.2f}",
        _number(row.mean_acceptance_length, "{:.2f}"),
        " ".join(f"{share * 100:.0f}" for share in row.acceptance_by_position) or NOTHING,
        _number(row.drafted, "{:.1f}"),
        _number(row.empty, "{:.0f} %", 100),
        _number(row.bytes_to_drafter, "{:.0f}"),
        _number(row.bytes_of_states, "{:.0f}"),
        _number(row.bytes_back, "{:.0f}"),
    ]


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return NOTHING if value is None else form.format(value * scale)


def sections(result: DraftersResult) -> list[tuple[str, list[DrafterRow]]]:
    """Put the rows of one concurrency together under a title."""
    found: dict[str, list[DrafterRow]] = {}
    for row in result.rows:
        found.setdefault(f"{result.pair}, concurrency {row.concurrency}", []).append(row)
    return list(found.items())


def to_table(result: DraftersResult) -> RenderableType:
    """Draw the result for a terminal."""
    table = Table(title=headline(result), title_justify="left")
    for index, heading in enumerate(headings(result)):
        table.add_column(heading, justify="left" if index < NUM_TEXT_COLUMNS else "right")
    for title, rows in sections(result):
        table.add_row(Text(title, style="bold"))
        for row in rows:
            table.add_row(*cells(row))
        table.add_section()
    return Group(table, *(Text(note) for note in notes(result)))


def to_markdown(result: DraftersResult) -> str:
    """Write a page: the machine and the work, a table per concurrency, what the words mean."""
    lines = ["# Every drafter", "", f"`outrider bench drafters`: {headline(result)}", ""]
    names = headings(result)
    for title, rows in sections(result):
        lines += [f"**{title}**", "", "| " + " | ".join(names) + " |"]
        lines.append("|" + "|".join("---" if index < NUM_TEXT_COLUMNS else "---:" for index in range(len(names))) + "|")
        lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
        lines.append("")
    lines += [f"- {note}" for note in notes(result)]
    return "\n".join([*lines, "", "```", definitions(), "```", ""])


def to_json(result: DraftersResult) -> dict[str, Any]:
    """Describe the result for programs: rates as fractions, bytes by type of message."""
    workload = dataclasses.asdict(result.workload)
    prompts = workload.pop("prompts")
    return {
        "format_version": FORMAT_VERSION,
        "definitions": definitions(),
        "machine": dataclasses.asdict(result.machine),
        "target": result.target,
        "pair": result.pair,
        "workload": {"num_prompts": len(prompts), **workload},
        "num_tree_nodes": result.num_tree_nodes,
        "num_repeats": result.repeats,
        "rows": [dataclasses.asdict(row) for row in result.rows],
        "notes": notes(result),
    }


def definitions() -> str:
    return (__doc__ or "").partition("\n\n")[2].strip()


def headline(result: DraftersResult) -> str:
    """Name the machine and the work."""
    workload = result.workload
    num_prompt_tokens = sum(map(len, workload.prompts))
    return (
        f"{result.machine}. {len(workload.prompts)} prompts ({num_prompt_tokens} tokens) x "
        f"{workload.max_tokens} tokens, temperature {workload.temperature:g}, drafts of "
        f"{workload.num_speculative_tokens}, trees of {result.num_tree_nodes}; speeds are medians of "
        f"{result.repeats} interleaved repeats."
    )


def notes(result: DraftersResult) -> list[str]:
    """Say what the table cannot."""
    found = [
        "The end-of-sequence token is ignored: every arm makes the same number of tokens. No prefix cache; what a "
        "drafter remembers of earlier responses begins anew in every run."
    ]
    if result.pair.startswith("target inflated"):
        found.append(
            "The inflated target computes the same function and the same hidden states at a larger price: acceptance "
            "is the small pair's own, the cost ratio of target and drafter is made."
        )
    return [*found, _differences(result)]


def _differences(result: DraftersResult) -> str:
    if result.tally is None:
        return "Sampled tokens are not compared."
    what = f"Prompts (of {len(result.workload.prompts)}) whose greedy tokens differ from plain decoding's"
    differing = [
        f"{row.name}, {row.place}, concurrency {row.concurrency}: {row.num_differing_prompts}"
        for row in result.rows
        if row.num_differing_prompts
    ]
    if not differing:
        return f"{what}: none, in any arm."
    return f"{what}: {'; '.join(differing)}. In all other rows none. Over all repeats: {result.tally}."
