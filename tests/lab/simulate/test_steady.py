"""Steady states by hand: steps of 10 ms that cost the same at any size, drafts of 1 ms a token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.lab.simulate.accelerators import StepTiming
from outrider.lab.simulate.drafting import DrafterShape
from outrider.lab.simulate.engines import VerifierShape
from outrider.lab.simulate.load import LengthLaw
from outrider.lab.simulate.simulation import FleetShape
from outrider.lab.simulate.steady import best_state, steady_state


def constant(seconds: float) -> StepTiming:
    return StepTiming(compute_token_s=0.0, base_s=seconds, context_token_s=0.0, overhead_s=0.0)


LENGTHS = LengthLaw(num_prompt_tokens=100, num_output_tokens=100)
PLAIN = FleetShape(verifier=VerifierShape(timing=constant(10e-3), kv_tokens=1600), num_verifiers=2)
OWN = replace(PLAIN, verifier=replace(PLAIN.verifier, own_drafter=constant(1e-3)))


def pool(num_drafters: int, **changes: float) -> FleetShape:
    shape = DrafterShape(
        timing=constant(1e-3), link_s=changes.get("link_s", 0.0), hit_rate=changes.get("hit_rate", 0.0)
    )
    return replace(PLAIN, drafter=shape, num_drafters=num_drafters)


def test_without_drafts_every_request_gets_a_token_a_step() -> None:
    state = steady_state(PLAIN, LENGTHS, 0.5, num_decoding=4, draft_length=0)
    assert state.tokens_per_s == pytest.approx(2 * 4 / 10e-3)
    assert state.tpot_s == pytest.approx(10e-3)


def test_a_verifier_that_drafts_itself_takes_the_time_of_both() -> None:
    # two tokens at 0.5: 1 + 0.5 + 0.25 a round of 10 + 2 ms
    state = steady_state(OWN, LENGTHS, 0.5, num_decoding=4, draft_length=2)
    assert state.tokens_per_s == pytest.approx(2 * 4 * 1.75 / 12e-3)
    assert state.tpot_s == pytest.approx(12e-3 / 1.75)


def test_the_best_length_and_the_most_requests_are_found() -> None:
    # per 10 + k ms: k = 1: 1.5 / 11, k = 2: 1.75 / 12, k = 3: 1.875 / 13; 1,600 positions hold 8 requests of 200
    state = best_state(OWN, LENGTHS, 0.5, tpot_s=0.05)
    assert state is not None
    assert (state.draft_length, state.num_decoding) == (2, 8)


def test_a_pool_overlaps_drafts_and_steps_in_two_groups() -> None:
    # no running ahead. Steps that cost the same whole and halved: waiting for drafts is better
    same = steady_state(pool(2), LENGTHS, 0.5, num_decoding=4, draft_length=2)
    assert same.tokens_per_s == pytest.approx(2 * 4 * 1.75 / 12e-3)
    # 1 ms a token: 12 tokens take 12 ms, or twice 6 with the drafts of the other half behind them
    linear = replace(pool(2), verifier=replace(PLAIN.verifier, timing=replace(constant(0.0), token_s=1e-3)))
    short = LengthLaw(num_prompt_tokens=1, num_output_tokens=100)  # prompts that round to nothing
    assert steady_state(linear, short, 0.5, 4, 2).tokens_per_s == pytest.approx(2 * 4 * 1.75 / 12e-3)


def test_a_link_delays_every_round_and_hides_where_drafters_run_ahead() -> None:
    near, far = (steady_state(pool(2, link_s=link_s), LENGTHS, 0.5, 4, 2) for link_s in (0.0, 3e-3))
    assert near.tokens_per_s / far.tokens_per_s == pytest.approx(15 / 12)
    # a drafter that always knows the outcome has them drafted when the step ends
    assert steady_state(pool(2, hit_rate=1.0), LENGTHS, 0.5, 4, 2).tokens_per_s == pytest.approx(2 * 4 * 1.75 / 10e-3)


def test_verifiers_that_share_a_drafter_slow_each_other() -> None:
    shape = DrafterShape(timing=replace(constant(0.0), token_s=1e-3), link_s=0.0, hit_rate=0.0)
    alone, shared = (
        steady_state(replace(PLAIN, drafter=shape, num_drafters=size), LENGTHS, 0.5, 4, 1) for size in (2, 1)
    )
    # alone: 4 ms of drafts for 4 rows. Shared: 4 + x ms, x = 4 (4 + x) / (14 + x) rows of the other one: 1.403
    assert alone.tokens_per_s == pytest.approx(2 * 4 * 1.5 / 14e-3)
    assert shared.tokens_per_s == pytest.approx(2 * 4 * 1.5 / 15.403e-3, rel=1e-3)
