"""What drafts save and take in KV: blocks by hand, the scheduler's books, the pipeline against one that is drawn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from outrider.cluster.cli.main import main
from outrider.lab.simulate import kv
from outrider.lab.simulate.accelerators import ACCELERATORS, StepTiming
from outrider.lab.simulate.drafting import DrafterShape
from outrider.lab.simulate.engines import VerifierShape
from outrider.lab.simulate.kv import OFF, KvRow, acceptance_length, fixed_name, pipeline_row, plan_of, study_kv
from outrider.lab.simulate.load import AcceptanceLaw, LengthLaw, Workload
from outrider.lab.simulate.paged_verifier import PagedTotals, PagedVerifier
from outrider.lab.simulate.simulation import FleetShape
from outrider.lab.simulate.system import LoadLaw, System

SYSTEM = System.of(ACCELERATORS["H100"], target_params=70e9, draft_params=1e9)
STEP_S = 0.01


def constant(seconds: float) -> StepTiming:
    return StepTiming(compute_token_s=0.0, base_s=seconds, context_token_s=0.0, overhead_s=0.0)


FLEET = FleetShape(
    verifier=VerifierShape(timing=constant(STEP_S), kv_tokens=1 << 16),
    num_verifiers=1,
    drafter=DrafterShape(timing=constant(0.0), link_s=0.0, hit_rate=0.0),
    num_drafters=1,
)


def workload(arrival_s: list[float], num_prompt: int, num_output: int, rate: float, seed: int = 0) -> Workload:
    count = len(arrival_s)
    return Workload(
        arrival_s=np.asarray(arrival_s),
        num_prompt_tokens=np.full(count, num_prompt),
        num_output_tokens=np.full(count, num_output),
        acceptance=AcceptanceLaw(np.full(count, rate), np.random.default_rng(seed)),
    )


def verifier(requests: Workload, name: str, num_blocks: int = 1000) -> PagedVerifier:
    return PagedVerifier(
        FLEET,
        requests,
        plan_of(name, 8),
        num_blocks=num_blocks,
        acceptance=0.7,
        random=np.random.default_rng(0),
    )


def row(name: str, requests: Workload, end_s: float, num_blocks: int = 1000) -> KvRow:
    totals = verifier(requests, name, num_blocks).run(0.0, end_s)
    return KvRow.of(name, None, 1.0, num_blocks, totals)


def test_a_request_alone_holds_the_blocks_of_its_tokens() -> None:
    """32 tokens of prompt and 20 of output: 20 steps, of which 2 blocks hold the first, 3 the next 16, 4 the rest."""
    found = row(OFF, workload([0.0], 32, 20, 0.5), end_s=1.0)
    assert found.latency_s == pytest.approx(20 * STEP_S)
    assert found.tokens_per_s == pytest.approx(20.0)
    assert found.mean_blocks == pytest.approx((1 * 2 + 16 * 3 + 3 * 4) * STEP_S)
    assert found.peak_blocks == 4
    assert found.num_requests == pytest.approx(20 * STEP_S)


def test_the_same_requests_need_fewer_blocks_at_as_many_tokens_per_second() -> None:
    arrival_s = np.cumsum(np.random.default_rng(1).exponential(0.05, 400)).tolist()
    plain, drafted = (row(name, workload(arrival_s, 64, 64, 0.8), arrival_s[-1]) for name in (OFF, fixed_name(4)))
    length = drafted.acceptance_length
    assert length is not None
    assert length == pytest.approx(acceptance_length(0.8, 4), rel=0.05)
    assert drafted.tokens_per_s == pytest.approx(plain.tokens_per_s, rel=0.05)
    assert drafted.num_requests * length == pytest.approx(plain.num_requests, rel=0.1)  # Little's law
    assert plain.mean_blocks / length < drafted.mean_blocks < plain.mean_blocks * 0.45  # drafts' own slots
    assert drafted.peak_blocks < plain.peak_blocks


@pytest.mark.parametrize("name", [OFF, fixed_name(4)])
def test_a_full_pool_preempts_and_loses_no_token(name: str) -> None:
    requests = workload([0.0] * 40, 30, 50, 0.6)
    running = verifier(requests, name, num_blocks=16)
    totals = PagedTotals()
    for step in range(2000):
        found = running.run(0.0, (step + 1) * STEP_S)
        running.scheduler.check_integrity()
        totals.num_tokens += found.num_tokens
        totals.num_finished += found.num_finished
        totals.num_preemptions += found.num_preemptions
        totals.num_lost += found.num_lost
        totals.num_computed += found.num_computed
        assert found.peak_blocks <= 16
        if totals.num_finished == 40:
            break
    assert (totals.num_finished, totals.num_tokens) == (40, 40 * 50)
    assert totals.num_preemptions > 0
    assert running.pool.num_free_blocks == 16
    if name == OFF:  # every token but the last is computed once, and again whenever its KV was freed
        assert totals.num_computed == 40 * 79 + totals.num_lost


def test_a_drawn_pipeline_yields_what_the_table_says() -> None:
    """Sequences move through stages of one tick each; one that leaves the last has as many tokens as were accepted."""
    num_stages, num_ticks, random = 8, 40_000, np.random.default_rng(3)
    found = pipeline_row(num_stages, 0.7, LengthLaw())
    num_sequences = round(found.num_sequences)  # 2.9
    accepted = np.minimum(random.geometric(0.3, num_sequences * num_ticks) - 1, kv.PIPELINE_DRAFT)
    num_passes = num_sequences * num_ticks // num_stages
    tokens_per_tick = (accepted[:num_passes] + 1).sum() / num_ticks
    assert tokens_per_tick == pytest.approx(num_sequences / found.num_sequences, rel=0.02)  # full without drafts: 1
    assert found.plain_blocks / found.draft_blocks == pytest.approx(found.acceptance_length, rel=0.01)


def test_traces_and_plots_are_refused() -> None:
    with pytest.raises(ValueError, match="--traces"):
        study_kv(
            SYSTEM,
            SYSTEM.disaggregated(1, 1),
            replace(LoadLaw(), traces=(object(),)),  # type: ignore[arg-type]
            [1.0],
            duration_s=1.0,
            seed=0,
        )
    result = CliRunner().invoke(main, ["simulate", "--study", "kv", "--plot", "x.png"])
    assert result.exit_code == 2
    assert "kv has none" in result.output
