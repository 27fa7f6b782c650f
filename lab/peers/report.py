"""Show what `outrider bench peers` found: a table for the terminal, Markdown for a page, JSON for a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outrider.cluster.common.terminal import NOTHING, markdown_table
from outrider.lab.peers.arms import BASELINE
from outrider.lab.peers.measure import Load, Measured, equal_prompts, median_speed, paired_ratio


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """What a peer is, whatever it is asked."""

    name: str
    version: str
    ready_s: float
    peak_memory_bytes: int | None  # None: it had ended before it could be asked


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersResult:
    """One run of all peers."""

    machine: str
    num_threads: int
    dtype: str
    loads: tuple[Load, ...]
    repeats: int
    measured: Measured
    peers: tuple[PeerFacts, ...]
    missing: Mapping[str, str]  # why a peer was not measured
    weights_read_s: float  # of reading the weights once, at this machine's measured speed

    def has(self, name: str, load: Load) -> bool:
        """Say whether a peer was measured at a load."""
        return any((sample.peer, sample.load) == (name, load.name) for sample in self.measured.samples)


def _headings(result: PeersResult) -> list[str]:
    loads = [load.name for load in result.loads]
    return ["engine", "version", "ready", "memory", *loads, "same tokens"]


def _rows(result: PeersResult) -> list[list[str]]:
    return [
        [
            peer.name,
            peer.version,
            f"{peer.ready_s:.1f} s",
            NOTHING if peer.peak_memory_bytes is None else f"{peer.peak_memory_bytes / 1e9:.2f} GB",
            *(_cell(result, peer.name, load) for load in result.loads),
            _equality(result, peer.name),
        ]
        for peer in result.peers
    ]


def _cell(result: PeersResult, name: str, load: Load) -> str:
    """Write tokens/s, and the ratio to our engine with speculation off in the same repeats."""
    if not result.has(name, load):
        return NOTHING
    samples = result.measured.samples
    speed = median_speed(samples, name, load.name)
    if not result.has(BASELINE, load):
        return f"{speed:.0f}"
    return f"{speed:.0f} ({paired_ratio(samples, name, BASELINE, load.name):.2f})"


def _equality(result: PeersResult, name: str) -> str:
    first = result.loads[0]
    if not (result.has(name, first) and result.has(BASELINE, first)):
        return NOTHING
    return f"{equal_prompts(result.measured.samples, name, BASELINE, first.name):.0%}"


def _notes(result: PeersResult) -> list[str]:
    first = result.loads[0]
    notes = [
        f"tokens/s, and in brackets the median ratio to {BASELINE!r} of the same repeat; greedy, {result.repeats} "
        f"repeats, {first.max_tokens} tokens of each prompt, {len(first.prompts)} prompts or more a load.",
        f"same tokens: share of the prompts of {first.name!r} of which {BASELINE!r} makes the same.",
    ]
    if result.has(BASELINE, first):
        steps_per_s = median_speed(result.measured.samples, BASELINE, first.name) / first.concurrency
        notes.append(
            f"Reading the weights once takes {result.weights_read_s * 1e3:.1f} ms here; a step of {BASELINE!r} at "
            f"{first.name!r} takes {1 / (steps_per_s * result.weights_read_s):.2f} times as long, prefill included."
        )
    notes += [f"{name} was not measured: {reason}." for name, reason in result.missing.items()]
    failures = result.measured.failures.items()
    return [*notes, *(f"No figure of {name!r} at {load!r}: {why}." for (name, load), why in failures)]


def _title(result: PeersResult) -> str:
    return f"{result.machine}; {result.num_threads} threads, {result.dtype}"


def to_table(result: PeersResult) -> RenderableType:
    """Draw the result for a terminal."""
    table = Table(title=_title(result), title_justify="left")
    for number, heading in enumerate(_headings(result)):
        table.add_column(heading, justify="left" if number < 2 else "right", no_wrap=True)
    for row in _rows(result):
        table.add_row(*row)
    return Group(table, *(Text(note) for note in _notes(result)))


def to_markdown(result: PeersResult) -> str:
    """Write the result as a page: the same cells and notes as the table's."""
    lines = [_title(result), "", *markdown_table(_headings(result), _rows(result), num_left=2), ""]
    return "\n".join([*lines, *(f"- {note}" for note in _notes(result))]) + "\n"


def to_json(result: PeersResult) -> dict[str, Any]:
    """Return every sample's figure; token ids are left out."""
    samples = [
        {"peer": s.peer, "load": s.load, "repeat": s.repeat, "tokens_per_s": s.tokens_per_s}
        for s in result.measured.samples
    ]
    return {
        "machine": result.machine,
        "num_threads": result.num_threads,
        "dtype": result.dtype,
        "weights_read_s": result.weights_read_s,
        "peers": [dataclasses.asdict(peer) for peer in result.peers],
        "missing": dict(result.missing),
        "failures": [
            {"peer": name, "load": load, "reason": why} for (name, load), why in result.measured.failures.items()
        ],
        "samples": samples,
    }
