"""How many Python calls one more request costs a step: a figure that no machine's noise moves."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from benchmarks.device.engines import PROMPT_LENGTH, Pair, Played, beside, played_engine
from benchmarks.device.played import VirtualClock
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan

FEW, MANY, NUM_SETTLING, NUM_STEPS = 8, 24, 40, 16
OURS = ("verifier_service", "drafter_service", "<string>")  # the last: what dataclasses and named tuples are made by
PAIR = Pair(is_warm=False)


def num_calls(played: Played, num_requests: int) -> float:
    """Return the calls of a step in which so many requests decode."""
    for index in range(num_requests):
        request = GenerationRequest(
            request_id=str(index),
            prompt_token_ids=tuple(range(PROMPT_LENGTH)),
            sampling=SamplingParams(temperature=0.0, max_tokens=3000, ignore_eos=True),
            plan=SpeculationPlan(draft_length=4),
            cache_salt=str(index),
        )
        assert played.engine.add(request) is None
    run(played, NUM_SETTLING)
    found = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal found
        found += event == "call" and any(part in frame.f_code.co_filename for part in OURS)

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run(played, NUM_STEPS)
    finally:
        sys.setprofile(before)
    return found / NUM_STEPS


def run(played: Played, num_steps: int) -> None:
    while num_steps:
        num_steps -= played.engine.step() is not None


@pytest.mark.parametrize(("has_drafter", "most"), [(False, 9), (True, 66)])
def test_one_more_request_costs_few_calls(has_drafter: bool, most: float):
    """Before rows were taken in one pass, 2026-11-29: 93 without drafts, 417 with drafts of four."""
    few, many = (
        num_calls(
            beside(PAIR, VirtualClock())
            if has_drafter
            else played_engine(PAIR, VirtualClock(), async_scheduling=False),
            count,
        )
        for count in (FEW, MANY)
    )
    assert (many - few) / (MANY - FEW) <= most
