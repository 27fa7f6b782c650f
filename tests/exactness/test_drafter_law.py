"""The law of every drafter that is verified by rejection, as chain and tree, on 5 ids (`markov_target`).

Each token is one of 12,000 draws from the law of what follows the two before it, 25 laws, Pearson's chi-square. Remote
drafters are reached through the link's encoded frames. `make test` runs one cell for each way to grow a draft in each
family of drafters, `make soak` every cell. alpha: 1e-5 per comparison, with fewer than 100 comparisons 1e-3 for any
false alarm; `test_power` says what is caught.
"""

from __future__ import annotations

import pytest

from exactness.drafter_cells import DRAFT_LENGTH, GROWING, Bench, Cell, Shape, soak_but
from exactness.drafter_runs import ALPHA, EQUAL_MODES, NUM_LAW_TOKENS, MarkovRuns
from outrider.drafter_service.service.speculative_config import Method
from tiny.markov_target import power

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def markov_runs(bench: Bench, tmp_path_factory) -> MarkovRuns:
    return MarkovRuns(bench, tmp_path_factory.mktemp("markov"))


@pytest.mark.parametrize("cell", soak_but(lambda cell: str(cell) in GROWING.values()), ids=str)
def test_the_law_is_the_targets(markov_runs: MarkovRuns, cell: Cell) -> None:
    run = markov_runs.run(cell)
    assert run.counts.sum() == NUM_LAW_TOKENS
    assert run.p_value >= ALPHA
    for mode in EQUAL_MODES:  # the same batches hold greedy and seeded requests
        assert run.tokens(mode) == markov_runs.plain.tokens(mode)
    assert run.num_accepted_tokens > 0
    if cell.shape is Shape.TREE:
        assert run.mean_draft_size > DRAFT_LENGTH, "no chain is as large"
    if cell.variant.method is not Method.SPARSE:  # what it leaves out is beyond this target's window of two
        assert run.num_accepted_tokens < run.num_draft_tokens, "drafts that are all right show little"


def test_plain_decoding_has_the_law_and_two_tokens_are_all_that_it_depends_on(markov_runs: MarkovRuns) -> None:
    assert markov_runs.plain.p_value >= ALPHA
    markov_runs.require_two_tokens_of_context()


def test_power(markov_runs: MarkovRuns) -> None:
    assert power(markov_runs.target.laws, NUM_LAW_TOKENS, ALPHA, 0.05) > 0.99
    assert power(markov_runs.target.laws, NUM_LAW_TOKENS, ALPHA, 0.0) < 2 * ALPHA
