"""Write and read `docs/results/matrix.md`: `PYTHONPATH=tests python -m exactness.drafter_table` runs all cells."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from exactness.drafter_cells import CELLS, MODES, Bench, Cell, refusal
from exactness.drafter_runs import ALPHA, NUM_LAW_TOKENS, NUM_NEW_TOKENS, EmbeddedRuns, MarkovRuns, Run
from outrider.verifier_service.messages.request import VerificationMode

PATH = Path(__file__).resolve().parents[2] / "docs" / "results" / "matrix.md"
TITLE = "# Every drafter, every mode, chains and trees, near and far\n\n"
HEADER = f"""Written by `PYTHONPATH=tests python -m exactness.drafter_table`; tested by
`tests/exactness/test_drafter_matrix.py`.

- *equal*: the tokens of greedy and of seeded requests are those of plain decoding, on the embedded target
  ({NUM_NEW_TOKENS} tokens each) and on a tiny one, with unseeded requests in the same batches. Beside it accepted and
  drafted tokens on the embedded target. Heads without a trained checkpoint are random, so seldom right, but exact.
- *law*: the p-value of {NUM_LAW_TOKENS} unseeded tokens of the tiny target against the library's own distributions
  (`markov_target.py`); one below {ALPHA:.0e} would contradict them. Beside it accepted and drafted tokens of that run.
- *refused*: with these words. Nothing is left out.

In process: in the verifier's. Remote: in a process of its own; for the law at the far end of the link's frames.

| drafter | shape | place | {" | ".join(mode.value for mode in MODES)} |
|---|---|---|{"---|" * len(MODES)}
"""


def verdicts_of(cell: Cell) -> dict[str, str]:
    """Return how each mode's verdict on a cell begins."""
    reason = refusal(cell)
    if reason is not None:
        return {mode.value: f"refused: {reason}" for mode in MODES}
    return {mode.value: "law" if mode is VerificationMode.REJECTION else "equal" for mode in MODES}


def read_table() -> dict[tuple[str, str], str]:
    """Return the verdicts of the written table by cell and mode."""
    verdicts: dict[tuple[str, str], str] = {}
    for line in PATH.read_text().splitlines():
        columns = [column.strip() for column in line.strip("|").split("|")]
        if line.startswith("|") and columns[0] not in ("drafter", "---"):
            cell = ", ".join(columns[:3])
            verdicts |= {(cell, mode.value): text for mode, text in zip(MODES, columns[3:], strict=True)}
    return verdicts


def _conclusion(rows: Sequence[Sequence[str]]) -> str:
    verdicts = [text for row in rows for text in row[3:]]
    equal, kept, refused = (sum(text.startswith(word) for text in verdicts) for word in ("equal", "law", "refused"))
    return (
        f"Greedy and seeded tokens were those of plain decoding in {equal} cells, unseeded ones had the target's "
        f"distribution in {kept}, and {len(verdicts) - equal - kept - refused} went wrong. What cannot be is refused "
        f"with a reason, in {refused} cells.\n\n"
    )


def _share(run: Run) -> str:
    return f"{run.num_accepted_tokens} of {run.num_draft_tokens}"


def _row(cell: Cell, embedded: EmbeddedRuns, markov: MarkovRuns) -> list[str]:
    if refusal(cell) is not None:
        return list(verdicts_of(cell).values())
    tokens, law = embedded.run(cell), markov.run(cell)
    texts = []
    for mode in MODES:
        if mode is VerificationMode.REJECTION:
            texts.append(f"law p = {law.p_value:.2g}, {_share(law)}" if law.p_value >= ALPHA else "WRONG LAW")
        else:
            is_equal = all(run.tokens(mode) == plain.tokens(mode) for run, plain in _pairs(cell, embedded, markov))
            texts.append(f"equal, {_share(tokens)}" if is_equal else "DIFFERENT TOKENS")
    return texts


def _pairs(cell: Cell, embedded: EmbeddedRuns, markov: MarkovRuns) -> Iterator[tuple[Run, Run]]:
    yield embedded.run(cell), embedded.plain
    yield markov.run(cell), markov.plain


def write_table(embedded: EmbeddedRuns, markov: MarkovRuns) -> None:
    """Run the cells that have not been run, and write what all of them gave."""
    rows = [[*str(cell).split(", "), *_row(cell, embedded, markov)] for cell in CELLS]
    PATH.write_text(TITLE + _conclusion(rows) + HEADER + "".join(f"| {' | '.join(row)} |\n" for row in rows))


def main() -> None:
    bench = Bench()
    with tempfile.TemporaryDirectory() as folder:
        write_table(EmbeddedRuns(bench, Path(folder) / "embedded"), MarkovRuns(bench, Path(folder) / "markov"))
    bench.close()


if __name__ == "__main__":
    main()
