"""Committed tokens have the target's law, through the whole engine and the real verifier-drafter link.

Each population of requests is compared with the exact joint law of three consecutive tokens over 6 ids (216 cells,
those that expect fewer than 5 pooled) by Pearson's chi-square, 7,500 draws each; eight of them share a law and are
compared together, too, with 60,000 draws. `make soak` takes 100,000 draws each.

alpha: 1e-4 per comparison; with 14 comparisons that should pass, Bonferroni gives 1.4e-3 for any false alarm. Seeds
are fixed and the engine is stepped in lock step with the link, so an outcome is one and the same on every run.

power: see `test_power`. A shift of total variation 0.074 that hides as well as it can (spread over half of the cells
in proportion) is caught in every population with a probability above 0.98 (by a soak 0.02); one of 0.037 by the eight
populations taken together with a probability above 0.99 (by a soak 0.01). The planted defects shift the law by far
more: the very same comparison catches each, by twice the draws at p-values of 1e-19 and below.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest

from exactness import law
from exactness.law_cases import CASES, DEFECT_FACTOR, DEFECTS, NUM_DRAWS, Outcome, run_case
from tiny.forking import FORKING

ALPHA = 1e-4
NUM_SOAK_DRAWS = 100_000
NUM_WORKERS = 2
POPULATIONS = [(case, label) for case in CASES for label in CASES[case].populations]
PLAIN = [(case, label) for case, label in POPULATIONS if not CASES[case].populations[label].sampling]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # whichever test is first waits for the slowest case


@dataclass(frozen=True, slots=True)
class Outcomes:
    """All cases, each as soon as a worker has run it."""

    num_draws: int
    futures: dict[str, Future[Outcome]]

    def __getitem__(self, name: str) -> Outcome:
        return self.futures[name].result()


@pytest.fixture(scope="module", params=[NUM_DRAWS, pytest.param(NUM_SOAK_DRAWS, marks=pytest.mark.soak)])
def outcomes(request) -> Iterator[Outcomes]:
    """Run all cases in worker processes, as many at a time as there are workers."""
    num_draws = request.param
    wanted = dict.fromkeys(CASES, num_draws) | dict.fromkeys(DEFECTS, DEFECT_FACTOR * num_draws)
    workers = ProcessPoolExecutor(NUM_WORKERS, mp_context=FORKING)
    yield Outcomes(num_draws, {name: workers.submit(run_case, name, count) for name, count in wanted.items()})
    workers.shutdown(cancel_futures=True)


@pytest.mark.parametrize(("case", "label"), POPULATIONS)
def test_committed_tokens_have_the_targets_law(outcomes: Outcomes, case: str, label: str):
    counts, expected = outcomes[case].counts[label], CASES[case].populations[label].law
    assert counts.sum() >= outcomes.num_draws
    law.assert_law(counts, expected, ALPHA)


def test_populations_of_one_law_agree_with_it_together(outcomes: Outcomes):
    counts = sum(outcomes[case].counts[label] for case, label in PLAIN)
    law.assert_law(counts, CASES["fresh"].populations["fresh"].law, ALPHA)


@pytest.mark.parametrize("defect", DEFECTS)
def test_planted_defects_are_detected(outcomes: Outcomes, defect: str):
    counts, expected = outcomes[defect].counts["planted"], DEFECTS[defect].populations["planted"].law
    assert counts.sum() >= outcomes.num_draws
    assert law.rejects_law(counts, expected, ALPHA)


@pytest.mark.parametrize(("num_draws", "shift"), [(NUM_DRAWS, 0.074), (NUM_SOAK_DRAWS, 0.02)])
def test_power(num_draws: int, shift: float):
    assert len(PLAIN) == 8
    for case, label in POPULATIONS:
        expected = CASES[case].populations[label].law
        assert law.power(expected, law.shifted(expected, shift), num_draws, ALPHA) > 0.98
    plain = CASES["fresh"].populations["fresh"].law
    assert law.power(plain, law.shifted(plain, shift / 2), len(PLAIN) * num_draws, ALPHA) > 0.99


def test_every_case_meets_what_it_is_about(outcomes: Outcomes):
    results = {name: outcomes[name].result for name in CASES}
    acceptance = {name: result.num_accepted_tokens / result.num_draft_tokens for name, result in results.items()}
    assert min(result.num_drafts for result in results.values()) > outcomes.num_draws / 4
    assert acceptance["fresh"] > 0.7
    assert 0.15 < acceptance["bad"] < 0.4
    late = results.pop("late")
    assert late.num_stale == late.num_late > outcomes.num_draws / 20
    assert late.fallbacks["timeout"] == late.num_late
    assert results["preempted"].num_preempted_waits > outcomes.num_draws / 100
    assert all(result.num_preempted_waits == 0 for name, result in results.items() if name != "preempted")
    assert all(result.num_late == result.num_stale == 0 for result in results.values())


def test_laws_differ_where_sampling_does():
    laws = [CASES[case].populations[label].law for case, label in POPULATIONS if (case, label) not in PLAIN]
    laws.append(CASES["fresh"].populations["fresh"].law)
    distances = [np.abs(a - b).sum() / 2 for i, a in enumerate(laws) for b in laws[:i]]
    assert min(distances) > 0.02
