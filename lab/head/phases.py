"""Work in phases that share one budget of time; each is done once, and what came of it stands in a file.

    minutes ──> phase, phase, phase      each gets its share of what is left, beside those that are still to come
                  │
                  └─> figures.json       a phase that stands there is not done again by the next start

A phase that was cut off is begun again and finds in the folder what it had made.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One part of the work."""

    name: str
    does: str  # what it does, as it is said before it begins
    share: float  # of the time, beside the shares of the others
    work: Callable[[float], Mapping[str, Any]]  # takes the seconds that it may last, returns its figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What came of a phase; its figures hold `result`, a sentence's worth of them."""

    does: str
    seconds: float
    figures: Mapping[str, Any]


@dataclass(slots=True)
class Record:
    """What is done, in a file that is replaced as a whole after every phase."""

    path: Path
    settings: Mapping[str, str]  # what all starts must have in common
    done: dict[str, Done] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, settings: Mapping[str, str]) -> Record:
        """Read what earlier starts have done. Raises `ValueError` where they had other settings."""
        record = cls(path, settings)
        if not path.exists():
            return record
        whole = json.loads(path.read_text())
        for name in sorted(settings.keys() | whole["settings"].keys()):
            ours, theirs = settings.get(name), whole["settings"].get(name)
            if ours != theirs:
                raise ValueError(f"{name}: {ours} does not go on with what {path} has, which is of {theirs}")
        record.done = {name: Done(**fields) for name, fields in whole["phases"].items()}
        return record

    def add(self, name: str, done: Done) -> None:
        """Write a phase down."""
        self.done[name] = done
        phases = {name: asdict(each) for name, each in self.done.items()}
        whole = {"settings": dict(self.settings), "phases": phases}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(whole, indent=2) + "\n")
        os.replace(partial, self.path)


def run_phases(
    phases: Sequence[Phase],
    record: Record,
    *,
    minutes: float,
    say: Callable[[str], None],
    clock: Callable[[], float],
    after_each: Callable[[], None] = lambda: None,
) -> bool:
    """Do what is not done yet, as long as there is time; return whether all is done now.

    A phase is told how long it may last and may last longer: what it takes too much the later ones have less. None is
    begun without time.
    """
    begin_s = clock()
    for index, phase in enumerate(phases):
        if phase.name in record.done:
            earlier = record.done[phase.name]
            say(f"{phase.name}: done before, {earlier.figures['result']} ({earlier.seconds:.1f} s)")
            continue
        phase_begin_s = clock()
        left_s = minutes * 60 - (phase_begin_s - begin_s)
        if left_s <= 0:
            say(f"{phase.name}: no time is left; the same command goes on here")
            return False
        pending = [each.share for each in phases[index:] if each.name not in record.done]
        limit_s = left_s * phase.share / sum(pending)
        say(f"{phase.name}: {phase.does}; {limit_s:.0f} s for it")
        figures = phase.work(limit_s)
        took_s = clock() - phase_begin_s
        record.add(phase.name, Done(does=phase.does, seconds=round(took_s, 1), figures=figures))
        say(f"{phase.name}: {figures['result']} ({took_s:.1f} s)")
        after_each()
    return True
