"""Every drafter x {greedy, rejection, coupled} x {chain, tree} x {in process, remote}: exact, or refused by name.

Greedy and coupled: the embedded target's tokens are those of plain decoding, with greedy, seeded and unseeded requests
in the same batches; remote drafters run in a process of their own, and hidden states cross the wire to them.
`make test` runs every cell in process, where what drafts differs, and one remote cell for each thing that crosses;
`make soak` runs all. Rejection: test_drafter_law. `docs/results/matrix.md` is the table of all cells
(`drafter_table.py` writes it).
"""

from __future__ import annotations

import pytest

from exactness.drafter_cells import CELLS, CROSSING, GROWING, REFUSED, SERVED, Bench, Cell, Place, refusal, soak_but
from exactness.drafter_runs import EQUAL_MODES, NUM_NEW_TOKENS, EmbeddedRuns
from exactness.drafter_table import read_table, verdicts_of
from outrider.drafter_service.service.speculative_config import Method
from outrider.verifier_service.messages.request import VerificationMode

pytestmark = pytest.mark.timeout(3600)
# with the embedded pair these guess right now and then; others may have random heads
SKILLED = (
    "draft_model",
    "draft_model in shared tokens",
    "draft_model by text",
    "sparse",
    "hybrid of suffix and draft model",
)


@pytest.fixture(scope="module")
def embedded_runs(bench: Bench, tmp_path_factory) -> EmbeddedRuns:
    return EmbeddedRuns(bench, tmp_path_factory.mktemp("embedded"))


def is_tested(cell: Cell) -> bool:
    """Tell whether `make test` runs a cell: drafters in process, and each thing that crosses a link."""
    return cell.place is Place.IN_PROCESS or str(cell) in CROSSING.values()


@pytest.mark.parametrize("cell", soak_but(is_tested), ids=str)
@pytest.mark.parametrize("mode", EQUAL_MODES, ids=lambda mode: mode.value)
def test_tokens_are_those_of_plain_decoding(embedded_runs: EmbeddedRuns, cell: Cell, mode: VerificationMode) -> None:
    run = embedded_runs.run(cell)
    assert run.tokens(mode) == embedded_runs.plain.tokens(mode)
    assert all(len(tokens) == NUM_NEW_TOKENS for tokens in run.token_ids.values())
    assert run.num_draft_tokens > 0
    if cell.variant.name in SKILLED or cell.variant.method in embedded_runs.checkpoints.trained:
        assert run.num_accepted_tokens > 0


@pytest.mark.parametrize("cell", REFUSED, ids=str)
def test_what_is_not_served_is_refused_with_its_reason(embedded_runs: EmbeddedRuns, cell: Cell) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011  # compared below
        embedded_runs.checkpoints.config_of(cell)
    assert str(refused.value) == refusal(cell)


def test_every_method_is_there() -> None:
    ours = set(Method) - {Method.PLUGIN}  # of other packages: tests/examples and test_plugin_drafter
    assert {cell.variant.method for cell in CELLS} == ours
    assert len(CELLS) == len(set(map(str, CELLS)))
    assert {*CROSSING.values(), *GROWING.values()} <= set(map(str, SERVED))


def test_the_table_lists_every_cell() -> None:
    expected = {(str(cell), mode): text for cell in CELLS for mode, text in verdicts_of(cell).items()}
    listed = read_table()
    assert listed.keys() == expected.keys()
    assert [key for key, text in listed.items() if not text.startswith(expected[key])] == []
