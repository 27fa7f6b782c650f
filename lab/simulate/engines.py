"""A fake verifier in virtual time: it advances many steps at once where lengths hold.

A verifier is only looked at when something happens to it: a request arrives, or its report is due. It then catches up:
while no request joins or ends, its rounds differ in nothing but how many draft tokens are right, so a run of rounds is
one draw of an array [rounds, requests], cut after the round in which the first request ends. With runs of one round it
is a simulation step by step; both give the same figures within the noise of the draws. A round that began before an
event ends after it, as in an engine: a verifier's own clock may be ahead of the fleet's by one round. Where drafts are
priced, requests ask before each round, so there are no runs.

Left out: preemption (a request is admitted when the KV of its whole length is free), prefix caching, hidden states on
the wire, the drafters' prefill of prompts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.cluster.router.fleet import LACKS_DRAFTER, VerifierReport
from outrider.lab.simulate.accelerators import StepTiming
from outrider.lab.simulate.drafting import (
    DraftDemand,
    DraftSpeed,
    FakeDrafter,
    RoundLoad,
    SimulatedRound,
    choose_round,
    with_drafts,
)
from outrider.lab.simulate.ledger import Ledger
from outrider.lab.simulate.lengths import BatchSeen, LengthPolicy, RoundSeen, Row
from outrider.lab.simulate.load import Ints
from outrider.verifier_service.messages.draft import LOCAL_DRAFTER_ID
from outrider.verifier_service.messages.engine import (
    DrafterPerformance,
    EngineCounters,
    EngineLoad,
    RequestLoad,
    StepTime,
)
from outrider.verifier_service.messages.request import SpeculationPlan

# The lines of a verifier's table of decoding requests: length of the drafts, output tokens to come, positions in the
# KV, output tokens done.
NUMBER, LENGTH, LEFT, CONTEXT, DONE = range(5)
NUM_LINES = 5
ACCEPTANCE_MEMORY = 0.9  # of the running mean of acceptance per position, by run of rounds
FIRST_ACCEPTANCE = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierShape:
    """What every verifier of a fleet is. Raises `ValueError` naming the field that is out of range."""

    timing: StepTiming
    kv_tokens: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    own_drafter: StepTiming | None = None  # of a draft model in its own process
    own_draft_length: int = 8
    max_rounds: int = 16  # that are drawn at once; 1: step by step

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "max_num_seqs", "max_num_batched_tokens", "own_draft_length", "max_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")

    def profile(self) -> tuple[StepTime, ...]:
        """Return the step times that an engine measures at start."""
        return self.timing.profile(self.max_num_batched_tokens)


@dataclass(slots=True)
class _Prefill:
    number: int
    tokens_left: int


class FakeVerifier:
    """One replica of the target model, its requests, and the drafters that draft for them."""

    def __init__(
        self,
        verifier_id: str,
        shape: VerifierShape,
        ledger: Ledger,
        drafters: Mapping[str, FakeDrafter],
        lengths: LengthPolicy,
        *,
        now_s: float = 0.0,
    ) -> None:
        self.verifier_id = verifier_id
        self.draining, self.num_taken = False, 0
        self.clock_s = now_s
        self._shape, self._ledger, self._drafters, self._lengths = shape, ledger, drafters, lengths
        self._profile = shape.profile()
        self._rows = np.zeros((NUM_LINES, shape.max_num_seqs), dtype=np.int64)
        self._num_rows = 0
        self._plans: dict[int, SpeculationPlan] = {}
        self.waiting: deque[int] = deque()
        self._prefills: deque[_Prefill] = deque()
        self._kv_reserved = 0
        self._speed: DraftSpeed | None = None
        self._asked: set[str] = set()  # drafters that know of a demand
        self._load = RoundLoad(num_decoding=0)
        self._acceptance_rate = FIRST_ACCEPTANCE
        # what the round was chosen for
        self._chosen_for: tuple[RoundLoad, DraftSpeed | None, float] = (self._load, None, FIRST_ACCEPTANCE)
        self._round = choose_round(self._load, shape.timing, None, FIRST_ACCEPTANCE)  # one of that run
        self._num_at_least: tuple[int, ...] | None = None  # of the next rounds; None: to be counted
        self._round_numbers = np.arange(1, shape.max_rounds + 1)[:, np.newaxis]
        self._num_steps, self._num_scheduled, self._num_committed = 0, 0, 0
        self._num_drafts, self._num_drafted, self._num_accepted = 0, 0, 0
        self._num_rounds, self._num_prefill_rounds, self._num_prefill_tokens = 0, 0, 0  # since the lengths were set
        self._idle_s = 0.0
        self._reported = (now_s, 0, 0, 0.0)  # when; tokens committed, steps and idle seconds until then

    @property
    def num_requests(self) -> int:
        return self._num_rows + len(self._prefills) + len(self.waiting)

    @property
    def num_undrafted(self) -> int:
        """How many requests lack nothing for speculation but a drafter."""
        return sum(plan.disabled_reason in LACKS_DRAFTER for plan in self._plans.values())

    def submit(self, number: int, plan: SpeculationPlan, now_s: float) -> None:
        """Take a request; it is admitted when the round that runs has ended."""
        self.advance(now_s)
        self._plans[number] = plan
        self.waiting.append(number)
        self.num_taken += 1

    def advance(self, until_s: float) -> None:
        """Run every round that begins before `until_s`."""
        while self.clock_s < until_s and self.num_requests:
            self._admit()
            self._ask()
            if self._prefills:
                self._prefill_round()
            else:
                num_rounds = math.ceil((until_s - self.clock_s) / self._next_round(0).seconds)
                most = 1 if self._lengths.is_every_round else self._shape.max_rounds
                self._run(min(num_rounds, most), self._round)
        self.clock_s = max(self.clock_s, until_s) if self.num_requests == 0 else self.clock_s

    def _admit(self) -> None:
        """Start waiting requests, first come first served, while the KV of their whole length is free."""
        workload = self._ledger.workload
        while self.waiting and self._num_rows + len(self._prefills) < self._shape.max_num_seqs:
            number = self.waiting[0]
            need = int(workload.num_prompt_tokens[number] + workload.num_output_tokens[number])
            if self._kv_reserved + need > self._shape.kv_tokens:
                return
            self.waiting.popleft()
            self._kv_reserved += need
            self._prefills.append(_Prefill(number, int(workload.num_prompt_tokens[number])))

    def _ask(self) -> None:
        """Let every row ask how much it may draft, where that is decided before each round."""
        if self._num_rows and self._lengths.is_every_round:
            numbers = self._rows[NUMBER, : self._num_rows].tolist()
            self._rows[LENGTH, : self._num_rows] = self._lengths.ask([Row(at, self._plans[at]) for at in numbers])
            self._num_at_least = None

    def _prefill_round(self) -> None:
        """Run one round that also computes prompts, within the step's budget of tokens."""
        budget = max(1, self._shape.max_num_batched_tokens - self._num_rows)
        done: list[int] = []
        num_prefill = 0
        while self._prefills and num_prefill < budget:
            prefill = self._prefills[0]
            num_tokens = min(prefill.tokens_left, budget - num_prefill)
            num_prefill += num_tokens
            prefill.tokens_left -= num_tokens
            if prefill.tokens_left == 0:
                done.append(self._prefills.popleft().number)
        self._run(1, self._next_round(num_prefill))
        for number in done:
            self._begin(number)

    def _next_round(self, num_prefill_tokens: int) -> SimulatedRound:
        """Choose how the next rounds run; remembered as `_round` and `_load`."""
        if self._num_at_least is None:
            counts = np.bincount(self._rows[LENGTH, : self._num_rows], minlength=1)
            self._num_at_least = tuple(counts[:0:-1].cumsum()[::-1].tolist())
        self._load = RoundLoad(
            num_decoding=self._num_rows,
            num_at_least=self._num_at_least,
            num_context_tokens=int(self._rows[CONTEXT, : self._num_rows].sum()),
            num_prefill_tokens=num_prefill_tokens,
        )
        chosen_for = (self._load, self._speed, self._acceptance_rate)
        if chosen_for != self._chosen_for:
            self._round = choose_round(self._load, self._shape.timing, self._speed, self._acceptance_rate)
            self._chosen_for = chosen_for
        return self._round

    def _run(self, num_rounds: int, way: SimulatedRound) -> None:
        """Run so many rounds, fewer if a request ends; prompts of the round are not decoded in it."""
        if self._num_rows:
            num_rounds, way = self._decode(num_rounds, way)
        self.clock_s += num_rounds * way.seconds
        self._ledger.num_advances += 1
        self._ledger.num_steps += num_rounds * way.num_steps
        self._num_steps += num_rounds * way.num_steps
        self._num_scheduled += num_rounds * self._load.num_prefill_tokens
        self._num_prefill_tokens += num_rounds * self._load.num_prefill_tokens
        self._num_rounds += num_rounds
        self._num_prefill_rounds += num_rounds if self._load.num_prefill_tokens else 0
        self._idle_s += num_rounds * way.idle_s
        if self._num_rows:
            self._retire()

    def _decode(self, num_rounds: int, way: SimulatedRound) -> tuple[int, SimulatedRound]:
        """Draw the rounds of all rows; return how many ran until the first request ended, and what each was."""
        rows = self._rows[:, : self._num_rows]
        acceptance, random = self._ledger.workload.acceptance, self._ledger.random
        left = rows[LEFT]
        lengths = np.empty((num_rounds, self._num_rows), dtype=np.int64)
        lengths[:] = np.minimum(rows[LENGTH], way.longest)
        if 0.0 < way.share < 1.0:
            lengths *= random.random(lengths.shape) < way.share
        if self._lengths.is_every_round:
            lengths[0] = self._lengths.admit(lengths[0].tolist())
            way = with_drafts(way, self._load, self._shape.timing, int(lengths.sum()))
        if way.longest:
            accepted = acceptance.accepted(rows[NUMBER], rows[DONE], lengths, num_rounds)
        else:
            accepted = np.zeros(lengths.shape, dtype=np.int64)
        ends = accepted.cumsum(axis=0)
        ends += self._round_numbers[:num_rounds]
        is_end = bool((ends[-1] >= left).any())
        if is_end:
            num_rounds = int((ends >= left).any(axis=1).argmax()) + 1
            lengths, accepted, ends = lengths[:num_rounds], accepted[:num_rounds], ends[:num_rounds]
        committed, num_accepted = ends[-1], ends[-1] - num_rounds
        if is_end:  # of a draft past it the last token committed is an accepted one, and no own token follows it
            beyond = np.maximum(committed - left, 0)
            committed, num_accepted = committed - beyond, num_accepted - np.maximum(beyond - 1, 0)
        if self._lengths.is_every_round:
            self._lengths.end_round(RoundSeen(self._load, way, accepted[0].tolist(), committed.tolist()))
        news = np.array((committed, (lengths > 0).sum(axis=0), lengths.sum(axis=0), num_accepted))
        num_rejected = int(np.count_nonzero(accepted < lengths))
        self._count(news, num_rejected, self.clock_s + num_rounds * way.seconds, num_rounds)
        return num_rounds, way

    def _count(self, news: Ints, num_rejected: int, end_s: float, num_rounds: int) -> None:
        """Count what so many rounds come to: by request, tokens, drafts, drafted and accepted tokens."""
        rows = self._rows[:, : self._num_rows]
        rows[DONE] += news[0]
        rows[LEFT] -= news[0]
        rows[CONTEXT] += news[0]
        num_tokens, num_drafts, num_drafted, num_accepted = news.sum(axis=1).tolist()
        self._num_committed += num_tokens
        self._num_scheduled += num_rounds * self._num_rows + num_drafted
        self._num_drafts += num_drafts
        self._num_drafted += num_drafted
        self._num_accepted += num_accepted
        if num_drafts:
            rate = num_accepted / max(1, num_accepted + num_rejected)
            self._acceptance_rate += (1.0 - ACCEPTANCE_MEMORY) * (rate - self._acceptance_rate)
        self._ledger.count(
            end_s, num_tokens=num_tokens, num_drafts=num_drafts, num_draft_tokens=num_drafted, num_accepted=num_accepted
        )

    def _begin(self, number: int) -> None:
        """Let a request decode whose prompt is computed; that step gave its first token."""
        workload, row = self._ledger.workload, Row(number, self._plans[number])
        self._ledger.begin(number, self.clock_s)
        self._num_committed += 1
        num_prompt, num_output = int(workload.num_prompt_tokens[number]), int(workload.num_output_tokens[number])
        if num_output == 1:
            self._end(np.asarray([number]), np.asarray([1]))
            return
        length = self._lengths.first_length(row)
        self._rows[:, self._num_rows] = (number, length, num_output - 1, num_prompt + 1, 1)
        self._num_rows += 1
        self._num_at_least = None
        if row.plan.draft_length and self._speed is None:
            self._find_speed(1, self._sessions([row]))

    def _retire(self) -> None:
        """Take the requests that have ended out of the table."""
        rows = self._rows[:, : self._num_rows]
        if rows[LEFT].all():
            return
        stays = rows[LEFT] > 0
        self._end(rows[NUMBER, ~stays], rows[DONE, ~stays])
        kept = rows[:, stays]
        self._num_rows = kept.shape[1]
        self._rows[:, : self._num_rows] = kept
        self._num_at_least = None

    def _end(self, numbers: Ints, num_tokens: Ints) -> None:
        workload = self._ledger.workload
        self._ledger.end(numbers, num_tokens, self.clock_s)
        self._kv_reserved -= int((workload.num_prompt_tokens[numbers] + workload.num_output_tokens[numbers]).sum())
        for number in numbers.tolist():
            del self._plans[number]
            self._lengths.forget(number)

    def report(self, drafters_up: tuple[str, ...], *, with_knee: bool) -> VerifierReport:
        """Return what the router gets to see; the figures over time are of the time since the last report.

        The knee takes time to find, and the autoscaler alone looks at it.
        """
        since_s, committed_before, steps_before, idle_before_s = self._reported
        elapsed_s = max(self.clock_s - since_s, 1e-9)
        num_steps = self._num_steps - steps_before
        knee, trip_s = self._lengths.knee if with_knee else None, self._round.round_trip_s
        load = EngineLoad(
            num_running=self._num_rows + len(self._prefills),
            num_waiting=len(self.waiting),
            num_decoding=self._num_rows,
            kv_usage=self._kv_reserved / self._shape.kv_tokens,
            tokens_per_s=(self._num_committed - committed_before) / elapsed_s,
            mean_step_s=elapsed_s / num_steps if num_steps else None,
            price=self._lengths.price,
            knee=None if knee is None or math.isinf(knee) else knee,
            draft_length_mean=self._load.num_draft_tokens / max(1, self._load.num_decoding),
            verify_idle_share=(self._idle_s - idle_before_s) / elapsed_s,
            counters=self._counters(),
            requests=self._request_loads(),
            drafters=tuple(DrafterPerformance(drafter_id=name, round_trip_s=trip_s) for name in sorted(self._asked)),
        )
        self._reported = (self.clock_s, self._num_committed, self._num_steps, self._idle_s)
        return VerifierReport(
            verifier_id=self.verifier_id,
            endpoint=f"{self.verifier_id}:0",
            epoch=1,
            load=load,
            num_taken=self.num_taken,
            max_model_len=self._shape.kv_tokens,
            step_times=self._profile,
            linked_drafters=drafters_up,
            own_draft_length=self._shape.own_draft_length if self._shape.own_drafter is not None else 0,
            draining=self.draining,
        )

    def _counters(self) -> EngineCounters:
        return EngineCounters(
            num_steps=self._num_steps,
            num_scheduled_tokens=self._num_scheduled,
            num_committed_tokens=self._num_committed,
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_drafted,
            num_accepted_tokens=self._num_accepted,
            idle_s=self._idle_s,
        )

    def _request_loads(self) -> tuple[RequestLoad, ...]:
        rows = [(True, number) for number in self._rows[NUMBER, : self._num_rows].tolist()]
        rows += [(True, prefill.number) for prefill in self._prefills]
        rows += [(False, number) for number in self.waiting]
        return tuple(
            RequestLoad(
                request_id=str(number),
                is_running=is_running,
                drafter_id=self._plans[number].drafter_id,
                draft_length=self._plans[number].draft_length,
                num_speculative_tokens=None,
            )
            for is_running, number in rows
        )

    def follow(self, plans: Mapping[str, SpeculationPlan]) -> None:
        """Take the router's plans that changed, and set the lengths of the next drafts."""
        for request_id, plan in plans.items():
            if int(request_id) in self._plans:
                self._plans[int(request_id)] = plan
        numbers = self._rows[NUMBER, : self._num_rows].tolist()
        rows = [Row(number, self._plans[number]) for number in numbers]
        sessions = self._sessions(rows)
        self._find_speed(len(rows), sessions)
        if rows and not self._lengths.is_every_round:
            self._num_at_least = None
            prefill_share = self._num_prefill_rounds / max(1, self._num_rounds)
            num_prefill_tokens = self._num_prefill_tokens // max(1, self._num_prefill_rounds)
            seen = BatchSeen(self._load, prefill_share, num_prefill_tokens, self._speed)
            self._rows[LENGTH, : len(rows)] = self._lengths.decide(seen, rows)
        self._num_rounds, self._num_prefill_rounds, self._num_prefill_tokens = 0, 0, 0
        if self._shape.own_drafter is None:
            self._ask_drafters(rows, sessions)

    def _find_speed(self, num_rows: int, sessions: Mapping[str, int]) -> None:
        """Find out how fast drafts for so many requests would come, those of each drafter being known."""
        if self._shape.own_drafter is not None:
            context = int(self._rows[CONTEXT, : self._num_rows].sum())
            token_s = self._shape.own_drafter.seconds(max(1, num_rows), context)
            self._speed, self._asked = DraftSpeed(token_s=token_s, is_local=True), {LOCAL_DRAFTER_ID}
        else:
            self._speed = self._pool_speed(sessions)

    def _sessions(self, rows: Sequence[Row]) -> dict[str, int]:
        """Count the requests of each drafter that is there."""
        sessions: dict[str, int] = {}
        for row in rows:
            drafter_id = row.plan.drafter_id
            if drafter_id is not None and drafter_id in self._drafters:
                sessions[drafter_id] = sessions.get(drafter_id, 0) + 1
        return sessions

    def _ask_drafters(self, rows: Sequence[Row], sessions: Mapping[str, int]) -> None:
        """Tell the drafters what is asked of them from now on; of how many requests each, is known."""
        drafting = self._sessions(
            [row for row, length in zip(rows, self._rows[LENGTH, : len(rows)].tolist(), strict=True) if length]
        )
        way = self._next_round(0)
        for drafter_id in self._asked - sessions.keys():
            if drafter_id in self._drafters:
                self._drafters[drafter_id].take_in(self.verifier_id, None)
        for drafter_id, num_sessions in sessions.items():
            num_drafting = drafting.get(drafter_id, 0)
            share = num_drafting / max(1, self._load.num_drafting)
            self._drafters[drafter_id].take_in(
                self.verifier_id,
                DraftDemand(
                    num_sessions=num_sessions,
                    rows_in_flight=share * way.rows_in_flight,
                    asks_in_flight=way.asks_in_flight(num_drafting),
                    num_context_tokens=self._load.num_context_tokens / max(1, self._load.num_decoding),
                    draft_s=way.round_trip_s,
                ),
            )
        self._asked = {*sessions}

    def _pool_speed(self, drafting: Mapping[str, int]) -> DraftSpeed | None:
        """Return the speed of the slowest of its drafters: a round waits for all."""
        if not drafting:
            return None
        shapes = [self._drafters[drafter_id].shape for drafter_id in drafting]
        branches = shapes[0].num_branches
        return DraftSpeed(
            token_s=max(
                self._drafters[name].token_s(self.verifier_id, max(1, rows)) for name, rows in drafting.items()
            ),
            ahead_token_s=max(
                self._drafters[name].token_s(self.verifier_id, max(1, rows) * branches)
                for name, rows in drafting.items()
            ),
            link_s=shapes[0].link_s,
            hit_rate=shapes[0].hit_rate,
            num_branches=branches,
        )
