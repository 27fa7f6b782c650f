"""Committed tokens have the target's law, through the whole engine and the real verifier-drafter link.

Each population of requests is compared with the exact joint law of three consecutive tokens over 6 ids (216 cells,
those that expect fewer than 5 pooled) by Pearson's chi-square, 100,000 draws each.

alpha: 1e-4 per comparison; with 14 comparisons that should pass, Bonferroni gives 1.4e-3 for any false alarm. Seeds
are fixed and the engine is stepped in lock step with the link, so an outcome is one and the same on every run.

power: see `test_power`. A shift of total variation 0.02 that hides as well as it can (spread over half of the cells
in proportion) is caught in every population with a probability above 0.98; one of 0.01 by the eight populations that
share a law, taken together, with a probability above 0.99. The planted defects shift the law by far more: the very
same comparison catches each with 30,000 draws, at p-values of 1e-61 and below when this was written.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import numpy as np
import pytest

import law
from exactness.law_cases import CASES, DEFECTS, NUM_DEFECT_DRAWS, NUM_DRAWS, Outcome, run_case

ALPHA = 1e-4
NUM_WORKERS = 2
POPULATIONS = [(case, label) for case in CASES for label in CASES[case].populations]
PLAIN = [(case, label) for case, label in POPULATIONS if not CASES[case].populations[label].sampling]

pytestmark = pytest.mark.timeout(900)  # the first test waits for the slowest case


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, Future[Outcome]]]:
    """Run all cases in worker processes, as many at a time as there are workers."""
    workers = ProcessPoolExecutor(NUM_WORKERS, mp_context=multiprocessing.get_context("spawn"))
    yield {name: workers.submit(run_case, name) for name in (*CASES, *DEFECTS)}
    workers.shutdown(cancel_futures=True)


@pytest.mark.parametrize(("case", "label"), POPULATIONS)
def test_committed_tokens_have_the_targets_law(outcomes, case, label):
    counts, expected = outcomes[case].result().counts[label], CASES[case].populations[label].law
    assert counts.sum() >= NUM_DRAWS
    law.assert_law(counts, expected, ALPHA)


def test_populations_of_one_law_agree_with_it_together(outcomes):
    counts = sum(outcomes[case].result().counts[label] for case, label in PLAIN)
    law.assert_law(counts, CASES["fresh"].populations["fresh"].law, ALPHA)


@pytest.mark.parametrize("defect", DEFECTS)
def test_planted_defects_are_detected(outcomes, defect):
    counts, expected = outcomes[defect].result().counts["planted"], DEFECTS[defect].populations["planted"].law
    assert counts.sum() == NUM_DEFECT_DRAWS
    assert law.rejects_law(counts, expected, ALPHA)


def test_power():
    assert len(PLAIN) == 8
    for case, label in POPULATIONS:
        expected = CASES[case].populations[label].law
        assert law.power(expected, law.shifted(expected, 0.02), NUM_DRAWS, ALPHA) > 0.98
    plain = CASES["fresh"].populations["fresh"].law
    assert law.power(plain, law.shifted(plain, 0.01), len(PLAIN) * NUM_DRAWS, ALPHA) > 0.99


def test_every_case_meets_what_it_is_about(outcomes):
    results = {name: outcomes[name].result().result for name in CASES}
    acceptance = {name: result.num_accepted_tokens / result.num_draft_tokens for name, result in results.items()}
    assert min(result.num_drafts for result in results.values()) > NUM_DRAWS / 4
    assert acceptance["fresh"] > 0.7
    assert 0.15 < acceptance["bad"] < 0.4
    late = results.pop("late")
    assert late.num_stale == late.num_late > NUM_DRAWS / 20
    assert late.fallbacks["timeout"] == late.num_late
    assert results["preempted"].num_preempted_waits > 1000
    assert all(result.num_preempted_waits == 0 for name, result in results.items() if name != "preempted")
    assert all(result.num_late == result.num_stale == 0 for result in results.values())


def test_laws_differ_where_sampling_does():
    laws = [CASES[case].populations[label].law for case, label in POPULATIONS if (case, label) not in PLAIN]
    laws.append(CASES["fresh"].populations["fresh"].law)
    distances = [np.abs(a - b).sum() / 2 for i, a in enumerate(laws) for b in laws[:i]]
    assert min(distances) > 0.02
