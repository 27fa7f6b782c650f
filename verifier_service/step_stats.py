"""What the verifier remembers of its past steps, for reports and decisions."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.verifier_service.scheduler import Schedule


@dataclass(slots=True)
class StepStats:
    """Counters since start."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_committed_tokens: int = 0
    busy_s: float = 0.0

    def observe(self, schedule: Schedule, *, num_committed: int, seconds: float) -> None:
        """Take in one step that ran."""
        self.num_steps += 1
        self.num_scheduled_tokens += schedule.batch.num_tokens
        self.num_committed_tokens += num_committed
        self.busy_s += seconds
