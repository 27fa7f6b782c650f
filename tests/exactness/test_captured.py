"""Captured steps commit what eager ones commit: a verifier and a drafter that replay every step, played on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from exactness.small_engines import (
    Limits,
    ModelDrafts,
    NoDrafts,
    generate,
    load,
    make_engine,
    make_lively_model,
    perturbed_copy,
)
from outrider.verifier_service.cpu import kernels
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan
from tiny.models import random_sequences
from tiny.played_graphs import played_backend

LIMITS = Limits(max_num_batched_tokens=48, max_num_seqs=4)


def requests(draft_length: int) -> list[GenerationRequest]:
    """Greedy and seeded requests, whose tokens are a function of the model alone."""
    plan = SpeculationPlan(drafter_id="local", draft_length=draft_length)
    return [
        GenerationRequest(
            request_id=str(index),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=10, temperature=index % 2, seed=index, ignore_eos=True),
            plan=plan,
        )
        for index, prompt in enumerate(random_sequences((3, 30, 9, 17, 5)))
    ]


def test_tokens_of_a_captured_pair_are_the_eager_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.DISABLING_VARIABLE, "0")
    target, draft = make_lively_model("llama"), perturbed_copy("llama", 0.05)
    nobody = NoDrafts()
    plain = load(target, tmp_path / "plain")
    expected = generate(make_engine(plain, nobody, LIMITS), nobody, requests(0))
    verifier = load(target, tmp_path / "target", played_backend())
    drafter = load(draft, tmp_path / "draft", played_backend())
    drafts = ModelDrafts(drafter)
    got = generate(make_engine(verifier, drafts, LIMITS), drafts, requests(3))
    assert got.token_ids == expected.token_ids
    assert 0 < got.num_accepted_tokens < got.num_draft_tokens
    for runner in (verifier, drafter):
        assert runner.graphs is not None
        assert runner.graphs.counts.num_replayed > 5
        assert not runner.graphs.counts.eager
    assert plain.graphs is None
