"""The study of a model's tokens with drafts and without, on the embedded model."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from click.testing import CliRunner

from benchmarks import exact as study
from benchmarks.exact import NEAR_TIE, Outcome, compare, exact, is_near_tie, noise_of
from outrider.drafter_service.embedded import target_path


def test_drafts_change_no_token_of_the_embedded_model():
    outcomes = compare(str(target_path()), dtype="float32", num_prompts=3, max_tokens=24, concurrency=2)
    assert [(own.sampling, own.num_prompts, own.num_near_ties, own.num_different) for own in outcomes] == [
        ("greedy", 3, 0, 0),
        ("seeded", 3, 0, 0),
    ]
    assert outcomes[0].num_accepted > 0
    assert all(own.holds for own in outcomes)


def test_a_near_tie_is_one_of_the_two_largest():
    logits = torch.tensor([8.0, 8.0 - 8.0 * NEAR_TIE, -16.0])
    assert is_near_tie(logits), "the largest is 16"
    assert is_near_tie(torch.tensor([8.0, 8.0 - 8.0 * NEAR_TIE]))
    assert not is_near_tie(torch.tensor([8.0, 7.9]))
    assert is_near_tie(torch.tensor([8.0, 7.9]), torch.tensor([0.0, 0.1])), "the noise decides"


def test_the_noise_is_that_of_a_place_and_a_seed():
    assert torch.equal(noise_of(3, 7, 50), noise_of(3, 7, 50))
    assert not torch.equal(noise_of(3, 7, 50), noise_of(3, 8, 50))
    assert not torch.equal(noise_of(3, 7, 50), noise_of(4, 7, 50))


OUTCOME = Outcome(sampling="greedy", num_prompts=40, num_near_ties=2, num_different=0, num_accepted=9)


@pytest.mark.parametrize(
    ("fields", "holds"), [({}, True), ({"num_near_ties": 3}, False), ({"num_different": 1}, False)]
)
def test_it_fails_where_tokens_differ_for_no_reason_or_at_too_many_ties(monkeypatch, tmp_path, fields, holds):
    outcome = dataclasses.replace(OUTCOME, **fields)
    monkeypatch.setattr(study, "compare", lambda model, **options: [outcome])
    result = CliRunner().invoke(exact, [str(target_path()), "--markdown", str(tmp_path / "exact.md")])
    assert (result.exit_code == 0) is holds
    assert "| greedy | 40 |" in (tmp_path / "exact.md").read_text()
