"""How long a verifier's round takes when drafts come from elsewhere: three ways to overlap drafting and verifying.

wait    the step begins when the drafts are there; every row that may speculate has one
ahead   the drafter drafted the likely outcomes while the last step ran (docs/architecture.md, "6. Running ahead"), as
        far as it got: only the share of rows whose outcome was among them has a draft, the others decode plainly
groups  half of the rows are verified while the other half is drafted: no wait, but two smaller steps a round

The engine's deadlines come to one of them; here the verifier takes the one that promises the most tokens per second by
the acceptance of earlier rounds. A drafter in the verifier's own process can only be waited for. A batch is drafted
position by position, so a wait is as long as the longest draft; how long that is, is decided by who asks for it. Ahead
and in groups drafts end at `longest`, as far as their drafter gets in time.

What is made anew in every round is a named tuple: a frozen dataclass takes three times as long to make.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from outrider.cluster.router.fleet import DrafterReport
from outrider.lab.simulate.accelerators import StepTiming
from outrider.verifier_service.messages.drafter_load import DrafterLoad

HIT_RATE = 0.55  # of running ahead for 8 outcomes, as measured on the embedded models (docs/results/index.md)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterShape:
    """What every drafter of a pool is."""

    timing: StepTiming
    link_s: float = 0.5e-3  # round trip between verifier and drafter
    hit_rate: float = HIT_RATE  # of running ahead; 0: it never does
    num_branches: int = 8  # outcomes drafted ahead for each row
    max_draft_length: int = 8

    def __post_init__(self) -> None:
        if not 0.0 <= self.hit_rate <= 1.0:
            raise ValueError(f"hit_rate must be in [0, 1], not {self.hit_rate}")
        if self.link_s < 0:
            raise ValueError(f"link_s must be at least 0, not {self.link_s}")
        for name in ("num_branches", "max_draft_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")


class DraftSpeed(NamedTuple):
    """How fast the drafts of one verifier come at present."""

    token_s: float  # for one more position of all of its rows
    ahead_token_s: float = 0.0  # the same, of all their likely outcomes
    link_s: float = 0.0
    hit_rate: float = 0.0
    num_branches: int = 1
    is_local: bool = False  # in the verifier's own process, between two steps


class RoundLoad(NamedTuple):
    """What one round of a verifier consists of."""

    num_decoding: int
    num_at_least: tuple[int, ...] = ()  # rows that would draft 1, 2 .. tokens or more
    num_context_tokens: int = 0
    num_prefill_tokens: int = 0

    @property
    def num_drafting(self) -> int:
        return self.num_at_least[0] if self.num_at_least else 0

    @property
    def num_draft_tokens(self) -> int:
        return sum(self.num_at_least)

    def expected_accepted(self, acceptance_rate: float) -> list[float]:
        """Return how many tokens are accepted if drafts end at 0, 1 .. tokens, by one rate for all."""
        accepted = [count * acceptance_rate**position for position, count in enumerate(self.num_at_least, start=1)]
        return list(itertools.accumulate(accepted, initial=0.0))


class SimulatedRound(NamedTuple):
    """One round: every decoding row is verified once in it."""

    seconds: float
    step_s: float  # one of its steps
    longest: int = 0  # drafts end there, for longer ones would come too late
    share: float = 0.0  # of the rows that may speculate: how many have a draft
    num_steps: int = 1
    idle_s: float = 0.0  # of the seconds, in which the verifier computes nothing
    rows_in_flight: float = 0.0  # at the drafters, on average; likely outcomes are rows, too
    round_trip_s: float = 0.0  # from an ask to its draft

    def asks_in_flight(self, num_drafting: int) -> float:
        """Return how many asks wait for their drafts, on average."""
        return num_drafting * min(1.0, self.round_trip_s / self.seconds)

    def num_draft_tokens(self, load: RoundLoad) -> float:
        """Return how many draft tokens are verified in the round."""
        return self.share * sum(load.num_at_least[: self.longest])


Way = Callable[[RoundLoad, StepTiming, DraftSpeed], SimulatedRound]


def ways_of(num_decoding: int, speed: DraftSpeed) -> list[Way]:
    """Return the ways to run a round of so many rows, some of which draft."""
    ways: list[Way] = [_wait]
    if not speed.is_local:
        if speed.hit_rate > 0.0:
            ways.append(_ahead)
        if num_decoding >= 2:
            ways.append(_groups)
    return ways


def choose_round(
    load: RoundLoad, timing: StepTiming, speed: DraftSpeed | None, acceptance_rate: float, *, may_group: bool = True
) -> SimulatedRound:
    """Return the way to run a round that promises the most tokens per second, in one group where it may not group."""
    if speed is None or load.num_drafting == 0:
        step_s = _step_s(load, timing, 0.0)
        return SimulatedRound(seconds=step_s, step_s=step_s)
    ways = [way(load, timing, speed) for way in ways_of(load.num_decoding if may_group else 1, speed)]
    accepted = load.expected_accepted(acceptance_rate)

    def rate(way: SimulatedRound) -> float:
        return (load.num_decoding + way.share * accepted[way.longest]) / way.seconds

    return max(ways, key=rate)


def _step_s(load: RoundLoad, timing: StepTiming, num_draft_tokens: float, part: float = 1.0) -> float:
    """Return the time of a step over that part of a round."""
    num_tokens = load.num_decoding + load.num_prefill_tokens + num_draft_tokens
    return timing.seconds(part * num_tokens, part * load.num_context_tokens)


def _wait(load: RoundLoad, timing: StepTiming, speed: DraftSpeed) -> SimulatedRound:
    """Run a round that waits for all of its drafts."""
    longest = len(load.num_at_least)
    step_s = _step_s(load, timing, sum(load.num_at_least[:longest]))
    draft_s = speed.link_s + longest * speed.token_s
    seconds = step_s + draft_s
    return SimulatedRound(
        seconds=seconds,
        step_s=step_s,
        longest=longest,
        share=1.0,
        idle_s=0.0 if speed.is_local else draft_s,
        rows_in_flight=load.num_drafting * draft_s / seconds,
        round_trip_s=draft_s,
    )


def _ahead(load: RoundLoad, timing: StepTiming, speed: DraftSpeed) -> SimulatedRound:
    """Run a round whose drafts are as long as their drafter got while the last one ran."""
    longest = min(len(load.num_at_least), int(_step_s(load, timing, 0.0) / speed.ahead_token_s))
    step_s = _step_s(load, timing, speed.hit_rate * sum(load.num_at_least[:longest]))
    seconds = step_s + speed.link_s
    return SimulatedRound(
        seconds=seconds,
        step_s=step_s,
        longest=longest,
        share=speed.hit_rate,
        idle_s=speed.link_s,
        rows_in_flight=load.num_drafting * speed.num_branches * longest * speed.ahead_token_s / seconds,
        round_trip_s=speed.link_s,
    )


def _groups(load: RoundLoad, timing: StepTiming, speed: DraftSpeed) -> SimulatedRound:
    """Run two steps of half the rows each; drafts are as long as their drafter gets in one."""
    room_s = _step_s(load, timing, 0.0, part=0.5) - speed.link_s
    longest = max(1, min(len(load.num_at_least), int(room_s / speed.token_s)))
    step_s = _step_s(load, timing, sum(load.num_at_least[:longest]), part=0.5)
    draft_s = speed.link_s + longest * speed.token_s
    seconds = 2 * max(step_s, draft_s)
    return SimulatedRound(
        seconds=seconds,
        step_s=step_s,
        longest=longest,
        share=1.0,
        num_steps=2,
        idle_s=seconds - 2 * step_s,
        rows_in_flight=load.num_drafting * draft_s / seconds,
        round_trip_s=draft_s,
    )


def with_drafts(way: SimulatedRound, load: RoundLoad, timing: StepTiming, num_draft_tokens: int) -> SimulatedRound:
    """Return a chosen round with the draft tokens that it really verifies, in place of those that were expected."""
    if not way.longest:
        return way
    step_s = _step_s(load, timing, num_draft_tokens, part=1.0 / way.num_steps)
    if way.num_steps == 1:
        return way._replace(step_s=step_s, seconds=way.seconds - way.step_s + step_s)
    seconds = way.num_steps * max(step_s, way.round_trip_s)
    return way._replace(step_s=step_s, seconds=seconds, idle_s=seconds - way.num_steps * step_s)


class DraftDemand(NamedTuple):
    """What one verifier asks of one drafter."""

    num_sessions: int = 0
    rows_in_flight: float = 0.0
    asks_in_flight: float = 0.0
    num_context_tokens: float = 0.0  # of a session, on average
    draft_s: float = 0.0  # from an ask to its draft, without the link


class FakeDrafter:
    """A drafter of a pool: all rows that it drafts at a time share its steps, those of other verifiers too."""

    def __init__(self, drafter_id: str, shape: DrafterShape) -> None:
        self.drafter_id = drafter_id
        self.shape = shape
        self.draining = False
        self._demands: dict[str, DraftDemand] = {}  # by verifier
        self._total_rows = 0.0
        self._context = 0.0

    @property
    def num_sessions(self) -> int:
        return sum(demand.num_sessions for demand in self._demands.values())

    def take_in(self, verifier_id: str, demand: DraftDemand | None) -> None:
        """Take in what a verifier asks of it from now on; None: nothing more."""
        before = self._demands.pop(verifier_id, None)
        self._total_rows -= 0.0 if before is None else before.rows_in_flight
        if demand is not None:
            self._demands[verifier_id] = demand
            self._total_rows += demand.rows_in_flight
            self._context = demand.num_context_tokens
        if not self._demands:
            self._total_rows = 0.0  # no rounding error outlives its cause

    def token_s(self, verifier_id: str, num_rows: float) -> float:
        """Return the time of one more position for a verifier's rows, beside everybody else's."""
        own = self._demands.get(verifier_id)
        rows = num_rows + max(0.0, self._total_rows - (0.0 if own is None else own.rows_in_flight))
        return self.shape.timing.seconds(rows, rows * self._context)

    def report(self) -> DrafterReport:
        """Return what the router gets to see."""
        demands = self._demands.values()
        return DrafterReport(
            drafter_id=self.drafter_id,
            endpoint=f"{self.drafter_id}:0",
            epoch=1,
            max_draft_length=self.shape.max_draft_length,
            load=DrafterLoad(
                num_sessions=self.num_sessions,
                queue_depth=round(sum(demand.asks_in_flight for demand in demands)),
                mean_draft_s=sum(demand.draft_s for demand in demands) / len(demands) if demands else None,
            ),
            draining=self.draining,
        )
