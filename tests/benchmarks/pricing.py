"""`make study NAME=pricing`: what pricing its drafts costs a step, without the step.

The engine's pricing is called as the engine calls it: every request asks how much it may draft, its draft is cut to
what is worth verifying, its round ends, and when all have asked again, the step is learnt from. Where all of them draft
that is no time lost, for what they asked for is on its way then. Requests accept what laws of their own say, and steps
take what a profile says. Only the pricing's own time counts.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import console_of, parse_numbers
from outrider.lab.report import Column, files, table_of, write
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.draft import Draft
from outrider.verifier_service.messages.engine import StepTime
from outrider.verifier_service.messages.request import Request, SamplingParams, SpeculationPlan
from outrider.verifier_service.pricing.cost_model import StepShape, StepTimeModel
from outrider.verifier_service.pricing.draft_pricing import DraftPricing
from outrider.verifier_service.pricing.offer import Ask, PricedStep
from outrider.verifier_service.scheduling.outcome import Outcome, is_leaf, num_draft_tokens
from outrider.verifier_service.scheduling.schedule import Schedule, ScheduledRequest

PLAIN_WIDTH = 120  # columns of text where the output is no terminal
NUM_WARM_STEPS = 100  # until prices and histories have settled
NUM_ROUNDS = 3  # of which the quickest counts: a machine that stands still is no cost of pricing
NUM_PROMPT_TOKENS = 256
DRAFTER_ID = "drafter"
TOLERATED = 0.02  # of a step: what pricing it may cost


@dataclass(frozen=True, slots=True)
class Machine:
    """Whose step times say how much is worth drafting."""

    name: str
    step_times: tuple[StepTime, ...]


MACHINES = (
    Machine("drafts are free", (StepTime(num_tokens=1, seconds=0.02), StepTime(num_tokens=4096, seconds=0.02))),
    Machine("none pays", (StepTime(num_tokens=1, seconds=1e-3), StepTime(num_tokens=4096, seconds=4.096))),
)


@dataclass(slots=True)
class Timings:
    """How long all calls of a kind took, in seconds."""

    ask_s: float = 0.0
    cut_s: float = 0.0
    learn_s: float = 0.0  # what is learnt before the next ask
    meanwhile_s: float = 0.0  # and after it, while all wait for their drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What pricing costs per step, in seconds."""

    machine: str
    num_requests: int
    draft_length: float  # verified, per request and step
    ask_s: float
    cut_s: float
    learn_s: float
    meanwhile_s: float  # no request could run then

    @property
    def path_s(self) -> float:
        """By how much it makes a step longer."""
        return self.ask_s + self.cut_s + self.learn_s


class PricedBatch:
    """Requests that decode together for ever, their drafts priced."""

    def __init__(self, num_requests: int, draft_length: int, machine: Machine, clock: Callable[[], float]) -> None:
        """`clock` is the time that counts."""
        self.timings = Timings()
        self.num_drafted = 0
        self._pricing = DraftPricing()
        self._pricing.use_profile(machine.step_times)
        self._step_times = StepTimeModel.from_points(machine.step_times)
        self._clock = clock
        self._rng = random.Random(0)
        plan = SpeculationPlan(drafter_id=DRAFTER_ID, draft_length=draft_length)
        self._requests = [
            Request(
                request_id=str(number),
                sampling=SamplingParams(temperature=0.0),
                token_ids=[0] * NUM_PROMPT_TOKENS,
                num_prompt_tokens=NUM_PROMPT_TOKENS,
                plan=plan,
                arrival_s=0.0,
            )
            for number in range(num_requests)
        ]
        self._rates = [self._rng.uniform(0.3, 0.9) for _ in self._requests]

    def step(self) -> None:
        """Ask for drafts, price the last step, cut the drafts, verify what is left."""
        begin_s = self._clock()
        asks = [Ask(request, DRAFTER_ID, request.plan.draft_length) for request in self._requests]
        lengths = [asked.length for asked in self._pricing.ask_all(asks)]
        self.timings.ask_s += self._clock() - begin_s
        self._learn(is_drafting=all(lengths))
        asked = [(request, self._draft(request, n)) for request, n in zip(self._requests, lengths, strict=True) if n]
        begin_s = self._clock()
        drafts = {draft.request_id: draft for draft in self._pricing.admit_all(asked)}
        self.timings.cut_s += self._clock() - begin_s
        schedule = _schedule(self._requests, drafts)
        outcomes = [self._outcome(*pair) for pair in zip(schedule.items, self._rates, strict=True)]
        num_tokens = schedule.batch.num_tokens
        shape = StepShape(num_tokens, sum(schedule.batch.context_lengths))
        step = PricedStep(outcomes, (), shape, step_s=self._step_times.t(num_tokens), exposed_s=0.0)
        begin_s = self._clock()
        self._pricing.end_step(step)
        self.timings.learn_s += self._clock() - begin_s
        self.num_drafted += sum(map(num_draft_tokens, schedule.items))

    def _learn(self, is_drafting: bool) -> None:
        begin_s = self._clock()
        self._pricing.learn()
        elapsed_s = self._clock() - begin_s
        if is_drafting:
            self.timings.meanwhile_s += elapsed_s
        else:
            self.timings.learn_s += elapsed_s

    def _draft(self, request: Request, length: int) -> Draft:
        confidences = tuple(self._rng.uniform(0.2, 1.0) for _ in range(length))
        return Draft(
            request_id=request.request_id,
            round_id=1,
            position=NUM_PROMPT_TOKENS,
            token_ids=(0,) * length,
            confidences=confidences,
        )

    def _outcome(self, item: ScheduledRequest, rate: float) -> Outcome:
        length = num_draft_tokens(item)
        return outcome_of(item, next((place for place in range(length) if self._rng.random() >= rate), length))


def _schedule(requests: Sequence[Request], drafts: dict[str, Draft]) -> Schedule:
    items: list[ScheduledRequest] = []
    for request in requests:
        draft = drafts.get(request.request_id)
        if draft is not None and not draft.token_ids:  # all of it was cut
            draft = None
        num_new = 1 if draft is None else 1 + len(draft.token_ids)
        items.append(ScheduledRequest(request=request, num_new_tokens=num_new, draft=draft, samples=True))
    return schedule_of(items)


def schedule_of(items: Sequence[ScheduledRequest]) -> Schedule:
    """Return a schedule of which pricing can be told; no model could run its batch."""
    lengths = [item.num_new_tokens for item in items]
    batch = ScheduledBatch(
        token_ids=[0] * sum(lengths),
        positions=[],
        slot_mapping=[],
        query_lengths=lengths,
        context_lengths=[item.request.num_tokens + item.num_new_tokens for item in items],
        block_tables=[],
        logits_indices=[],
    )
    return Schedule(items=tuple(items), preempted=(), batch=batch)


def outcome_of(item: ScheduledRequest, num_accepted: int) -> Outcome:
    """Return the outcome of a request of which so many draft tokens were accepted."""
    path = tuple(range(num_accepted))
    return Outcome(
        item=item,
        first_row=0,
        committed=[0] * (num_accepted + 1) if item.samples else [],
        path=path,
        follows_leaf=is_leaf(item.draft, path),
        finish_reason=None,
    )


def measure(
    machine: Machine, num_requests: int, *, draft_length: int, num_steps: int, clock: Callable[[], float]
) -> Row:
    """Time the pricing of so many steps, once it has settled: the quickest of a few rounds of them."""
    batch = PricedBatch(num_requests, draft_length, machine, clock)
    for _ in range(NUM_WARM_STEPS):
        batch.step()
    rounds: list[Row] = []
    for _ in range(NUM_ROUNDS):
        batch.timings, batch.num_drafted = Timings(), 0
        for _ in range(num_steps):
            batch.step()
        row = Row(
            machine=machine.name,
            num_requests=num_requests,
            draft_length=batch.num_drafted / num_requests / num_steps,
            ask_s=batch.timings.ask_s / num_steps,
            cut_s=batch.timings.cut_s / num_steps,
            learn_s=batch.timings.learn_s / num_steps,
            meanwhile_s=batch.timings.meanwhile_s / num_steps,
        )
        rounds.append(row)
    return min(rounds, key=lambda row: row.path_s)


# --- the verb ---


def _counts(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
    counts = tuple(parse_numbers(value, int))
    if min(counts) < 1:
        raise click.BadParameter("a step has at least one request")
    return counts


def _micros(name: str) -> Callable[[Row], str]:
    return lambda row: f"{getattr(row, name) * 1e6:.0f}"


COLUMNS = (
    Column[Row]("machine", lambda row: row.machine),
    Column[Row]("requests", lambda row: str(row.num_requests)),
    Column[Row]("drafted", lambda row: f"{row.draft_length:.2f}"),
    Column[Row]("asking", _micros("ask_s")),
    Column[Row]("cutting", _micros("cut_s")),
    Column[Row]("learning", _micros("learn_s")),
    Column[Row]("in all", _micros("path_s")),
    Column[Row](f"{TOLERATED:.0%} of a step of", lambda row: f"{row.path_s / TOLERATED * 1e3:.1f} ms"),
    Column[Row]("meanwhile", _micros("meanwhile_s")),
)


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--num-requests", "counts", default="1,8,64,256", show_default=True, callback=_counts)
@click.option("--draft-length", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--num-steps", type=click.IntRange(min=1), default=200, show_default=True)
@files("json")
def pricing(counts: tuple[int, ...], draft_length: int, num_steps: int, json_file: Path | None) -> None:
    """Time the pricing of drafts: microseconds per step, by how many requests decode in it."""
    rows = [
        measure(machine, count, draft_length=draft_length, num_steps=num_steps, clock=time.perf_counter)
        for machine in MACHINES
        for count in counts
    ]
    console_of(PLAIN_WIDTH).print(table_of(COLUMNS, rows, "µs per step"))
    write(json_file, lambda: [dataclasses.asdict(row) for row in rows])
