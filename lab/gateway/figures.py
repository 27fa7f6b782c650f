"""From what was measured to the figures that are shown. Pure.

cost of a token, us      processor time that a process took from the first byte sent to the last one that came / tokens
                         of all answered streams; what their requests cost is in it, as is what a service does at rest
cost of a request, ms    the same / requests, of one token each and not streamed
together                 the sum over the service's processes, its rank too (whose forward is a pause); not the client's
floor                    the same of a bare server that sends the same bytes for the same requests
a second                 tokens, or requests, / time from the first byte sent to the last one that came
first token, p50, last   from a stream's connect to its first event; all streams of a round come at once
events a token           events that brought a token / tokens asked for; anything but 1 in any stream is an error
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from outrider.lab.gateway.client import Found
from outrider.lab.gateway.loads import Load


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One repeat of a load."""

    load: Load
    found: Found
    spent_s: Mapping[str, float]  # processor time by role
    floor_s: float | None = None  # the floor's; None: not measured

    @property
    def num_units(self) -> int:
        """What its costs are divided by: tokens of streams, else requests; those that failed are none."""
        num_answered = self.load.num_requests - self.found.num_errors
        return num_answered * (self.load.num_tokens if self.load.is_streamed else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a load shows: medians over its repeats; None: there was nothing to measure it by."""

    load: Load
    costs_s: Mapping[str, float]  # a token or a request, by role
    together_s: float | None
    floor_s: float | None
    num_per_s: float | None
    wait_p50_s: float | None
    wait_last_s: float | None
    events_per_token: float | None  # None: no stream
    errors: tuple[str, ...]

    @property
    def floor_ratio(self) -> float | None:
        return self.together_s / self.floor_s if self.together_s is not None and self.floor_s else None


def figures_of(runs: Sequence[Run]) -> Figures:
    """Return the figures of a load's repeats."""
    load = runs[0].load
    answered = [run for run in runs if run.num_units]
    roles = dict.fromkeys(role for run in answered for role in run.spent_s)
    waits = [run.found.waits_s for run in answered if run.found.waits_s]
    return Figures(
        load=load,
        costs_s={
            role: statistics.median(run.spent_s.get(role, 0.0) / run.num_units for run in answered) for role in roles
        },
        together_s=_median(sum(run.spent_s.values()) / run.num_units for run in answered),
        floor_s=_median(run.floor_s / load.num_units for run in answered if run.floor_s is not None),
        num_per_s=_median(run.num_units / run.found.elapsed_s for run in answered),
        wait_p50_s=_median(statistics.median(one) for one in waits),
        wait_last_s=_median(max(one) for one in waits),
        events_per_token=_events_per_token(runs) if load.is_streamed else None,
        errors=tuple(dict.fromkeys(error for run in runs for error in errors_of(run))),
    )


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def _events_per_token(runs: Sequence[Run]) -> float:
    return sum(sum(run.found.num_events) for run in runs) / sum(run.load.num_units for run in runs)


def errors_of(run: Run) -> list[str]:
    """Return what was wrong with a run, a line each: answers that failed, streams whose events are not its tokens."""
    load, found = run.load, run.found
    errors = []
    if found.num_errors:
        errors.append(f"{found.num_errors} of {load.num_requests} failed: {'; '.join(found.errors)}")
    wrong = [number for number in found.num_events if number != load.num_tokens]
    if wrong:
        span = f"{min(wrong)}" if min(wrong) == max(wrong) else f"{min(wrong)} to {max(wrong)}"
        errors.append(f"{len(wrong)} of {load.num_requests} streams had {span} events for {load.num_tokens} tokens")
    return errors
