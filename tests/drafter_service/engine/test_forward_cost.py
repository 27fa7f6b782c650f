"""A drafter's cost model over a fake runner whose steps take what a curve says."""

from __future__ import annotations

import pytest
import torch

from fakes.runner import TimedRunner
from outrider.drafter_service.engine.drafter import DraftEngineConfig
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.engine.forward_cost import ForwardCost, MeteredRunner
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.draft import Commit, DraftSampling, Open
from tiny.drafters import model_drafter

CONTEXT_S = 1e-5


def forward(cost: ForwardCost, runner: MeteredRunner, count: int) -> None:
    """Run so many one-token sequences."""
    batch = ScheduledBatch(
        token_ids=[1] * count,
        positions=[0] * count,
        slot_mapping=[block * runner.block_size for block in range(count)],
        query_lengths=[1] * count,
        context_lengths=[1] * count,
        block_tables=[[block] for block in range(count)],
        logits_indices=list(range(count)),
    )
    with cost.timed():
        runner.execute(batch)


def profiled() -> tuple[TimedRunner, MeteredRunner, ForwardCost]:
    timed = TimedRunner(lambda count: 1e-3 * (4 + count), context_s=CONTEXT_S)
    metered = MeteredRunner(timed)
    return timed, metered, ForwardCost(lambda: timed.now_s, metered)


def test_a_profiled_drafter_knows_its_forwards_before_the_first():
    _, _, cost = profiled()
    assert cost.next_s(1) == pytest.approx(5e-3, rel=0.02)
    assert cost.next_s(200) == pytest.approx(5e-3 + 200 * CONTEXT_S, rel=0.05), "its context among them"


def test_large_batches_say_what_a_forward_of_one_takes():
    """The median of the last forwards would be that of a batch of 32."""
    timed, metered, cost = profiled()
    timed.curve = lambda count: 2e-3 * (4 + count)  # twice as slow as at the start
    for _ in range(100):
        forward(cost, metered, 32)
    assert cost.next_s(1) == pytest.approx(10e-3, rel=0.1)


def test_what_is_no_forward_of_the_model_says_nothing_of_it():
    timed, _, cost = profiled()
    before = cost.next_s(1)
    for _ in range(50):
        with cost.timed():
            timed.now_s += 1.0  # sessions were taken in, nothing was run
    assert cost.next_s(1) == before


def test_without_a_profile_it_is_the_median_of_the_last_forwards():
    now_s = 0.0
    cost = ForwardCost(lambda: now_s)
    assert cost.next_s(1) is None
    for seconds in (0.25, 9.0, 0.5):
        with cost.timed():
            now_s += seconds
    assert cost.next_s(1) == 0.5


def test_the_meter_is_a_runner_like_the_one_under_it():
    timed, metered, _ = profiled()
    for name in ("vocab_size", "max_model_len", "num_blocks", "block_size", "eos_token_ids", "states"):
        assert getattr(metered, name) == getattr(timed, name), name


def test_an_engines_drafts_and_its_spare_time_are_what_it_learns_from():
    timed, metered, cost = profiled()
    drafter = model_drafter(metered, torch.Generator().manual_seed(0), num_ahead_branches=2)
    engine = DraftEngine(drafter, clock=lambda: timed.now_s, config=DraftEngineConfig(), ahead=drafter, cost=cost)
    at_start_s = cost.next_s(1)
    assert at_start_s is not None
    learnt_s: list[float] = []
    for factor in (2.0, 8.0):
        timed.curve = lambda count, factor=factor: factor * 1e-3 * (4 + count)
        request_id = str(factor)
        engine.handle("v", Open(request_id=request_id, sampling=DraftSampling(temperature=0.0), token_ids=(1, 2)))
        engine.handle("v", Commit(request_id=request_id, round_id=1, position=2, token_ids=(), max_length=8))
        while engine.has_work():
            engine.step()
        learnt_s.append(cost.next_s(1) or 0.0)
        while engine.has_spare_work():
            engine.run_ahead()
        learnt_s.append(cost.next_s(1) or 0.0)
    assert at_start_s < learnt_s[0] < learnt_s[1] < learnt_s[2] < learnt_s[3]
