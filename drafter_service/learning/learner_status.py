"""A learner's counters, which outlive its process, and what they say to an operator."""

from __future__ import annotations

from collections import deque
from typing import Any

from outrider.drafter_service.engine.learning_messages import VersionCounts
from outrider.drafter_service.learning.messages import VersionRecord
from outrider.drafter_service.learning.totals import Totals
from outrider.drafter_service.learning.version_registry import VersionRegistry

NUM_LOSSES = 16  # steps over which the shown loss is the mean
COUNTERS = ("num_candidates", "num_published", "num_refused", "num_rolled_back")


class LearnerLog:
    """Counts of what a learner did, kept on its registry, and its last event in words."""

    def __init__(self, registry: VersionRegistry) -> None:
        self._registry, self._counters = registry, registry.counters
        self._losses: deque[float] = deque(maxlen=NUM_LOSSES)
        self.num_dropped = 0
        self.last_event = ""

    def count(self, counter: str) -> None:
        """Count one more of `COUNTERS`, also on disk."""
        assert counter in COUNTERS, counter
        self._add(counter, 1)
        self._registry.save_counters()

    def took_step(self, loss: float) -> None:
        self._add("num_steps", 1)
        self._losses.append(loss)

    def add_train_s(self, cpu_s: float) -> None:
        self._add("train_s", cpu_s)

    @property
    def fields(self) -> dict[str, Any]:
        """What it knows of a `LearnerStatus`."""
        losses = list(self._losses)  # a step on another thread may add one
        counters = {name: int(self._counters.get(name, 0)) for name in (*COUNTERS, "num_steps")}
        return {
            **counters,
            "num_dropped": self.num_dropped,
            "loss": sum(losses) / len(losses) if losses else None,
            "train_s": float(self._counters.get("train_s", 0.0)),
            "last_event": self.last_event,
        }

    def _add(self, counter: str, amount: float) -> None:
        self._counters[counter] = self._counters.get(counter, 0) + amount


def records(registry: VersionRegistry, totals: Totals[VersionCounts]) -> tuple[VersionRecord, ...]:
    """Return what became of each version, the newest last."""
    serving = registry.serving.name
    found: list[VersionRecord] = []
    for name, fate in registry.fates.items():
        counts = totals.of(name, VersionCounts(version=name))
        found.append(
            VersionRecord(
                name=name,
                is_serving=name == serving,
                fate=fate,
                num_rounds=counts.num_rounds,
                num_draft_tokens=counts.num_draft_tokens,
                num_named_tokens=counts.num_named_tokens,
            )
        )
    return tuple(found)
