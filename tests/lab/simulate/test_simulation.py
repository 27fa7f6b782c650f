"""A fleet in virtual time: nothing is lost or made up, time goes forward, and the arms come out in order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from outrider.cluster.router.fleet import PolicyMode, RouterPolicy
from outrider.cluster.scaling.autoscaling import PoolsPolicy, ReplicaRange
from outrider.lab.replay.traces import Trace
from outrider.lab.simulate.accelerators import StepTiming
from outrider.lab.simulate.drafting import DrafterShape, DraftSpeed, RoundLoad, choose_round, with_drafts
from outrider.lab.simulate.engines import VerifierShape
from outrider.lab.simulate.figures import LatencyBounds, RunFigures
from outrider.lab.simulate.lengths import PricedLengths, RoundSeen, Row
from outrider.lab.simulate.load import (
    AcceptanceLaw,
    AcceptanceTraces,
    Day,
    LengthLaw,
    Workload,
    day_arrivals,
    law_workload,
    poisson_arrivals,
)
from outrider.lab.simulate.scaling import DelayedTarget, ScalingOptions
from outrider.lab.simulate.simulation import FleetShape, LengthMode, Simulation, SimulationOptions
from outrider.verifier_service.messages.request import SpeculationPlan

# base 10 ms, knee at 100 tokens
TARGET = StepTiming(compute_token_s=1e-4, base_s=10e-3, context_token_s=1e-8, overhead_s=0.0)
DRAFT = StepTiming(compute_token_s=2e-6, base_s=0.5e-3, context_token_s=0.0, overhead_s=0.0)
VERIFIER = VerifierShape(timing=TARGET, kv_tokens=20_000, max_num_seqs=32, max_num_batched_tokens=512)
FLEET = FleetShape(verifier=VERIFIER, num_verifiers=2, drafter=DrafterShape(timing=DRAFT, hit_rate=0.9), num_drafters=1)
OFF = SimulationOptions(policy=RouterPolicy(mode=PolicyMode.OFF), lengths=LengthMode.PLANNED)
FIXED = SimulationOptions(policy=RouterPolicy(mode=PolicyMode.ALWAYS), lengths=LengthMode.PLANNED)
ADAPTIVE = SimulationOptions()
ORACLE = replace(FIXED, lengths=LengthMode.ORACLE)
LENGTHS = LengthLaw(num_prompt_tokens=50, num_output_tokens=60)


def workload_of(num_requests: int, qps: float, seed: int = 0, acceptance: float = 0.7) -> Workload:
    random = np.random.default_rng(seed)
    arrival_s = poisson_arrivals(qps, num_requests, random)
    return law_workload(arrival_s, LENGTHS, random, acceptance=acceptance, concentration=8.0)


def run(
    options: SimulationOptions, *, num_requests: int = 60, qps: float = 20.0, fleet: FleetShape = FLEET, seed: int = 0
) -> Simulation:
    workload = workload_of(num_requests, qps, seed)
    simulation = Simulation(fleet, workload, options, np.random.default_rng(seed))
    simulation.run()
    return simulation


def figures(options: SimulationOptions, qps: float, fleet: FleetShape = FLEET) -> RunFigures:
    simulation = run(options, num_requests=round(8 * qps), qps=qps, fleet=fleet)
    return RunFigures.of("", simulation, LatencyBounds())


# Conservation.


@pytest.mark.parametrize("options", [OFF, FIXED, ADAPTIVE, ORACLE], ids=["off", "fixed", "adaptive", "oracle"])
def test_every_request_ends_once_with_all_of_its_tokens(options: SimulationOptions) -> None:
    simulation = run(options)
    ledger = simulation.ledger
    assert ledger.num_finished == 60
    assert (ledger.num_tokens == simulation.workload.num_output_tokens).all()
    assert ledger.tokens_between(0.0, 1e6) == ledger.num_tokens.sum()


@pytest.mark.parametrize("seed", range(6))
def test_own_and_accepted_tokens_add_up(seed: int) -> None:
    counters = run(FIXED, num_requests=1, fleet=replace(FLEET, num_verifiers=1), seed=seed).ledger
    # every step commits what was accepted and a token of its own; where a draft goes past the end, not even that
    own = counters.num_tokens.sum() - counters.num_accepted_tokens
    assert counters.num_drafts > 0
    assert counters.num_steps - 1 <= own <= counters.num_steps
    assert counters.num_accepted_tokens <= counters.num_draft_tokens


def test_a_request_alone_takes_its_prompt_and_a_step_per_token() -> None:
    workload = workload_of(1, 1.0)
    simulation = Simulation(FLEET, workload, OFF, np.random.default_rng(0))
    simulation.run()
    num_prompt, num_output = int(workload.num_prompt_tokens[0]), int(workload.num_output_tokens[0])
    steps_s = sum(TARGET.seconds(1, num_prompt + position) for position in range(1, num_output))
    assert simulation.ledger.ttft_s[0] == pytest.approx(TARGET.seconds(num_prompt, 0))
    assert simulation.ledger.finish_s[0] - simulation.ledger.first_token_s[0] == pytest.approx(steps_s, rel=0.01)


def test_a_seed_gives_the_same_figures_and_another_gives_others() -> None:
    first, again, other = (run(ADAPTIVE, seed=seed).ledger for seed in (3, 3, 4))
    assert (first.finish_s == again.finish_s).all()
    assert first.num_draft_tokens == again.num_draft_tokens
    assert first.finish_s[-1] != other.finish_s[-1]


def test_runs_of_rounds_give_what_single_rounds_give() -> None:
    single = replace(FLEET, verifier=replace(VERIFIER, max_rounds=1))
    fast, slow = (run(FIXED, num_requests=150, fleet=fleet).ledger for fleet in (FLEET, single))
    assert fast.num_advances < slow.num_advances / 3
    assert np.mean(fast.tpot_s) == pytest.approx(np.mean(slow.tpot_s), rel=0.05)


def test_requests_wait_for_kv_and_for_rows() -> None:
    tight = replace(FLEET, num_verifiers=1, verifier=replace(VERIFIER, kv_tokens=1000))
    narrow = replace(FLEET, num_verifiers=1, verifier=replace(VERIFIER, max_num_seqs=2))
    wide = run(OFF, fleet=replace(FLEET, num_verifiers=1)).ledger
    for fleet in (tight, narrow):
        ledger = run(OFF, fleet=fleet).ledger
        assert ledger.is_complete
        assert np.median(ledger.ttft_s) > 3 * np.median(wide.ttft_s)


# The arms.


def test_adaptive_is_between_off_and_the_oracle_when_there_is_room() -> None:
    off, adaptive, oracle = (figures(options, 8.0) for options in (OFF, ADAPTIVE, ORACLE))
    assert adaptive.tpot_p50_s < 0.6 * off.tpot_p50_s
    assert oracle.tpot_p50_s <= 1.05 * adaptive.tpot_p50_s
    assert adaptive.mean_acceptance_length is not None
    assert adaptive.mean_acceptance_length > 2.0


def test_adaptive_gives_up_drafts_where_fixed_lengths_lose_throughput() -> None:
    # with 200 rows a step is twice past the knee
    wide = replace(FLEET, num_verifiers=1, verifier=replace(VERIFIER, max_num_seqs=200, kv_tokens=40_000))
    off, fixed, adaptive = (figures(options, 110.0, wide) for options in (OFF, FIXED, ADAPTIVE))
    assert fixed.tokens_per_s < 0.9 * off.tokens_per_s
    assert adaptive.tokens_per_s > 0.95 * off.tokens_per_s


def lengths_priced(num_rows: int, *, is_pinned: bool) -> list[int]:
    """Return what rows ask for after steps that took as long as they should, all of their drafts being right."""
    plan = SpeculationPlan(drafter_id="d0", draft_length=8, is_pinned=is_pinned)
    policy, rows = PricedLengths(VERIFIER.profile()), [Row(at, plan) for at in range(num_rows)]
    speed = DraftSpeed(token_s=1e-4, is_local=True)
    for _ in range(20):
        asked = policy.ask(rows)
        verified = policy.admit(asked)
        counts = np.bincount(verified, minlength=1)
        load = RoundLoad(num_decoding=num_rows, num_at_least=tuple(np.cumsum(counts[:0:-1])[::-1].tolist()))
        way = choose_round(load, TARGET, speed, 0.9)
        policy.end_round(RoundSeen(load, way, verified, [1 + length for length in verified]))
    return asked


def test_a_step_past_the_knee_drafts_nothing_but_what_is_pinned() -> None:
    assert min(lengths_priced(2, is_pinned=False)) > 2
    assert max(lengths_priced(400, is_pinned=False)) == 0
    assert set(lengths_priced(400, is_pinned=True)) == {8}


# Drafting.

LOAD = RoundLoad(num_decoding=10, num_at_least=(10, 10, 10, 10), num_context_tokens=0)


def test_running_ahead_drafts_as_far_as_it_gets_in_a_step() -> None:
    speed = DraftSpeed(token_s=5e-3, ahead_token_s=4e-3, link_s=1e-3, hit_rate=0.9)
    way = choose_round(LOAD, TARGET, speed, 0.8)
    # 2 x 4 ms fit in a step of 10 ms; only the link shows
    assert (way.longest, way.share) == (2, 0.9)
    assert way.seconds == pytest.approx(11e-3)


def test_a_round_takes_as_long_as_what_it_really_verifies() -> None:
    speed = DraftSpeed(token_s=5e-3, ahead_token_s=4e-3, link_s=1e-3, hit_rate=0.9)
    way = choose_round(LOAD, TARGET, speed, 0.8)
    assert with_drafts(way, LOAD, TARGET, 200).seconds == pytest.approx(1e-3 + TARGET.seconds(210, 0))
    grouped = RoundLoad(num_decoding=200, num_at_least=(200,), num_context_tokens=0)
    two = choose_round(grouped, TARGET, DraftSpeed(token_s=1e-3, link_s=9e-3), 0.9)
    assert with_drafts(two, grouped, TARGET, 100).seconds == pytest.approx(2 * TARGET.seconds(150, 0))
    plain = choose_round(LOAD, TARGET, None, 0.9)
    assert with_drafts(plain, LOAD, TARGET, 0) == plain


def test_two_groups_hide_a_slow_link() -> None:
    load = RoundLoad(num_decoding=200, num_at_least=(200,), num_context_tokens=0)
    way = choose_round(load, TARGET, DraftSpeed(token_s=1e-3, link_s=9e-3), 0.9)
    assert (way.num_steps, way.share) == (2, 1.0)
    assert way.seconds == pytest.approx(TARGET.seconds(400, 0))


# The load.


def test_a_law_accepts_at_its_rate_up_to_the_bound() -> None:
    law = AcceptanceLaw(np.asarray([0.5, 0.9]), np.random.default_rng(0))
    bounds = np.broadcast_to(np.asarray([3, 2]), (20_000, 2))
    accepted = law.accepted(np.asarray([0, 1]), np.asarray([0, 0]), bounds, 20_000)
    assert accepted.mean(axis=0) == pytest.approx([0.5 + 0.25 + 0.125, 0.9 + 0.81], rel=0.02)
    assert accepted.max(axis=0).tolist() == [3, 2]
    assert law.survivals(0, 3) == [0.5, 0.25, 0.125]


def trace(lengths: list[int]) -> Trace:
    return Trace(prompt_ids=[1] * 5, generated_ids=[2] * len(lengths), recorded={"eagle": lengths})


def test_a_trace_is_replayed_from_position_to_position() -> None:
    traces = AcceptanceTraces([trace([1, 1]), trace([3, 2, 1, 4, 3, 2])], "eagle")
    bounds = np.broadcast_to(np.asarray([2]), (3, 1))
    # request 3 is trace 1: at 0 two are right; at 3 three, of which two are drafted; at 6 it is past the end
    steps = traces.accepted(np.asarray([3]), np.asarray([0]), bounds, 3)
    assert steps[:, 0].tolist() == [2, 2, 1]
    assert traces.survivals(1, 5) == [(5 + 1) / 8, (3 + 0.5) / 8, (1 + 0.25) / 8, 0.0, 0.0]
    with pytest.raises(ValueError, match="ngram"):
        AcceptanceTraces([trace([1])], "ngram")


def test_a_day_has_its_mean_its_sine_and_its_bursts() -> None:
    day = Day(mean_qps=10.0, length_s=1000.0, num_bursts=1)
    arrival_s = day_arrivals(day, np.random.default_rng(0))
    assert len(arrival_s) == pytest.approx(10.0 * 1000.0 * 1.018, rel=0.03)
    assert (np.diff(arrival_s) >= 0).all()
    assert np.count_nonzero(arrival_s < 100) < np.count_nonzero((arrival_s >= 600) & (arrival_s < 700)) / 2
    assert day.qps(np.asarray([505.0]))[0] == pytest.approx(2 * 18.0, rel=0.01)


# Scaling.


def test_a_target_follows_wishes_that_last() -> None:
    options = ScalingOptions(policy=PoolsPolicy(), upscale_delay_s=5.0, downscale_delay_s=50.0)
    target = DelayedTarget(2)
    assert [target.after(3, now_s, options) for now_s in (0.0, 4.0, 5.0)] == [2, 2, 3]
    assert [target.after(1, now_s, options) for now_s in (6.0, 50.0, 56.0)] == [3, 3, 1]
    assert [target.after(wish, now_s, options) for wish, now_s in ((2, 60.0), (1, 63.0), (2, 64.0), (2, 68.0))] == [
        1
    ] * 4


def test_pools_follow_a_day_and_no_request_is_lost() -> None:
    random = np.random.default_rng(0)
    day = Day(mean_qps=40.0, length_s=40.0, swing=0.95, num_bursts=0)
    workload = law_workload(day_arrivals(day, random), LENGTHS, random, acceptance=0.7, concentration=8.0)
    policy = PoolsPolicy(
        verifiers=ReplicaRange(1, 4),
        drafters=ReplicaRange(0, 2),
        requests_per_verifier=4.0,
        sessions_per_drafter=8.0,
    )
    scaling = ScalingOptions(policy=policy, interval_s=1.0, upscale_delay_s=1.0, downscale_delay_s=3.0, start_s=2.0)
    fleet = replace(FLEET, num_verifiers=1, num_drafters=1)
    simulation = Simulation(fleet, workload, replace(ADAPTIVE, scaling=scaling), random)
    simulation.run()
    sizes = [sample.num_verifiers for sample in simulation.samples]
    assert (simulation.ledger.num_tokens == workload.num_output_tokens).all()
    assert min(sizes) >= 1
    assert max(sizes) > 1
    assert sizes[-1] < max(sizes)


# Who places requests.

MANY = FleetShape(verifier=replace(VERIFIER, max_num_seqs=4), num_verifiers=6)
BY_GATEWAYS = replace(OFF, num_gateways=5, has_affinity=True)


def test_what_a_verifier_has_no_place_for_is_refused_and_the_rest_is_served() -> None:
    ledgers = [
        run(replace(options, most_waiting=1), num_requests=200, qps=400.0, fleet=MANY).ledger
        for options in (BY_GATEWAYS, replace(OFF, has_affinity=True))
    ]
    for ledger in ledgers:
        assert 0 < ledger.num_refused < 200
        assert np.isnan(ledger.finish_s).sum() == ledger.num_refused
    assert run(BY_GATEWAYS, num_requests=200, qps=400.0, fleet=MANY).ledger.num_refused == 0


def test_a_gateway_that_knows_nothing_of_the_others_makes_requests_wait_little_longer() -> None:
    knowing, many = (
        np.quantile(run(options, num_requests=600, qps=30.0, fleet=MANY).ledger.ttft_s, 0.99)
        for options in (replace(OFF, has_affinity=True, most_waiting=9), replace(BY_GATEWAYS, most_waiting=9))
    )
    assert many <= 1.1 * knowing
