"""A seeded request yields the same tokens whatever drafts it: none, good, bad, dying; any draft length, any batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from exactness.small_engines import (
    Drafts,
    Generated,
    Limits,
    ModelDrafts,
    NoDrafts,
    RandomDrafts,
    generate,
    load,
    make_engine,
    perturbed_copy,
)
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan
from outrider.verifier_service.model.runner import ModelRunner
from outrider.verifier_service.sampling.coupled_sampler import coupled_choice, gumbel_noise
from tiny.models import full_logits, make_model, random_sequences
from tiny.verified import target_probs

NUM_NEW_TOKENS = 24
PROMPTS = random_sequences((5, 21, 9, 14, 30, 3, 11, 17))
SHAPES = ({"temperature": 3.0}, {"temperature": 8.0, "top_k": 20}, {"temperature": 6.0, "top_p": 0.9}, {"min_p": 0.05})


@dataclasses.dataclass(frozen=True, slots=True)
class Models:
    model: PreTrainedModel
    target: ModelRunner
    twin: ModelRunner  # the target again, with KV of its own
    perturbed: ModelRunner
    stranger: ModelRunner


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Iterator[Models]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("seeded")
    model = make_model("llama")
    yield Models(
        model=model,
        target=load(model, folder / "target"),
        twin=load(model, folder / "twin"),
        perturbed=load(perturbed_copy("llama", 0.05), folder / "perturbed"),
        stranger=load(make_model("llama", seed=9), folder / "stranger"),
    )
    torch.set_num_threads(threads)


def requests_of(*, draft_length: int = 4, seed: int = 100, choice_index: int = 0) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=str(index),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(
                seed=seed + index,
                choice_index=choice_index,
                max_tokens=NUM_NEW_TOKENS,
                ignore_eos=True,
                **SHAPES[index % len(SHAPES)],
            ),
            plan=SpeculationPlan(draft_length=draft_length),
        )
        for index, prompt in enumerate(PROMPTS)
    ]


def run(
    models: Models, drafts: Drafts, requests: Sequence[GenerationRequest], limits: Limits | None = None
) -> Generated:
    return generate(make_engine(models.target, drafts, limits or Limits()), drafts, requests)


@pytest.fixture(scope="module")
def expected(models) -> dict[str, list[int]]:
    """The tokens without an engine: the library's logits, one token after the other."""
    return {request.request_id: plain_tokens(models.model, request) for request in requests_of()}


def plain_tokens(model: PreTrainedModel, request: GenerationRequest) -> list[int]:
    sampling, token_ids = request.sampling, list(request.prompt_token_ids)
    for position in range(len(token_ids), len(token_ids) + NUM_NEW_TOKENS):
        logits = full_logits(model, token_ids)[-1:]
        noise = gumbel_noise(
            sampling.seed, sampling.choice_index, torch.tensor([position]), logits.shape[1], logits.device
        )
        token_ids.append(int(coupled_choice(target_probs(logits, [sampling]), noise)))
    return token_ids[len(request.prompt_token_ids) :]


DRAFTERS: dict[str, Callable[[Models], Drafts]] = {
    "none": lambda _: NoDrafts(),
    "good": lambda models: ModelDrafts(models.twin),
    "perturbed": lambda models: ModelDrafts(models.perturbed),
    "bad": lambda models: ModelDrafts(models.stranger),
    "random": lambda models: RandomDrafts(models.target.vocab_size),
    "dying": lambda models: ModelDrafts(models.perturbed, num_polls_alive=6),
}
LIMITS = {
    "batch_1": Limits(max_num_seqs=1),
    "batch_8": Limits(),
    "chunked": Limits(max_num_batched_tokens=9),
    "preempted": Limits(num_blocks=32),
}


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_do_not_depend_on_drafter_or_batch(models, expected, drafter, limits):
    generated = run(models, DRAFTERS[drafter](models), requests_of(), LIMITS[limits])
    assert generated.token_ids == expected
    assert (generated.num_preempted_waits > 0) == (limits == "preempted")
    assert (generated.num_draft_tokens == 0) == (drafter == "none")


@pytest.mark.parametrize("draft_length", range(1, 9))
def test_tokens_do_not_depend_on_draft_length(models, expected, draft_length):
    for drafter in ("good", "perturbed"):
        generated = run(models, DRAFTERS[drafter](models), requests_of(draft_length=draft_length))
        assert generated.token_ids == expected


def test_acceptance_tells_the_drafters_apart(models):
    """The cases above are what they are called: a twin is always right, a stranger hardly ever."""
    acceptance = {}
    for name in ("good", "perturbed", "bad"):
        generated = run(models, DRAFTERS[name](models), requests_of())
        acceptance[name] = generated.num_accepted_tokens / generated.num_draft_tokens
    assert acceptance["good"] == 1.0
    assert acceptance["bad"] < 0.2 < acceptance["perturbed"] < 0.95


def test_a_dying_drafter_dies_in_mid_stream(models):
    complete = run(models, DRAFTERS["perturbed"](models), requests_of())
    dying = run(models, DRAFTERS["dying"](models), requests_of())
    assert 0 < dying.num_draft_tokens < complete.num_draft_tokens / 2 + 8 * 4


def test_choices_of_one_prompt_differ(models, expected):
    second = run(models, DRAFTERS["good"](models), requests_of(choice_index=1)).token_ids
    assert all(second[request_id] != token_ids for request_id, token_ids in expected.items())


def test_seeds_differ(models, expected):
    other = run(models, DRAFTERS["good"](models), requests_of(seed=500)).token_ids
    assert all(other[request_id] != token_ids for request_id, token_ids in expected.items())


PREDICTIONS: dict[str, Callable[[list[int]], list[int]]] = {
    "right": lambda tokens: tokens,
    "edited": lambda tokens: [*tokens[:5], 1, 2, *tokens[7:15], *tokens[18:]],
    "wrong": lambda tokens: [1 + token % 2 for token in tokens],
    "short": lambda tokens: tokens[:2],
}


@pytest.mark.parametrize("drafter", ["none", "random"])
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_tokens_do_not_depend_on_what_the_client_predicts(models, expected, prediction, drafter):
    predicted = [
        dataclasses.replace(request, prediction_token_ids=tuple(PREDICTIONS[prediction](expected[request.request_id])))
        for request in requests_of()
    ]
    generated = run(models, DRAFTERS[drafter](models), predicted, LIMITS["preempted"])
    assert generated.token_ids == expected
    if prediction == "right":
        assert generated.num_accepted_tokens == generated.num_draft_tokens > 0.6 * len(PROMPTS) * NUM_NEW_TOKENS
    if prediction == "edited":
        assert 0 < generated.num_accepted_tokens < generated.num_draft_tokens
