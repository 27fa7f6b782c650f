"""Every failure again and again against live services; the table they leave is committed as docs/results/soak.md."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from services.external_drafter import FAULTS, MORE_FAULTS
from services.failures import (
    ENGINE_TIMEOUT_S,
    FLEET_CASES,
    HANDOVER_CASES,
    LINK_CASES,
    MAX_TOKENS,
    NUM_STREAMS,
    PARALLEL_CASES,
    REAL_CASES,
    Outcome,
    drafter_drill,
    fleet_drill,
    handover_drill,
    parallel_drill,
    real_drill,
    require_unharmed,
)
from services.live_service import SharedRay
from services.trained import LEARNING_CASES, TRAINED_CASES, learning_drill, trained_drill
from soak_length import SoakLength

NUM_FAILING_STREAMS = {case.name: case.num_failing_streams for case in FLEET_CASES}

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]


class Soak:
    """Failures again and again, and the table that they leave."""

    def __init__(self, name: str, title: str, streams: str) -> None:
        self._name, self._title, self._streams = name, title, streams
        self._rows: dict[str, list[Outcome]] = {}

    def repeat(self, runs: dict[str, Callable[[int], Outcome]], length: SoakLength) -> None:
        """Run every case in turn, so often; the table is written each time: a soak cut short leaves what it saw."""
        page = length.pages / f"{self._name}.md"
        for index in range(length.num_runs):
            for name, run in runs.items():
                self._rows.setdefault(name, []).append(run(index))
                page.write_text(self.table(), encoding="utf-8")
        for name in runs:
            for outcome in self._rows[name]:
                require_unharmed(outcome, num_failed=NUM_FAILING_STREAMS.get(name, 0))

    def table(self) -> str:
        """Describe the runs in Markdown, one line per case."""
        lines = "\n".join(_row(name, outcomes) for name, outcomes in self._rows.items())
        return (
            f"# {self._title}\n\n{_conclusion([each for outcomes in self._rows.values() for each in outcomes])}\n\n"
            f"Written by `make soak` on {os.cpu_count()} cores ({platform.machine()}). In each run {self._streams} "
            "are under way when the failure strikes a real process or link; each stream's tokens are compared with "
            "plain decoding's. *Lost* and *doubled* count tokens, *hung* and *failed* streams (a killed gateway's "
            "clients get an error: that is all it can do). The pause is the longest gap between two chunks of a "
            "stream; whole again means that every replica is back, holds nothing, and drafts come.\n\n"
            "| failure | runs | hung | lost | doubled | failed | longest pause (s) | whole again after, longest (s) |\n"
            "|---|---|---|---|---|---|---|---|\n"
            f"{lines}\n"
        )


EMBEDDED = Soak(
    "soak",
    "Soak: failures, again and again",
    f"{NUM_STREAMS} streams (greedy and seeded, {MAX_TOKENS} tokens of the embedded pair; of two verifiers "
    f"a silent engine is given up after {ENGINE_TIMEOUT_S:g} s, `--engine-timeout-s`, 10 s by default)",
)
TRAINED = Soak(
    "soak_rollouts",
    "Soak: weights that change under streams",
    f"{NUM_STREAMS} streams (greedy and seeded, {MAX_TOKENS} tokens of the embedded pair, two verifiers, two drafters; "
    "updates bring two sets of weights in turn, and each token is compared with what those draw that it names)",
)
LEARNING = Soak(
    "soak_learning",
    "Soak: drafters that learn, and what ends meanwhile",
    f"{NUM_STREAMS} streams (greedy and seeded, {MAX_TOKENS} tokens of the embedded pair, one verifier, two drafters "
    "whose learner is told to publish a version)",
)
HANDOVERS = Soak(
    "soak_handover",
    "Soak: requests that change their verifier, and what ends meanwhile",
    f"{NUM_STREAMS} streams (greedy and seeded, {MAX_TOKENS} tokens of the embedded pair, prompts of about 350; one "
    "verifier for prompts, two that decode, two drafters)",
)
REAL = Soak(
    "soak_smollm2",
    "Soak: failures under a real model",
    "8 streams (greedy and seeded, 96 tokens of SmolLM2-135M-Instruct in fp32, drafted by its EAGLE-3 head in a pool, "
    "two verifiers and two drafters)",
)


def test_failures_of_drafters_and_links(shared_ray: SharedRay, soak_length: SoakLength):
    with drafter_drill(shared_ray) as drill:
        faults = {f"drafter: {fault.name}": partial(drill.run_fault, fault) for fault in FAULTS + MORE_FAULTS}
        EMBEDDED.repeat(faults | {name: partial(drill.run_link, name) for name in LINK_CASES}, soak_length)


def test_failures_of_a_fleet(shared_ray: SharedRay, soak_length: SoakLength):
    drill = fleet_drill(shared_ray)
    EMBEDDED.repeat({case.name: partial(drill.run, case) for case in FLEET_CASES}, soak_length)


def test_failures_of_updates(shared_ray: SharedRay, soak_length: SoakLength, tmp_path: Path):
    with trained_drill(shared_ray, tmp_path) as drill:
        TRAINED.repeat({case.name: partial(drill.run, case) for case in TRAINED_CASES}, soak_length)


def test_failures_of_learners(shared_ray: SharedRay, soak_length: SoakLength, tmp_path: Path):
    drill = learning_drill(shared_ray, tmp_path)
    LEARNING.repeat({case.name: partial(drill.run, case) for case in LEARNING_CASES}, soak_length)


def test_failures_of_handovers(shared_ray: SharedRay, soak_length: SoakLength):
    """Kill what gives and what takes over, and drain verifiers whose requests then move."""
    drill = handover_drill(shared_ray)
    HANDOVERS.repeat({case.name: partial(drill.run, case) for case in HANDOVER_CASES}, soak_length)


def test_failures_of_ranks(shared_ray: SharedRay, soak_length: SoakLength):
    drill = parallel_drill(shared_ray)
    EMBEDDED.repeat({case.name: partial(drill.run, case) for case in PARALLEL_CASES}, soak_length)


def test_failures_under_a_real_model(shared_ray: SharedRay, soak_length: SoakLength):
    drill = real_drill(shared_ray)
    REAL.repeat({case.name: partial(drill.run, case) for case in REAL_CASES}, soak_length)


def _conclusion(outcomes: list[Outcome]) -> str:
    num_wrong = sum(outcome.num_lost + outcome.num_doubled for outcome in outcomes)
    num_hung, num_failed = (sum(getattr(each, name) for each in outcomes) for name in ("num_hung", "num_failed"))
    return (
        f"Of {len(outcomes)} failures under live streams, {num_wrong} tokens were lost or doubled and {num_hung} "
        f"streams hung. {num_failed} streams ended in an error, and the longest pause was "
        f"{max(outcome.longest_pause_s for outcome in outcomes):.1f} s."
    )


def _row(name: str, outcomes: list[Outcome]) -> str:
    counts = [
        len(outcomes),
        sum(outcome.num_hung for outcome in outcomes),
        sum(outcome.num_lost for outcome in outcomes),
        sum(outcome.num_doubled for outcome in outcomes),
        sum(outcome.num_failed for outcome in outcomes),
        f"{max(outcome.longest_pause_s for outcome in outcomes):.2f}",
        f"{max(outcome.recovered_s for outcome in outcomes):.1f}",
    ]
    return f"| {name} | " + " | ".join(str(count) for count in counts) + " |"
