"""Every drafter x {greedy, rejection, coupled} x {chain, tree} x {in process, remote}: exact, or refused by name.

Greedy and coupled: the embedded target's tokens are those of plain decoding, with greedy, seeded and unseeded requests
in the same batches; remote drafters run in a process of their own, and hidden states cross the wire to them.

Rejection: the law, on 5 ids (`markov_target`): each token is one of 12,000 draws from the law of what follows the two
before it, 25 laws, Pearson's chi-square. There remote drafters are reached through the link's encoded frames.
alpha: 1e-5 per comparison, with fewer than 100 comparisons 1e-3 for any false alarm; `test_power` says what is caught.
`docs/results/matrix.md` is the table of all cells (`drafter_table.py` writes it).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from exactness.drafter_cells import CELLS, REFUSED, SERVED, Bench, Cell, Shape, refusal
from exactness.drafter_runs import (
    ALPHA,
    NUM_LAW_TOKENS,
    NUM_NEW_TOKENS,
    EmbeddedRuns,
    MarkovRuns,
)
from exactness.drafter_table import read_table, verdicts_of
from exactness.markov_target import power
from outrider.drafter_service.service.speculative_config import Method
from outrider.verifier_service.messages.request import VerificationMode

pytestmark = pytest.mark.timeout(3600)
EQUAL_MODES = (VerificationMode.GREEDY, VerificationMode.COUPLED)
# with the embedded pair these guess right now and then; others may have random heads
SKILLED = (
    "draft_model",
    "draft_model in shared tokens",
    "draft_model by text",
    "sparse",
    "hybrid of suffix and draft model",
)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    bench = Bench()
    yield bench
    bench.close()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def embedded_runs(bench, tmp_path_factory) -> EmbeddedRuns:
    return EmbeddedRuns(bench, tmp_path_factory.mktemp("embedded"))


@pytest.fixture(scope="module")
def markov_runs(bench, tmp_path_factory) -> MarkovRuns:
    return MarkovRuns(bench, tmp_path_factory.mktemp("markov"))


@pytest.mark.parametrize("cell", SERVED, ids=str)
@pytest.mark.parametrize("mode", EQUAL_MODES, ids=lambda mode: mode.value)
def test_tokens_are_those_of_plain_decoding(embedded_runs: EmbeddedRuns, cell: Cell, mode: VerificationMode) -> None:
    run = embedded_runs.run(cell)
    assert run.tokens(mode) == embedded_runs.plain.tokens(mode)
    assert all(len(tokens) == NUM_NEW_TOKENS for tokens in run.token_ids.values())
    assert run.num_draft_tokens > 0
    if cell.variant.name in SKILLED or cell.variant.method in embedded_runs.checkpoints.trained:
        assert run.num_accepted_tokens > 0


@pytest.mark.parametrize("cell", SERVED, ids=str)
def test_the_law_is_the_targets(markov_runs: MarkovRuns, cell: Cell) -> None:
    run = markov_runs.run(cell)
    assert run.counts.sum() == NUM_LAW_TOKENS
    assert run.p_value >= ALPHA
    for mode in EQUAL_MODES:  # the same batches hold greedy and seeded requests
        assert run.tokens(mode) == markov_runs.plain.tokens(mode)
    assert run.num_accepted_tokens > 0
    if cell.shape is Shape.TREE:
        chain = markov_runs.run(replace(cell, shape=Shape.CHAIN))
        assert run.mean_draft_size > chain.mean_draft_size
    if cell.variant.method is not Method.SPARSE:  # what it leaves out is beyond this target's window of two
        assert run.num_accepted_tokens < run.num_draft_tokens, "drafts that are all right show little"


@pytest.mark.parametrize("cell", REFUSED, ids=str)
def test_what_is_not_served_is_refused_with_its_reason(markov_runs: MarkovRuns, cell: Cell) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011  # compared below
        markov_runs.checkpoints.config_of(cell)
    assert str(refused.value) == refusal(cell)


def test_every_method_is_there() -> None:
    ours = set(Method) - {Method.PLUGIN}  # of other packages: tests/examples and test_plugin_drafter
    assert {cell.variant.method for cell in CELLS} == ours
    assert len(CELLS) == len(set(map(str, CELLS)))


def test_the_table_lists_every_cell() -> None:
    expected = {(str(cell), mode): text for cell in CELLS for mode, text in verdicts_of(cell).items()}
    listed = read_table()
    assert listed.keys() == expected.keys()
    assert [key for key, text in listed.items() if not text.startswith(expected[key])] == []


def test_plain_decoding_has_the_law_and_two_tokens_are_all_that_it_depends_on(markov_runs: MarkovRuns) -> None:
    assert markov_runs.plain.p_value >= ALPHA
    markov_runs.require_two_tokens_of_context()


def test_power(markov_runs: MarkovRuns) -> None:
    assert power(markov_runs.target.laws, NUM_LAW_TOKENS, ALPHA, 0.05) > 0.99
    assert power(markov_runs.target.laws, NUM_LAW_TOKENS, ALPHA, 0.0) < 2 * ALPHA
