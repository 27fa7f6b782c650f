"""Rounds of new prompts, and what a candidate's rows say."""

from __future__ import annotations

import click
import pytest

from benchmarks.usual import AGAIN, NEW, OFF, OFF_AGAIN, measure, rounds, rows
from outrider.lab.bench.figures import RequestTrace, RunTrace, Workload
from outrider.verifier_service.messages.request import SpeculationMetrics, SpeculationPlan


class ScriptedArm:
    """Answers with a token each tenth of a second; with drafts it says two at once, of prompts that it knows four."""

    name = "scripted"

    def __init__(self) -> None:
        self.known: set[tuple[int, ...]] = set()
        self.asked: list[tuple[int, int]] = []  # prompts, longest draft

    def run(self, workload: Workload, concurrency: int, plan_of) -> RunTrace:
        plan: SpeculationPlan = plan_of(concurrency)
        self.asked.append((len(workload.prompts), plan.draft_length))
        size = 1
        if plan.draft_length:
            size = 4 if workload.prompts[0] in self.known else 2
            self.known |= {*workload.prompts}
        steps = workload.max_tokens // size
        times_s = tuple(0.1 * (number + 1) for number in range(steps))
        request = RequestTrace(arrival_s=0.0, output_times_s=times_s, output_sizes=(size,) * steps, token_ids=())
        counts = SpeculationMetrics(num_draft_tokens=(size - 1) * steps * concurrency)
        return RunTrace(elapsed_s=0.1 * steps, requests=(request,) * concurrency, num_target_steps=steps, drafts=counts)


def test_no_prompt_is_in_two_rounds():
    found = list(rounds(6, (1, 2), 2))
    assert found == [(0, 1, slice(0, 1)), (0, 2, slice(1, 3)), (1, 1, slice(3, 4)), (1, 2, slice(4, 6))]
    with pytest.raises(click.UsageError, match="5 prompts are too few"):
        list(rounds(5, (1, 2), 2))


def test_each_candidate_meets_new_prompts_and_then_the_same_again():
    arm, workload = ScriptedArm(), Workload(prompts=((1,), (2,), (3,)), max_tokens=8)
    found = measure(arm, workload, (1, 2), 1, lambda what: None)
    assert {count: [*traces] for count, traces in found.items()} == {
        1: [OFF, NEW, AGAIN, OFF_AGAIN],
        2: [OFF, NEW, AGAIN, OFF_AGAIN],
    }
    assert [length for _, length in arm.asked] == [0, 0, 4, 4, 0] * 2
    assert list(rows("scripted", found)) == [
        ["scripted", "1", "10.0", "2.000", "4.000", "1.000", "1.00", "3.00"],
        ["scripted", "2", "20.0", "2.000", "4.000", "1.000", "1.00", "3.00"],
    ]
