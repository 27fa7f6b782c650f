"""Count what was tried and what came of it, for the table that `make fuzz` writes."""

from __future__ import annotations

import os
import platform
from collections import Counter
from dataclasses import dataclass, field

GUIDED = "frames: guided by coverage"  # the target that only the whole of `make fuzz` has


@dataclass(slots=True)
class Tally:
    """Outcomes by target: one count per input."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)

    def count(self, target: str, outcome: str, num_inputs: int = 1) -> None:
        self.outcomes.setdefault(target, Counter())[outcome] += num_inputs

    def markdown(self, *, num_failed: int, seconds: float) -> str:
        """Describe the run."""
        total = sum(sum(counts.values()) for counts in self.outcomes.values())
        rows = "\n".join(
            f"| {target} | {sum(counts.values()):,} | {_listed(counts)} |"
            for target, counts in sorted(self.outcomes.items())
        )
        return (
            "# Fuzzing\n\n"
            f"{total:,} inputs for {len(self.outcomes)} targets; failed tests: {num_failed}. An input that is refused, "
            "by the error that the target documents, is no failure.\n\n"
            f"Written by `make fuzz` on {os.cpu_count()} cores ({platform.machine()}) after {seconds / 60:.0f} minutes."
            " A target fails, and is counted below, on an exception other than the one it documents, an answer of "
            "500, a gRPC status INTERNAL or UNKNOWN, an error that is not in its protocol's form, a server that no "
            "longer answers a good request, or a token of another request.\n\n"
            "| target | inputs | outcomes |\n|---|---|---|\n"
            f"{rows}\n"
        )


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{outcome} {count:,}" for outcome, count in counts.most_common())


TALLY = Tally()
