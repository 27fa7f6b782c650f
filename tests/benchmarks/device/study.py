"""`make study NAME=device`: what drafts bring on an accelerator that is played, with an H100's times.

Decisions are measured in virtual time, in which the host's work takes none and every run is the same; then all of it by
the clock, so that the host's work counts. Each row is one number of streams, whose first 64 steps do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click
import torch

from benchmarks.device.engines import DRAFT_LENGTH, Decoded, Pair, Played, apart, beside, decode_steps, played_engine
from benchmarks.device.played import ProcessorClock, VirtualClock, WallClock
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import markdown_table, numbers
from outrider.lab.report import describe_machine, files, show_page

STREAMS = (1, 16, 64, 256)
COLD_S = 0.15  # of each first call, of a drafter that nobody has warmed up
NUM_RUNS = 5  # of known drafts, read first and unread in turn; the median counts
NUM_BRANCHES = 4  # outcomes that a drafter which runs ahead prepares for
PLAIN_WIDTH = 200
COLD_PAIR = Pair(cold_s=COLD_S, is_warm=False)


def decisions(streams: Sequence[int], num_steps: int) -> Iterator[list[str]]:
    """Yield a row of what is decided with a drafter beside the target, in virtual time."""
    for count in streams:
        plain = decode_steps(played_engine(Pair(), VirtualClock()), count, num_steps=num_steps)
        warm, cold = (
            decode_steps(beside(pair, VirtualClock()), count, num_steps=num_steps) for pair in (Pair(), COLD_PAIR)
        )
        yield [str(count), f"{plain.tokens_per_s:.0f}", *_cells(warm, plain), *_cells(cold, plain)]


def by_the_clock(streams: Sequence[int], num_steps: int) -> Iterator[list[str]]:
    """Yield a row of what the same brings by the clock, also with the drafter in a process of its own."""

    def plain_of(count: int, *, is_async: bool) -> Decoded:
        return decode_steps(played_engine(Pair(), WallClock(), async_scheduling=is_async), count, num_steps=num_steps)

    for count in streams:
        plain, in_turn = plain_of(count, is_async=True), plain_of(count, is_async=False)
        pairs = [[_known(count, num_steps, reads_first=reads) for reads in (False, True)] for _ in range(NUM_RUNS)]
        known, read = (sorted(runs, key=lambda run: run.step_s)[NUM_RUNS // 2] for runs in zip(*pairs, strict=True))
        found = [known, read, decode_steps(beside(COLD_PAIR, WallClock()), count, num_steps=num_steps)]
        for num_branches in (0, NUM_BRANCHES):
            with apart(Pair(num_ahead_branches=num_branches)) as played:
                found.append(decode_steps(played, count, num_steps=num_steps))
        again = plain_of(count, is_async=True)
        ratios = [f"{one.tokens_per_s / plain.tokens_per_s:.2f}" for one in (again, *found)]
        steps = [f"{1e3 * one.step_s:.2f}" for one in (plain, in_turn, known)]
        device_s = decode_steps(beside(Pair(), VirtualClock()), count, num_steps=num_steps).step_s
        beyond = [f"{1e3 * (one.step_s - device_s) * (one.drafted > 1.0):.2f}" for one in (known, read)]
        yield [str(count), f"{plain.tokens_per_s:.0f}", *ratios, *steps, *beyond]


def _known(count: int, num_steps: int, *, reads_first: bool = False) -> Decoded:
    """Decode a second time on an engine that has done so before."""
    played = beside(Pair(), WallClock(), reads_first=reads_first)
    decode_steps(played, count, num_steps=num_steps)
    return decode_steps(played, count, num_steps=num_steps)


def forced_ms(count: int, num_steps: int) -> float:
    """Return the host's milliseconds of a round with drafts for all requests, whether they pay or not."""
    times = [
        decode_steps(beside(Pair(), clock), count, num_steps=num_steps, is_pinned=True).step_s
        for clock in (WallClock(), VirtualClock())
    ]
    return 1e3 * (times[0] - times[1])


PARTS = ("schedule", "drafting", "messages", "waiting", "forward", "verify", "commit", "ask", "outputs")


def parts(streams: Sequence[int], num_steps: int) -> Iterator[list[str]]:
    """Yield a row of what a step takes by part: without drafts, with a drafter beside the target, and elsewhere.

    In one process the host takes its processor's time, in two all is by the clock.
    """
    for count in streams:
        yield _parts_row(count, "none", played_engine(Pair(), ProcessorClock()), num_steps)
        yield _parts_row(count, "one process", beside(Pair(), ProcessorClock()), num_steps)
        with apart(Pair()) as played:
            yield _parts_row(count, "two", played, num_steps)


def _parts_row(count: int, where: str, played: Played, num_steps: int) -> list[str]:
    decode_steps(played, count, num_steps=num_steps)
    found = played.parts_ms(num_steps)
    return [str(count), where, f"{sum(found.values()):.2f}", *(f"{found.get(name, 0.0):.2f}" for name in PARTS)]


def _cells(found: Decoded, plain: Decoded) -> list[str]:
    return [f"{found.tokens_per_s / plain.tokens_per_s:.2f}", f"{found.drafted:.2f}"]


def _table(title: str, headings: Sequence[str], rows: Iterator[list[str]], say: Callable[[str], None]) -> str:
    found: list[list[str]] = []
    for row in rows:
        say(f"{title}: {' | '.join(row)}")
        found.append(row)
    return "\n".join([f"## {title}", "", *markdown_table(headings, found)])


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--streams", default=",".join(map(str, STREAMS)), show_default=True, callback=numbers)
@click.option("--steps", "num_steps", type=click.IntRange(2), default=128, show_default=True, help="That count.")
@click.option("--virtual", "is_virtual", is_flag=True, help="Decisions alone, in virtual time.")
@click.option("--parts", "is_parts", is_flag=True, help="Only what a step takes by part.")
@files("markdown")
def device(
    streams: tuple[int, ...], num_steps: int, is_virtual: bool, is_parts: bool, markdown_file: Path | None
) -> None:
    """Measure what drafts bring on a played accelerator: an 8 B target and a 1.4 B draft model on an H100."""
    torch.set_num_threads(1)

    def say(line: str) -> None:
        click.echo(line, err=True)

    drafts = f"drafts of {DRAFT_LENGTH}"
    tables = []
    if not is_parts:
        headings: tuple[str, ...] = ("streams", "plain, tokens/s", "warm / plain", "drafted", "cold / plain", "drafted")
        tables.append(_table("Decisions, in virtual time", headings, decisions(streams, num_steps), say))
    if not is_virtual and not is_parts:
        headings = ("streams", "plain, tokens/s", "plain again", "known", "read first", "cold", "own process")
        headings += ("it runs ahead", "plain, ms a step", "in turn, ms", "known, ms", "of it the host's, ms")
        headings += ("read first: the host's, ms",)
        tables.append(_table("By the clock", headings, by_the_clock(streams, num_steps), say))
        most = max(streams)
        tables.append(f"Drafts forced at {most} streams: the host's {forced_ms(most, num_steps):.2f} ms of a round.")
    if not is_virtual:
        headings = ("streams", "drafter", "ms a step", *PARTS)
        tables.append(_table("A step's time by part", headings, parts(streams, num_steps), say))
    page = "\n\n".join([f"{drafts}; {describe_machine()}.", *tables])
    show_page(page, PLAIN_WIDTH, markdown_file)
