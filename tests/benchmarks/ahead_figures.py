"""What a drafter gains by running ahead: figures of runs, and a model of them for other costs and links. Pure Python.

time per token     elapsed time / committed tokens, prefill included
tokens per round   committed tokens / forwards of the target
hit rate           rounds whose draft was there when it was asked for / rounds of sessions that were prepared for any
verifier idle      share of the elapsed time in which no step ran; co-located drafting happens inside the steps
ahead tokens       tokens that the drafter computed in spare time / committed token

The model keeps what was measured (tokens per round, hit rate, forwards that a miss waits for) and varies the cost c of
a drafter's forward, as a share of a verification on one core, and the link's round trip l:

    ahead         verification on one core + l + (1 - hit rate) * forwards per miss * c
    without       verification on one core + l + forwards per draft * c
    co-located    verification on both cores + forwards per draft * c

It leaves out that a slow drafter gets less far ahead: it holds while c * (draft length + 1) is at most 1, and favours
running ahead beyond that.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadRun:
    """One run of one arm over all prompts."""

    elapsed_s: float
    busy_s: float  # in steps
    num_tokens: int
    num_steps: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_hits: int = 0
    num_misses: int = 0
    num_ahead_tokens: int = 0

    @property
    def token_s(self) -> float:
        return self.elapsed_s / self.num_tokens

    @property
    def tokens_per_round(self) -> float:
        return self.num_tokens / self.num_steps

    @property
    def hit_rate(self) -> float | None:
        num_asks = self.num_hits + self.num_misses
        return self.num_hits / num_asks if num_asks else None

    @property
    def idle_share(self) -> float:
        return 1.0 - self.busy_s / self.elapsed_s

    @property
    def step_s(self) -> float:
        return self.busy_s / self.num_steps

    @property
    def idle_per_round_s(self) -> float:
        return (self.elapsed_s - self.busy_s) / self.num_steps

    @property
    def acceptance_rate(self) -> float | None:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def ahead_per_token(self) -> float:
        return self.num_ahead_tokens / self.num_tokens


def median(runs: Sequence[AheadRun], figure: Callable[[AheadRun], float | None]) -> float | None:
    """Return the median of a figure over the runs that have it; None where none has."""
    values = [value for value in map(figure, runs) if value is not None]
    return statistics.median(values) if values else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadModel:
    """Times per token for other costs of a draft forward and other links, from what was measured."""

    verify_s: float  # a verification on one core
    verify_shared_s: float  # on both cores
    cost: float  # of a draft forward, as a share of that
    num_forwards: float  # of a draft
    num_miss_forwards: float  # that a miss waits for
    hit_rate: float
    tokens_per_round: float  # with drafts of full length
    tokens_per_ahead_round: float  # misses may be drafted shorter

    @property
    def max_cost(self) -> float:
        """The cost of a draft forward up to which the model holds."""
        return 1.0 / (self.num_forwards + 1.0)

    def ahead_s(self, cost: float, link_s: float) -> float:
        wait_s = (1.0 - self.hit_rate) * self.num_miss_forwards * cost * self.verify_s
        return (self.verify_s + link_s + wait_s) / self.tokens_per_ahead_round

    def without_s(self, cost: float, link_s: float) -> float:
        return (self.verify_s * (1.0 + self.num_forwards * cost) + link_s) / self.tokens_per_round

    def colocated_s(self, cost: float) -> float:
        return (self.verify_shared_s + self.num_forwards * cost * self.verify_s) / self.tokens_per_round

    def least_cost(self, link_s: float) -> float | None:
        """Return the cost of a draft forward from which running ahead beats co-located drafting; None: never."""
        # both times are straight lines in the cost
        at_zero = self.ahead_s(0.0, link_s) - self.colocated_s(0.0)
        slope = self.ahead_s(1.0, link_s) - self.colocated_s(1.0) - at_zero
        if at_zero <= 0.0:
            return 0.0
        return -at_zero / slope if slope < 0.0 else None


def fit(apart: Sequence[AheadRun], ahead: Sequence[AheadRun], shared: Sequence[AheadRun]) -> AheadModel:
    """Read the model's figures off the runs without the cache, with it, and co-located.

    A draft forward takes as long on both cores as on one: the draft model is far too small to gain.
    """

    def of(runs: Sequence[AheadRun], figure: Callable[[AheadRun], float | None]) -> float:
        value = median(runs, figure)
        assert value is not None, "an arm without figures"
        return value

    wait_s = of(apart, lambda run: run.idle_per_round_s)
    num_forwards = of(apart, lambda run: run.num_draft_tokens / run.num_steps)
    hit_rate = of(ahead, lambda run: run.hit_rate or 0.0)
    miss_wait_s = of(ahead, lambda run: run.idle_per_round_s) / max(1.0 - hit_rate, 1e-9)
    verify_s = of([*apart, *ahead], lambda run: run.step_s)
    return AheadModel(
        verify_s=verify_s,
        verify_shared_s=max(of(shared, lambda run: run.elapsed_s / run.num_steps) - wait_s, 0.0),
        cost=wait_s / num_forwards / verify_s,
        num_forwards=num_forwards,
        num_miss_forwards=num_forwards * miss_wait_s / wait_s,
        hit_rate=hit_rate,
        tokens_per_round=of(apart, lambda run: run.tokens_per_round),
        tokens_per_ahead_round=of(ahead, lambda run: run.tokens_per_round),
    )
