"""The study of a model's tokens in company, with drafts and behind a prefix cache, on the embedded model."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from benchmarks import exact as study
from benchmarks.exact import Row, Run, exact, measure, pairs_of
from fakes.played import FakeReference
from outrider.drafter_service.embedded import target_path
from outrider.lab.same_tokens import Seeded, compare

PROMPTS = ((1, 2), (3,))


def test_nothing_changes_a_token_of_the_embedded_model():
    rows = measure(str(target_path()), dtype="float32", num_prompts=3, max_tokens=24, concurrencies=(2,))
    named = [(row.run.drafts, row.run.at_a_time, row.run.sampling, row.run.cache) for row in rows]
    assert named[:4] == [("off", 1, sampling, cache) for sampling in ("greedy", "seeded") for cache in ("cold", "warm")]
    assert [way[:2] for way in named[::4]] == [("off", 1), ("off", 2), ("on", 1), ("on", 2)]
    assert all(row.tally.num_identical == row.tally.num_answers == 3 for row in rows)
    for row in rows:
        assert (row.run.num_cached > 0) is (row.run.cache == "warm")
        if row.run.sampling == "greedy":
            assert (row.run.num_accepted > 0) is (row.run.drafts == "on")
        assert all(len(tokens) == 24 for tokens in row.run.tokens)


def test_answers_stand_beside_plain_decodings_with_their_seeds():
    plain = Run("seeded", "off", 1, "cold", [[5, 6], [7, 8]])
    run = Run("seeded", "on", 8, "warm", [[5, 6], [7, 9]])
    first, second = pairs_of(run, plain, PROMPTS)
    assert second.what == "seeded, drafts on, 8 at a time, cache warm, prompt 2"
    assert (first.prompt, first.seeded) == ((1, 2), Seeded(seed=0, temperature=0.8))
    assert (second.expected, second.given, second.seeded.seed) == ([7, 8], [7, 9], 1)
    greedy = pairs_of(Run("greedy", "off", 8, "cold", run.tokens), plain, PROMPTS)
    assert [pair.seeded for pair in greedy] == [None, None]


@pytest.mark.parametrize(("may_tip", "exit_code"), [(True, 0), (False, 1)])
def test_it_fails_after_its_table_where_a_row_does_not_hold(monkeypatch, tmp_path, may_tip: bool, exit_code: int):
    run = Run("greedy", "on", 8, "warm", [[5, 6], [7, 9]], num_accepted=11, num_cached=12)
    plain = Run("greedy", "off", 1, "cold", [[5, 6], [7, 8]])
    reference = FakeReference(otherwise=0.0, may_tip=may_tip)
    row = Row(run, compare(pairs_of(run, plain, PROMPTS), lambda: reference))
    monkeypatch.setattr(study, "measure", lambda model, **options: [row])
    result = CliRunner().invoke(exact, [str(target_path()), "--markdown", str(tmp_path / "exact.md")])
    assert result.exit_code == exit_code
    assert ("here: '7 9'" in result.output) is (exit_code == 1)
    assert "| greedy | on | 8 | warm | 2 | 1 | 1 | 0 | 11 | 12 |" in (tmp_path / "exact.md").read_text()
