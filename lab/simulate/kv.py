"""What drafts save in KV, and what they cost in it.

at a load      the same requests arrive with drafts and without: tokens/s are equal, and as requests end sooner, fewer
               are there
in a pipeline  S stages are full with S sequences in flight, each with its KV; where a pass through the stages yields a
               tokens of a sequence, S / a sequences give as many tokens ("SHIP: SRAM-Based Huge Inference Pipelines",
               MLSys 2026, of which only the abstract was read: the arithmetic here is ours)
in a pool      the pool is full and a queue waits: drafts take slots for tokens that may be rejected
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider.lab.simulate.accelerators import kv_capacity
from outrider.lab.simulate.load import LengthLaw
from outrider.lab.simulate.paged_verifier import BLOCK_SIZE, DRAFTER_ID, PagedTotals, PagedVerifier
from outrider.lab.simulate.simulation import FleetShape
from outrider.lab.simulate.system import LoadLaw, System
from outrider.verifier_service.messages.request import SpeculationPlan

ACCEPTANCES = (0.5, 0.7, 0.9)  # of a draft position: from look-ups to a head on code
STAGES = (1, 2, 4, 8, 16)
PIPELINE_DRAFT = 4  # tokens, of the pipeline's table
FIXED_LENGTHS = (4, 8)  # of drafts in a full pool, whether they pay or not
POOL_REQUESTS = (8, 32)  # of mean length that a full pool holds
OVERLOAD = 2.0  # requests per second offered to a full pool, over the most that any arm has answered
WARM_UP_SHARE = 0.25  # of the arrivals' span, which does not count
OFF, PRICED = "no drafts", "priced"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRow:
    """One run: means over its window."""

    name: str
    acceptance: float | None  # of a draft position; None: nothing is drafted
    qps: float  # requests per second, offered
    num_blocks: int  # of the pool
    tokens_per_s: float
    num_requests: float  # with KV, on average
    mean_blocks: float  # in use
    peak_blocks: int
    latency_s: float | None  # of the requests that ended; None: none did
    finished_per_s: float
    preemptions_per_100: float | None  # per 100 requests that ended
    lost_share: float  # of the tokens computed: their KV was freed by a preemption
    draft_length: float | None  # None: nothing was drafted
    acceptance_length: float | None  # tokens per verification of a draft

    @classmethod
    def of(cls, name: str, acceptance: float | None, qps: float, num_blocks: int, totals: PagedTotals) -> KvRow:
        seconds, ended, drafts = max(totals.seconds, 1e-9), totals.num_finished, totals.num_drafts
        return cls(
            name=name,
            acceptance=acceptance,
            qps=qps,
            num_blocks=num_blocks,
            tokens_per_s=totals.num_tokens / seconds,
            num_requests=totals.request_seconds / seconds,
            mean_blocks=totals.block_seconds / seconds,
            peak_blocks=totals.peak_blocks,
            latency_s=totals.latency_s / ended if ended else None,
            finished_per_s=ended / seconds,
            preemptions_per_100=100.0 * totals.num_preemptions / ended if ended else None,
            lost_share=totals.num_lost / max(1, totals.num_computed),
            draft_length=totals.num_draft_tokens / drafts if drafts else None,
            acceptance_length=1.0 + totals.num_accepted / drafts if drafts else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRow:
    """How many sequences fill a pipeline, and the KV blocks that they hold."""

    num_stages: int
    acceptance: float
    acceptance_length: float  # a: tokens that a pass through all stages yields
    num_sequences: float  # with drafts, at least one; without: one for each stage
    num_with_stage: float  # the same, where the drafter is a stage more
    plain_blocks: float
    draft_blocks: float  # slots of the drafts included


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStudy:
    """The three tables."""

    block_size: int
    bytes_per_block: float
    loads: tuple[KvRow, ...]
    pipeline: tuple[PipelineRow, ...]
    pools: tuple[KvRow, ...]


def study_kv(
    system: System,
    fleet: FleetShape,
    load: LoadLaw,
    rates: Sequence[float],
    *,
    duration_s: float,
    seed: int,
    on_run: Callable[[], None] = lambda: None,
) -> KvStudy:
    """Simulate one verifier of the fleet, with its share of the requests per second in `rates` and of the drafters.

    In a full pool drafts are waited for: how far a drafter gets ahead would shorten fixed lengths.
    """
    if load.traces:
        raise ValueError("--traces: this study takes acceptance from its own table")
    most = kv_capacity(system.accelerator, system.target, system.tensor_parallel_size) // BLOCK_SIZE
    acceptances = sorted({*ACCEPTANCES, load.acceptance})

    def run(on: FleetShape, name: str, acceptance: float | None, qps: float, num_blocks: int) -> KvRow:
        random, rate = np.random.default_rng(seed), load.acceptance if acceptance is None else acceptance
        requests = replace(load, acceptance=rate).steady(qps, max(1, round(qps * duration_s)), random)
        plan, end_s = plan_of(name, system.num_speculative_tokens), float(requests.arrival_s[-1])
        verifier = PagedVerifier(on, requests, plan, num_blocks=num_blocks, acceptance=rate, random=random)
        totals = verifier.run(WARM_UP_SHARE * end_s, end_s)
        on_run()
        return KvRow.of(name, acceptance, qps, num_blocks, totals)

    arms = ((OFF, None), *((PRICED, acceptance) for acceptance in acceptances))
    loads = [run(fleet, *arm, rate / fleet.num_verifiers, most) for rate, arm in itertools.product(rates, arms)]
    full_qps = OVERLOAD * max(row.finished_per_s for row in loads)
    names = (*(fixed_name(length) for length in FIXED_LENGTHS), PRICED)
    ends = (acceptances[0], acceptances[-1])
    full_arms = ((OFF, None), *((name, acceptance) for acceptance, name in itertools.product(ends, names)))
    waiting = fleet if fleet.drafter is None else replace(fleet, drafter=replace(fleet.drafter, hit_rate=0.0))
    sizes = (num_requests * blocks_of(load.lengths) for num_requests in POOL_REQUESTS)
    return KvStudy(
        block_size=BLOCK_SIZE,
        bytes_per_block=BLOCK_SIZE * system.target.kv_bytes_per_token,
        loads=tuple(loads),
        pipeline=tuple(
            pipeline_row(num_stages, acceptance, load.lengths)
            for num_stages, acceptance in itertools.product(STAGES, acceptances)
        ),
        pools=tuple(run(waiting, *arm, full_qps, size) for size, arm in itertools.product(sizes, full_arms)),
    )


def fixed_name(length: int) -> str:
    return f"K = {length}"


def plan_of(name: str, max_length: int) -> SpeculationPlan:
    """Return the plan of an arm, which every request follows."""
    if name == OFF:
        return SpeculationPlan()
    if name == PRICED:
        return SpeculationPlan(drafter_id=DRAFTER_ID, draft_length=max_length)
    return SpeculationPlan(drafter_id=DRAFTER_ID, draft_length=int(name.rpartition(" ")[2]), is_pinned=True)


def blocks_of(lengths: LengthLaw) -> int:
    """Return the KV blocks of a request of mean length at its end."""
    return -(-(lengths.num_prompt_tokens + lengths.num_output_tokens) // BLOCK_SIZE)


def acceptance_length(acceptance: float, draft_length: int) -> float:
    """Return the mean number of tokens that a verification yields, the target's own included."""
    return float(sum(acceptance**position for position in range(draft_length + 1)))


def pipeline_row(num_stages: int, acceptance: float, lengths: LengthLaw) -> PipelineRow:
    """Return what S sequences without drafts, one in each stage, come to with drafts at as many tokens per second.

    A stage is taken to need as long for a sequence's 1 + K tokens as for one, and a drafter no longer than a stage. A
    sequence holds half of its output on average, and in its pass the slots of its draft.
    """
    length = acceptance_length(acceptance, PIPELINE_DRAFT)
    num_sequences = max(1.0, num_stages / length)
    context = lengths.num_prompt_tokens + lengths.num_output_tokens / 2 + BLOCK_SIZE / 2  # half a block is empty
    return PipelineRow(
        num_stages=num_stages,
        acceptance=acceptance,
        acceptance_length=length,
        num_sequences=num_sequences,
        num_with_stage=max(1.0, (num_stages + 1) / length),
        plain_blocks=num_stages * context / BLOCK_SIZE,
        draft_blocks=num_sequences * (context + PIPELINE_DRAFT) / BLOCK_SIZE,
    )
