"""What a simulated fleet is asked: arrivals, lengths, and how much of each draft is right. All drawn from one seed.

Acceptance comes from a law (each request has one rate, drawn from a Beta distribution, and every draft position is
right with it, independently) or from recorded requests (read by lab/replay/traces.py), where what one
verification would commit is known at every position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from outrider.lab.replay.traces import Trace

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

LENGTH_SPREAD = 0.6  # of the logarithm of prompt and output lengths
MAX_LENGTH_FACTOR = 8.0  # no sequence is longer than so many means
RATE_BOUNDS = (0.02, 0.98)
PRIOR_ROUNDS = 2.0  # what a trace's survivals are smoothed by: half of that many rounds accepted at every position


class Acceptance(Protocol):
    """How many draft tokens of each request are right."""

    def accepted(self, numbers: Ints, positions: Ints, bounds: Ints, num_steps: int) -> Ints:
        """Return [num_steps, num_requests]: accepted tokens of drafts of `bounds` tokens (same shape), step after step.

        `positions` are the output tokens before the first step; each step moves on by the accepted ones and one more.
        """

    def survivals(self, number: int, length: int) -> list[float]:
        """Return the true probabilities that a request's first 1 .. `length` draft tokens are all right."""


@dataclass(frozen=True, slots=True)
class AcceptanceLaw:
    """Request i accepts each position with probability `rates[i]`."""

    rates: Floats
    random: np.random.Generator
    _inverse_logs: Floats = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_inverse_logs", 1.0 / np.log(self.rates))

    @classmethod
    def beta(
        cls, num_requests: int, *, mean: float, concentration: float, random: np.random.Generator
    ) -> AcceptanceLaw:
        """Draw every request's rate; the larger the concentration, the more alike they are."""
        if not 0.0 < mean < 1.0:
            raise ValueError(f"acceptance must be in (0, 1), not {mean}")
        rates = random.beta(mean * concentration, (1.0 - mean) * concentration, num_requests)
        return cls(np.clip(rates, *RATE_BOUNDS), random)

    def accepted(self, numbers: Ints, positions: Ints, bounds: Ints, num_steps: int) -> Ints:
        uniform = 1.0 - self.random.random((num_steps, len(numbers)))  # in (0, 1]
        right = np.log(uniform) * self._inverse_logs[numbers]
        return np.minimum(right, bounds).astype(np.int64)

    def survivals(self, number: int, length: int) -> list[float]:
        rate = float(self.rates[number])
        return [rate**position for position in range(1, length + 1)]


class AcceptanceTraces:
    """Request i replays what was recorded of trace i modulo their number."""

    def __init__(self, traces: Sequence[Trace], name: str) -> None:
        recorded = [np.asarray(trace.recorded.get(name, ()), dtype=np.int64) for trace in traces]
        if not all(len(lengths) for lengths in recorded):
            raise ValueError(f"traces: no recorded lengths of {name!r}")
        self._lengths = np.concatenate(recorded)
        self._sizes = np.asarray([len(lengths) for lengths in recorded], dtype=np.int64)
        self._begins = np.concatenate(([0], np.cumsum(self._sizes)[:-1]))
        self._survivals = [_fitted(lengths) for lengths in recorded]

    def accepted(self, numbers: Ints, positions: Ints, bounds: Ints, num_steps: int) -> Ints:
        which = numbers % len(self._sizes)
        begins, lasts = self._begins[which], self._sizes[which] - 1
        steps, at = np.empty((num_steps, len(numbers)), dtype=np.int64), positions
        for step in range(num_steps):
            steps[step] = np.minimum(self._lengths[begins + np.minimum(at, lasts)] - 1, bounds[step])
            at = at + steps[step] + 1
        return steps

    def survivals(self, number: int, length: int) -> list[float]:
        fitted = self._survivals[number % len(self._survivals)]
        return [fitted[position] if position < len(fitted) else 0.0 for position in range(length)]


def _fitted(lengths: Ints) -> list[float]:
    """Return the shares of a request's recorded positions that accept 1, 2 .. tokens, smoothed by a weak prior."""
    num_rounds = len(lengths) + PRIOR_ROUNDS
    return [
        (float(np.count_nonzero(lengths > position)) + PRIOR_ROUNDS * 0.5**position) / num_rounds
        for position in range(1, int(lengths.max()))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests by number, in the order of their arrival; all arrays have one entry per request."""

    arrival_s: Floats
    num_prompt_tokens: Ints
    num_output_tokens: Ints
    acceptance: Acceptance

    @property
    def num_requests(self) -> int:
        return len(self.arrival_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthLaw:
    """Mean lengths of prompts and outputs; each request's are lognormal around them."""

    num_prompt_tokens: int = 512
    num_output_tokens: int = 256

    def __post_init__(self) -> None:
        for name in ("num_prompt_tokens", "num_output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")

    @property
    def longest(self) -> int:
        return int(MAX_LENGTH_FACTOR * (self.num_prompt_tokens + self.num_output_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """A rate that rises and falls once as a sine, with short bursts on top of it."""

    mean_qps: float
    length_s: float
    swing: float = 0.8  # peak and trough are the mean times 1 +- this
    num_bursts: int = 3
    burst_factor: float = 2.0
    burst_share: float = 0.01  # of the day, each

    def qps(self, at_s: Floats) -> Floats:
        """Return the requests per second at each time; the day begins in its trough."""
        place = at_s / self.length_s
        rate = self.mean_qps * (1.0 - self.swing * np.cos(2.0 * np.pi * place))
        for burst in range(self.num_bursts):
            begin = (burst + 1) / (self.num_bursts + 1)
            rate = np.where((place >= begin) & (place < begin + self.burst_share), rate * self.burst_factor, rate)
        return rate


def poisson_arrivals(qps: float, num_requests: int, random: np.random.Generator) -> Floats:
    """Return the arrival times of a Poisson process."""
    if not qps > 0:
        raise ValueError(f"qps must be positive, not {qps}")
    return np.cumsum(random.exponential(1.0 / qps, num_requests))


def day_arrivals(day: Day, random: np.random.Generator, *, grid_s: float = 1.0) -> Floats:
    """Return the arrivals of one day: a Poisson process of rate 1, stretched to the day's rate."""
    edges = np.linspace(0.0, day.length_s, max(2, math.ceil(day.length_s / grid_s) + 1))
    middles = (edges[:-1] + edges[1:]) / 2
    expected = np.concatenate(([0.0], np.cumsum(day.qps(middles) * np.diff(edges))))
    num_requests = int(random.poisson(expected[-1]))
    return np.interp(np.sort(random.random(num_requests)) * expected[-1], expected, edges)


def law_workload(
    arrival_s: Floats, lengths: LengthLaw, random: np.random.Generator, *, acceptance: float, concentration: float
) -> Workload:
    """Draw lengths and acceptance for given arrivals."""
    return Workload(
        arrival_s=arrival_s,
        num_prompt_tokens=_lognormal(lengths.num_prompt_tokens, len(arrival_s), random),
        num_output_tokens=_lognormal(lengths.num_output_tokens, len(arrival_s), random),
        acceptance=AcceptanceLaw.beta(len(arrival_s), mean=acceptance, concentration=concentration, random=random),
    )


def trace_workload(arrival_s: Floats, traces: Sequence[Trace], name: str) -> Workload:
    """Give the arrivals recorded requests, one after another and from the start again."""
    which = np.arange(len(arrival_s)) % len(traces)
    prompts = np.asarray([len(trace.prompt_ids) for trace in traces], dtype=np.int64)
    outputs = np.asarray([len(trace.generated_ids) for trace in traces], dtype=np.int64)
    return Workload(
        arrival_s=arrival_s,
        num_prompt_tokens=prompts[which],
        num_output_tokens=outputs[which],
        acceptance=AcceptanceTraces(traces, name),
    )


def _lognormal(mean: int, size: int, random: np.random.Generator) -> Ints:
    """Draw whole lengths from 1 to MAX_LENGTH_FACTOR means."""
    drawn = random.lognormal(math.log(mean) - LENGTH_SPREAD**2 / 2, LENGTH_SPREAD, size)
    return np.clip(np.rint(drawn), 1, MAX_LENGTH_FACTOR * mean).astype(np.int64)
