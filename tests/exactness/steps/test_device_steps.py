"""Steps as on a device commit what eager ones commit: captured, drafted, launched before the last one is read.

Captured ones are played on a CPU: a verifier and a drafter that replay every step.

The law is the joint one of three tokens, as in law_cases.py: of 100 requests at a time that come, stop and go, and of
two whose nuclei outgrow the candidates that are looked at first, so that many of their tokens are corrected when the
step after has begun with others. Pearson's chi-square at alpha 1e-6.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from exactness.law import assert_law, joint_counts, many_small_objects, rejects_law
from exactness.law_cases import PERIOD, PROMPT, TARGET_LAWS, VOCAB_SIZE, shaped
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
from fakes.scripted import ScriptedTarget, triple_law
from outrider.verifier_service.engine.launched_step import LaunchedStep
from outrider.verifier_service.engine.pipelined import PipelinedEngine
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan
from outrider.verifier_service.sampling import sampler
from outrider.verifier_service.sampling.verification_plan import VerificationPlan
from tiny.models import random_sequences, without_kernels
from tiny.played_graphs import played_backend

ASYNC = {"kind": PipelinedEngine}
NUM_CORRECTED_DRAWS = 2_500
NUM_TOKENS = 30
TOP_P = 0.9
# who stops leaves rows behind
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "stopped": {"stop_token_ids": (0,)}, "nucleus": {"top_p": TOP_P}}
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


@without_kernels()
def test_tokens_of_a_captured_pair_are_the_eager_targets(tmp_path: Path) -> None:
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


@without_kernels()
def test_tokens_of_steps_launched_early_are_the_eager_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of inputs and logits are those of the step before, which is yet to be read."""
    monkeypatch.setattr(sampler, "NUCLEUS_CANDIDATES", 32)
    samplings = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.95})
    prompts = [
        GenerationRequest(
            request_id=str(index),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=12 + index, seed=index, ignore_eos=True, **samplings[index % 3]),
        )
        for index, prompt in enumerate(random_sequences((3, 30, 9, 17, 5, 12)))
    ]
    target, nobody = make_lively_model("llama"), NoDrafts()
    plain = load(target, tmp_path / "plain")
    expected = generate(make_engine(plain, nobody, LIMITS), nobody, prompts)
    runner = load(target, tmp_path / "target", played_backend())
    sizes = count_placeholders(runner)
    got = generate(make_engine(runner, nobody, LIMITS, **ASYNC), nobody, prompts)
    assert got.token_ids == expected.token_ids
    assert sum(sizes) > 40


def count_placeholders(runner) -> list[int]:
    """Note how many tokens of each step stand open."""
    sizes: list[int] = []
    execute = runner.execute

    def noting(batch, chosen=None):
        sizes.append(sum(token_id < 0 for token_id in batch.token_ids))
        return execute(batch, chosen)

    runner.execute = noting
    return sizes


# --- the law ---


@pytest.fixture
def small_nuclei(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sampler, "NUCLEUS_CANDIDATES", 2)
    with many_small_objects():
        yield


def counts_of(kinds: Sequence[str], num_draws: int, num_together: int) -> tuple[np.ndarray, int]:
    """Return the triples of the first kind of requests, and how many tokens stood open in all steps."""
    torch.set_num_threads(1)
    runner = ScriptedTarget(TARGET_LAWS, num_blocks=10 * num_together, block_size=4)
    sizes = count_placeholders(runner)
    engine = make_engine(runner, NoDrafts(), Limits(num_blocks=runner.num_blocks, max_num_seqs=num_together), **ASYNC)
    tokens: dict[str, list[int]] = {}
    names = itertools.count()
    num_wanted = len(kinds) * num_draws * PERIOD // NUM_TOKENS
    while len(tokens) < num_wanted or engine.has_work():
        while len(engine.requests) < num_together and (index := next(names)) < num_wanted:
            name = f"{kinds[index % len(kinds)]}/{index}"
            sampling = SamplingParams(max_tokens=NUM_TOKENS, **KINDS[kinds[index % len(kinds)]])
            request = GenerationRequest(request_id=name, prompt_token_ids=PROMPT, sampling=sampling)
            assert engine.add(request) is None
            tokens[name] = []
        for output in engine.step() or []:
            tokens[output.request_id] += output.token_ids
    counted = [of for name, of in tokens.items() if name.startswith(kinds[0])]
    return joint_counts(np.array(counted).reshape(-1, PERIOD), VOCAB_SIZE), sum(sizes)


def counts_beside_stopping_ones() -> tuple[np.ndarray, int]:
    return counts_of(("plain", "stopped"), num_draws=6_000, num_together=100)


def counts_of_corrected_ones() -> tuple[np.ndarray, int]:
    return counts_of(("nucleus",), num_draws=NUM_CORRECTED_DRAWS, num_together=2)


def test_tokens_have_the_targets_law(small_nuclei: None) -> None:
    counts, num_open = counts_beside_stopping_ones()
    assert_law(counts, triple_law(TARGET_LAWS))
    assert num_open > 2 * counts.sum(), "most tokens stood open"


def test_a_neighbours_token_in_place_of_ones_own_would_be_seen(
    small_nuclei: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = VerificationPlan.places
    monkeypatch.setattr(VerificationPlan, "places", property(lambda plan: places.fget(plan)[::-1]))
    counts, _ = counts_beside_stopping_ones()
    assert rejects_law(counts, triple_law(TARGET_LAWS))


def test_tokens_that_follow_corrected_ones_have_it_too(small_nuclei: None) -> None:
    counts, num_open = counts_of_corrected_ones()
    assert_law(counts, triple_law(shaped(TARGET_LAWS, top_p=TOP_P)))
    assert num_open > counts.sum()


def test_rows_that_followed_the_wrong_token_would_be_seen(small_nuclei: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaunchedStep, "corrected", lambda step: set())
    counts, _ = counts_of_corrected_ones()
    assert rejects_law(counts, triple_law(shaped(TARGET_LAWS, top_p=TOP_P)))
