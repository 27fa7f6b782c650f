"""How long a soak is, and where its tables go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from checkout import ROOT

FULL_RUNS = 20  # of each failure, for the tables that are committed


@dataclass(frozen=True)
class SoakLength:
    """How often a soak repeats each failure; one shorter than `FULL_RUNS` sends less load, too."""

    num_runs: int

    def of(self, full: int, at_least: int) -> int:
        """Return how much of a full soak's amount this one does."""
        return max(at_least, full * self.num_runs // FULL_RUNS)

    @property
    def pages(self) -> Path:
        """Return the folder of its tables; a short soak leaves those that are committed as they are."""
        folder = ROOT / ("docs/results" if self.num_runs >= FULL_RUNS else "build/soak")
        folder.mkdir(parents=True, exist_ok=True)
        return folder
