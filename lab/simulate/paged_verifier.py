"""A verifier in virtual time whose KV lies in blocks: the service's own scheduler, block pool and price of a step.

engines.py admits a request when the KV of its whole length is free, so nothing is preempted there, and a draft takes no
room. Here requests are admitted, grow, draft and are preempted as in an engine, step by step; the roofline says how
long a step takes, the workload's law what is accepted, the arithmetic of a round (drafting.py) how long drafts take.

Left out: rounds in two groups, the prefix cache, the router.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.lab.simulate.drafting import RoundLoad, SimulatedRound, choose_round
from outrider.lab.simulate.engines import VerifierShape
from outrider.lab.simulate.load import Workload
from outrider.lab.simulate.simulation import FleetShape
from outrider.lab.simulate.steady import draft_speed
from outrider.verifier_service.messages.draft import Draft
from outrider.verifier_service.messages.request import GenerationRequest, Request, SamplingParams, SpeculationPlan
from outrider.verifier_service.pricing.cost_model import StepShape
from outrider.verifier_service.pricing.draft_pricing import DraftPricing
from outrider.verifier_service.pricing.offer import Ask, PricedStep
from outrider.verifier_service.scheduling.kv_cache import BlockPool
from outrider.verifier_service.scheduling.outcome import Outcome, num_draft_tokens
from outrider.verifier_service.scheduling.schedule import Schedule, ScheduledRequest
from outrider.verifier_service.scheduling.scheduler import Scheduler, SchedulerConfig

BLOCK_SIZE = 16  # tokens; the service's default
DRAFTER_ID = "pool"


@dataclass(slots=True, kw_only=True)
class PagedTotals:
    """Sums over the steps of a window."""

    seconds: float = 0.0
    block_seconds: float = 0.0  # blocks in use, each for as long as it was
    peak_blocks: int = 0
    request_seconds: float = 0.0  # requests with KV
    num_tokens: int = 0  # committed
    num_computed: int = 0  # tokens computed, drafts and prompts included
    num_finished: int = 0
    latency_s: float = 0.0  # from arrival to end, of the finished ones together
    num_preemptions: int = 0
    num_lost: int = 0  # tokens whose KV was computed and freed by a preemption
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0


class PlayedEngine:
    """The service's scheduler, block pool and price of drafts, for steps whose drafts and outcomes are drawn."""

    def __init__(self, verifier: VerifierShape, plan: SpeculationPlan, pool: BlockPool, max_model_len: int) -> None:
        """`plan`: of every request."""
        self.pool, self._plan, self._timing, self._pricing = pool, plan, verifier.timing, DraftPricing()
        self._pricing.use_profile(verifier.profile())
        config = SchedulerConfig(
            max_num_batched_tokens=verifier.max_num_batched_tokens,
            max_num_seqs=verifier.max_num_seqs,
            max_model_len=max_model_len,
            vocab_size=1,
            enable_prefix_caching=pool.enable_prefix_caching,
        )
        self.scheduler = Scheduler(config, pool, self._pricing)

    def _ask(self, requests: Sequence[Request]) -> list[int]:
        """Ask for drafts' lengths. No position of one lies behind the last but one token."""
        bounds = [min(self._plan.draft_length, one.sampling.max_tokens - one.num_output_tokens - 1) for one in requests]
        asks = [Ask(request, DRAFTER_ID, bound) for request, bound in zip(requests, bounds, strict=True)]
        return [asked.length for asked in self._pricing.ask_all(asks)]

    def _end_step(self, schedule: Schedule, outcomes: Sequence[Outcome], exposed_s: float) -> float:
        """Price and commit a step that has waited `exposed_s` for drafts; return how long it took beside that."""
        shape = StepShape(schedule.batch.num_tokens, sum(schedule.batch.context_lengths))
        step_s = self._timing.seconds(shape.num_tokens, shape.num_context_tokens)
        if not self._plan.is_off:
            self._pricing.end_step(PricedStep(outcomes, [], shape, step_s=step_s, exposed_s=exposed_s))
        self.scheduler.commit(outcomes)
        for item in schedule.items:
            if has_ended(item.request):
                self.scheduler.remove(item.request.request_id)
                self._pricing.forget(item.request.request_id)
        return step_s


class PagedVerifier(PlayedEngine):
    """One verifier of a fleet, with its share of the drafters."""

    def __init__(
        self,
        fleet: FleetShape,
        workload: Workload,
        plan: SpeculationPlan,
        *,
        num_blocks: int,
        acceptance: float,
        random: np.random.Generator,
    ) -> None:
        """`plan`: of every request; `acceptance`: of a draft position on average, by which rounds are chosen.

        Raises `ValueError` where a request does not fit into the pool alone.
        """
        pool = BlockPool(num_blocks, BLOCK_SIZE, enable_prefix_caching=False)
        longest = int((workload.num_prompt_tokens + workload.num_output_tokens).max()) + 1
        super().__init__(fleet.verifier, plan, pool, longest)
        self.clock_s = 0.0
        self._fleet, self._workload = fleet, workload
        self._acceptance, self._random = acceptance, random
        self._next = 0  # of the workload's requests
        self._rows_in_flight = 0.0  # at the drafters, in the last round

    def run(self, begin_s: float, end_s: float) -> PagedTotals:
        """Run until `end_s`; return the sums over the steps that begin from `begin_s` on."""
        totals = PagedTotals()
        arrivals = self._workload.arrival_s
        while self.clock_s < end_s:
            self._take_arrivals()
            if self.scheduler.has_work():
                self._step(totals if self.clock_s >= begin_s else PagedTotals())
                continue
            next_s = float(arrivals[self._next]) if self._next < len(arrivals) else end_s
            if next_s > begin_s:  # nothing runs: no block is in use
                totals.seconds += min(next_s, end_s) - max(self.clock_s, begin_s)
            self.clock_s = next_s
        return totals

    def _take_arrivals(self) -> None:
        workload = self._workload
        while self._next < workload.num_requests and workload.arrival_s[self._next] <= self.clock_s:
            number = self._next
            message = GenerationRequest(
                request_id=str(number),
                prompt_token_ids=(0,) * int(workload.num_prompt_tokens[number]),
                sampling=SamplingParams(temperature=0.0, max_tokens=int(workload.num_output_tokens[number])),
                plan=self._plan,
            )
            self.scheduler.add(Request.of(message, float(workload.arrival_s[number])))
            self._next += 1

    def _step(self, totals: PagedTotals) -> None:
        """Draft, schedule, verify and commit."""
        way, num_kept = self._draft(), self._num_kept()
        schedule = self.scheduler.schedule(self.clock_s)
        assert schedule is not None, "a request runs alone in the pool"
        num_running, num_blocks = len(self.scheduler.running), self.pool.num_blocks - self.pool.num_free_blocks
        totals.peak_blocks = max(totals.peak_blocks, num_blocks)
        totals.num_computed += schedule.batch.num_tokens
        totals.num_preemptions += len(schedule.preempted)
        totals.num_lost += num_kept - self._num_kept()
        outcomes, exposed_s = self._verify(schedule), way.seconds - way.step_s  # the wait for drafts
        seconds = self._end_step(schedule, outcomes, exposed_s) + exposed_s
        self.clock_s += seconds
        totals.seconds += seconds
        totals.block_seconds += seconds * num_blocks
        totals.request_seconds += seconds * num_running
        self._count(schedule, outcomes, totals)

    def _num_kept(self) -> int:
        """Count the tokens whose KV is in the pool; a schedule changes it by preemptions alone."""
        return sum(request.num_computed_tokens for request in self.scheduler.running)

    def _draft(self) -> SimulatedRound:
        """Give the decoding requests their drafts; return how the round runs."""
        speculating = () if self._plan.is_off else self.scheduler.running
        decoding = [request for request in speculating if request.num_tokens - request.num_computed_tokens == 1]
        lengths = self._ask(decoding)
        self._pricing.learn()
        context = sum(request.num_tokens for request in decoding)
        longest = max(lengths, default=0)
        load = RoundLoad(
            num_decoding=len(decoding),
            num_at_least=tuple(sum(length > place for length in lengths) for place in range(longest)),
            num_context_tokens=context,
        )
        mean = context / max(1, len(decoding))
        speed = draft_speed(self._fleet, len(decoding), mean, self._rows_in_flight) if longest else None
        way = choose_round(load, self._fleet.verifier.timing, speed, self._acceptance, may_group=False)
        self._rows_in_flight = way.rows_in_flight
        for request, length in zip(decoding, lengths, strict=True):
            if min(length, way.longest) and self._random.random() < way.share:
                request.draft = draft_of(request, min(length, way.longest))
        return way

    def _verify(self, schedule: Schedule) -> list[Outcome]:
        """Draw what the target accepts of every draft."""
        items = schedule.items
        accepted = self._workload.acceptance.accepted(
            np.asarray([int(item.request.request_id) for item in items]),
            np.asarray([item.request.num_output_tokens for item in items]),
            np.asarray([[num_draft_tokens(item) for item in items]]),
            1,
        )[0].tolist()
        return [outcome_of(item, num_accepted) for item, num_accepted in zip(items, accepted, strict=True)]

    def _count(self, schedule: Schedule, outcomes: Sequence[Outcome], totals: PagedTotals) -> None:
        for item, outcome in zip(schedule.items, outcomes, strict=True):
            totals.num_tokens += len(outcome.committed)
            totals.num_drafts += item.draft is not None
            totals.num_draft_tokens += num_draft_tokens(item)
            totals.num_accepted += len(outcome.path)
            if has_ended(item.request):
                totals.num_finished += 1
                totals.latency_s += self.clock_s - item.request.arrival_s


def has_ended(request: Request) -> bool:
    return request.num_output_tokens == request.sampling.max_tokens


def draft_of(request: Request, length: int) -> Draft:
    """Return a draft of so many tokens; which they are does not matter."""
    return Draft(request_id=request.request_id, round_id=0, position=request.num_tokens, token_ids=(0,) * length)


def outcome_of(item: ScheduledRequest, num_accepted: int) -> Outcome:
    """Return a request's outcome in a step in which so many tokens of its draft were accepted."""
    return Outcome.counted(
        item.request,
        item.draft,
        num_new_tokens=item.num_new_tokens,
        num_committed=1 + num_accepted if item.samples else 0,
        num_accepted=num_accepted,
    )
