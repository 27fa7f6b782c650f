"""What `outrider bench peers` shows of a result."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from outrider.cluster.common.terminal import NOTHING
from outrider.lab.peers.arms import BASELINE
from outrider.lab.peers.measure import Load, Measured, equal_prompts, median_first_token_ms, median_speed, paired_ratio
from outrider.lab.report import Column, Report, Section


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

    def median(self, load: Load, name: str) -> float:
        """Return a peer's tokens/s at a load, or milliseconds where it is a first token's; 0 without a figure."""
        if not self.has(name, load):
            return 0.0
        of_samples = median_first_token_ms if load.is_first_token else median_speed
        return of_samples(self.measured.samples, name, load.name)

    def figure(self, load: Load, peer: PeerFacts) -> str:
        """Write a peer's median, and its ratio to our engine with speculation off in the same repeats."""
        if not self.has(peer.name, load):
            return NOTHING
        median = f"{self.median(load, peer.name):.0f}"
        if not self.has(BASELINE, load):
            return median
        pair = (BASELINE, peer.name) if load.is_first_token else (peer.name, BASELINE)  # times, not speeds
        return f"{median} ({paired_ratio(self.measured.samples, *pair, load.name):.2f})"

    def equality(self, peer: PeerFacts) -> str:
        """Write the share of the first load's prompts of which both make the same."""
        first = self.loads[0]
        if not (self.has(peer.name, first) and self.has(BASELINE, first)):
            return NOTHING
        return f"{equal_prompts(self.measured.samples, peer.name, BASELINE, first.name):.0%}"

    @property
    def notes(self) -> list[str]:
        """Say what the table cannot."""
        first = self.loads[0]
        notes = [
            f"tokens/s, and in brackets the median ratio to {BASELINE!r} of the same repeat; greedy, {self.repeats} "
            f"repeats, {first.max_tokens} tokens of each prompt, {len(first.prompts)} prompts or more a load.",
            f"same tokens: share of the prompts of {first.name!r} of which {BASELINE!r} makes the same.",
        ]
        if any(load.is_first_token for load in self.loads):
            notes.append(
                "first token of n, ms: from asking for 1 token after a prompt of n tokens, alone, to the answer, and "
                "in brackets the ratio of times: smaller is better here. Every repeat's prompt is new to every cache."
            )
        if self.has(BASELINE, first):
            steps_per_s = median_speed(self.measured.samples, BASELINE, first.name) / first.concurrency
            notes.append(
                f"Reading the weights once takes {self.weights_read_s * 1e3:.1f} ms here; a step of {BASELINE!r} at "
                f"{first.name!r} takes {1 / (steps_per_s * self.weights_read_s):.2f} times as long, prefill included."
            )
        notes += [f"{name} was not measured: {reason}." for name, reason in self.missing.items()]
        failures = self.measured.failures.items()
        return [*notes, *(f"No figure of {name!r} at {load!r}: {why}." for (name, load), why in failures)]


def _memory(peer: PeerFacts) -> str:
    return NOTHING if peer.peak_memory_bytes is None else f"{peer.peak_memory_bytes / 1e9:.2f} GB"


def report_of(result: PeersResult) -> Report[PeerFacts]:
    """Return a result as it is shown; its document has every sample's figure and no token ids."""
    return Report(
        title=f"{result.machine}; {result.num_threads} threads, {result.dtype}",
        columns=[
            Column("engine", lambda peer: peer.name),
            Column("version", lambda peer: peer.version, is_text=True),
            Column("ready", lambda peer: f"{peer.ready_s:.1f} s"),
            Column("memory", _memory),
            *(Column[PeerFacts](load.name, partial(result.figure, load)) for load in result.loads),
            Column("same tokens", result.equality),
        ],
        sections=[Section("", result.peers)],
        notes=result.notes,
        document={
            "machine": result.machine,
            "num_threads": result.num_threads,
            "dtype": result.dtype,
            "weights_read_s": result.weights_read_s,
            "peers": [dataclasses.asdict(peer) for peer in result.peers],
            "missing": dict(result.missing),
            "failures": [
                {"peer": name, "load": load, "reason": why} for (name, load), why in result.measured.failures.items()
            ],
            "samples": [
                {"peer": s.peer, "load": s.load, "repeat": s.repeat, "tokens_per_s": s.tokens_per_s}
                for s in result.measured.samples
            ],
        },
    )
