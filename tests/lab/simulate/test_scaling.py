"""What the simulated autoscaler makes of reports: the same figures as a live one."""

from __future__ import annotations

from fakes.fleet_snapshots import BUSY_VERIFIER
from fakes.reports import changed
from outrider.cluster.scaling.autoscaling import PoolsPolicy
from outrider.lab.simulate.scaling import PoolScaler, ScalingOptions
from outrider.verifier_service.messages.engine import EngineCounters


def test_the_knee_is_filled_by_prompts_and_not_by_drafts_and_as_last_reported():
    scaler = PoolScaler(ScalingOptions(policy=PoolsPolicy()), num_verifiers=2, num_drafters=0)

    def fill(counters: EngineCounters, num_running: int = 20) -> tuple[float, float]:
        one = changed(BUSY_VERIFIER, knee=100.0, counters=counters, num_running=num_running, num_decoding=num_running)
        blind = changed(one, verifier_id="blind", knee=None)
        load = scaler.load_of([one, blind], [], num_undrafted=0).verifiers
        return load.knee_fill, load.num_with_knee

    first = EngineCounters(num_steps=10, num_scheduled_tokens=2000, num_draft_tokens=500)
    second = EngineCounters(num_steps=14, num_scheduled_tokens=2400, num_draft_tokens=700)
    assert fill(first) == (1.5, 1)
    assert fill(second) == (0.5, 1)
    assert fill(second) == (0.5, 1), "it has not reported since"
    assert fill(second, num_running=0) == (0.0, 1)
