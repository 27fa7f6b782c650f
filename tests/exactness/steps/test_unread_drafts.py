"""Drafts that are verified before anybody has read them: the same tokens, and the target's law.

A drafter in the verifier's process has its levels launched when it is asked, and the step after follows them at once.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from exactness.law import assert_law, joint_counts, many_small_objects, rejects_law
from exactness.law_cases import GOOD_LAWS, PERIOD, PROMPT, TARGET_LAWS, VOCAB_SIZE, shaped
from exactness.small_engines import (
    Generated,
    Limits,
    ModelDrafts,
    NoDrafts,
    generate,
    load,
    make_engine,
    make_lively_model,
    perturbed_copy,
)
from exactness.steps.test_device_steps import count_placeholders
from fakes.scripted import ScriptedTarget, triple_law
from outrider.verifier_service.engine.pipelined import PipelinedEngine
from outrider.verifier_service.messages.request import (
    AcceptanceRule,
    GenerationRequest,
    SamplingParams,
    SpeculationPlan,
)
from outrider.verifier_service.sampling.unread import UnreadTokens
from tiny.models import random_sequences, without_kernels
from tiny.played_graphs import played_backend

NUM_TOKENS, NUM_TOGETHER, NUM_DRAWS = 30, 50, 6_000
LIMITS = Limits(max_num_batched_tokens=96, max_num_seqs=6)


def unread_engine(runner: Any, drafts: ModelDrafts, limits: Limits) -> PipelinedEngine:
    engine = make_engine(runner, drafts, limits, kind=PipelinedEngine)
    assert isinstance(engine, PipelinedEngine)
    engine.drafts_here = drafts
    return engine


def requests(draft_length: int, **sampling: Any) -> list[GenerationRequest]:
    """Greedy and seeded requests, whose tokens are a function of the model alone; some stop early."""
    plan = SpeculationPlan(drafter_id="local", draft_length=draft_length)
    samplings = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.95})
    return [
        GenerationRequest(
            request_id=str(index),
            prompt_token_ids=prompt,
            sampling=SamplingParams(
                max_tokens=10 + index, seed=index, stop_token_ids=(index,), **samplings[index % 3], **sampling
            ),
            plan=plan,
        )
        for index, prompt in enumerate(random_sequences((3, 30, 9, 17, 5, 12, 8, 4)))
    ]


def both_ways(folder: Path, prompts: list[GenerationRequest], limits: Limits) -> tuple[Generated, Generated, int]:
    """Return what the target says alone, what it says with unread drafts, and how many tokens stood open."""
    target, nobody = make_lively_model("llama"), NoDrafts()
    plain = load(target, folder / "plain")
    alone = [replace(prompt, plan=SpeculationPlan()) for prompt in prompts]
    expected = generate(make_engine(plain, nobody, limits), nobody, alone)
    runner = load(target, folder / "target", played_backend())
    drafts = ModelDrafts(load(perturbed_copy("llama", 0.05), folder / "draft", played_backend()))
    sizes = count_placeholders(runner)
    return expected, generate(unread_engine(runner, drafts, limits), drafts, prompts), sum(sizes)


@without_kernels()
@pytest.mark.parametrize(("num_batched_tokens", "share"), [(96, 0.5), (14, 0.05)], ids=["room", "no_room_for_all"])
def test_tokens_of_unread_drafts_are_the_targets_own(tmp_path: Path, num_batched_tokens: int, share: float) -> None:
    limits = replace(LIMITS, max_num_batched_tokens=num_batched_tokens)
    expected, got, num_open = both_ways(tmp_path, requests(3), limits)
    assert got.token_ids == expected.token_ids
    assert 0 < got.num_accepted_tokens < got.num_draft_tokens
    assert num_open > share * got.num_draft_tokens, "so many drafts were verified unread"


@without_kernels()
def test_who_is_edited_or_looked_at_closely_has_the_same_tokens(tmp_path: Path) -> None:
    """Penalties are made of drafts that were read; log probabilities are read of rows whose drafts were not."""
    prompts = requests(3)
    prompts[1] = replace(prompts[1], sampling=replace(prompts[1].sampling, max_tokens=3, presence_penalty=1.0))
    prompts[2] = replace(prompts[2], sampling=replace(prompts[2].sampling, logprobs=2))
    expected, got, num_open = both_ways(tmp_path, prompts, LIMITS)
    assert got.token_ids == expected.token_ids
    told = [[one.token_id for output in run.outputs["2"] for one in output.logprobs or ()] for run in (got, expected)]
    assert told[0] == told[1] == expected.token_ids["2"]
    assert num_open > 0


# --- the law ---


def counts_of(**sampling: Any) -> tuple[np.ndarray, int]:
    """Return the triples of requests with drafts, and how many tokens stood open in all steps."""
    torch.set_num_threads(1)
    runner = ScriptedTarget(TARGET_LAWS, num_blocks=10 * NUM_TOGETHER, block_size=4)
    drafts = ModelDrafts(ScriptedTarget(GOOD_LAWS, num_blocks=12 * NUM_TOGETHER, block_size=4))
    sizes = count_placeholders(runner)
    engine = unread_engine(runner, drafts, Limits(num_blocks=runner.num_blocks, max_num_seqs=NUM_TOGETHER))
    tokens: dict[str, list[int]] = {}
    names = itertools.count()
    num_wanted = NUM_DRAWS * PERIOD // NUM_TOKENS
    while len(tokens) < num_wanted or engine.has_work():
        while len(engine.requests) < NUM_TOGETHER and (index := next(names)) < num_wanted:
            request = GenerationRequest(
                request_id=str(index),
                prompt_token_ids=PROMPT,
                sampling=SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **sampling),
                plan=SpeculationPlan(drafter_id="local", draft_length=1 + index % 4),
            )
            assert engine.add(request) is None
            tokens[request.request_id] = []
        for output in engine.step() or []:
            tokens[output.request_id] += output.token_ids
    counted = np.array(list(tokens.values())).reshape(-1, PERIOD)
    return joint_counts(counted, VOCAB_SIZE), sum(sizes)


@pytest.mark.parametrize("sampling", [{}, {"top_k": 3, "temperature": 1.3}, {"acceptance": AcceptanceRule.BLOCK}])
def test_tokens_have_the_targets_law(sampling: dict[str, Any]) -> None:
    with many_small_objects():
        counts, num_open = counts_of(**sampling)
    shape = {name: value for name, value in sampling.items() if name != "acceptance"}
    assert_law(counts, triple_law(shaped(TARGET_LAWS, **shape)))
    assert num_open > counts.sum(), "most drafted tokens stood open"


def law_of_a_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    laws = UnreadTokens.laws

    def shifted(tokens: UnreadTokens, placeholders: torch.Tensor, vocab_size: int) -> Any:
        other = replace(tokens, candidates=tokens.candidates.roll(1, 0), weights=tokens.weights.roll(1, 0))
        return laws(other, placeholders, vocab_size)

    monkeypatch.setattr(UnreadTokens, "laws", shifted)


def token_of_a_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge another draft's token than the one that is committed where it is accepted."""
    fill = UnreadTokens.fill
    monkeypatch.setattr(
        UnreadTokens, "fill", lambda tokens, ids: fill(replace(tokens, numbers=tokens.numbers.roll(1)), ids)
    )


@pytest.mark.parametrize("defect", [law_of_a_neighbour, token_of_a_neighbour])
def test_what_is_verified_wrongly_would_be_seen(defect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    defect(monkeypatch)
    with many_small_objects():
        counts, _ = counts_of()
    assert rejects_law(counts, triple_law(TARGET_LAWS))
