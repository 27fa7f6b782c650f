"""Penalties, biases, minimum length and logprobs are those of plain decoding, whatever drafts and pool do.

The expectation needs no engine: the library's logits of the whole prefix, one token after the other, and processors
that count everything again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from transformers import PreTrainedModel

from exactness.small_engines import (
    BLOCK_SIZE,
    Drafts,
    Generated,
    Limits,
    ModelDrafts,
    Models,
    NoDrafts,
    RandomDrafts,
    generate,
    lively_models,
    make_engine,
)
from fakes.processed import processed_row
from outrider.verifier_service.messages.request import (
    GenerationRequest,
    LogitBias,
    SamplingParams,
    SpeculationPlan,
    TokenLogprobs,
    VerificationMode,
)
from outrider.verifier_service.sampling.coupled_sampler import coupled_choice, gumbel_noise
from tiny.models import VOCAB_SIZE, full_logits, random_sequences
from tiny.verified import target_probs

ARCHITECTURE = "gpt_neox"  # one whose plain output repeats itself, so that penalties show
NUM_NEW_TOKENS = 24
NUM_TOP = 3
PROMPTS = random_sequences((5, 21, 14, 9))
STOPS = tuple(range(3, 140))  # most of the vocabulary: without min_tokens the output would end at once
PROCESSORS = (
    {"presence_penalty": 1.5, "frequency_penalty": 1.0},
    {"repetition_penalty": 1.8, "allowed_token_ids": tuple(range(1, VOCAB_SIZE, 3))},
    {"logit_bias": (LogitBias(token_id=7, bias=6.0), LogitBias(token_id=31, bias=-100.0)), "min_tokens": 10},
    {"frequency_penalty": 2.0, "repetition_penalty": 0.8, "logit_bias": (LogitBias(token_id=50, bias=5.0),)},
)
CHOICES = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 3.0, "top_k": 20}}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Iterator[Models]:
    yield from lively_models(ARCHITECTURE, tmp_path_factory.mktemp("processed"))


def requests_of(choice: str, *, is_processed: bool = True, **sampling: object) -> list[GenerationRequest]:
    requests = []
    for index, prompt in enumerate(PROMPTS):
        options = {**CHOICES[choice], **(PROCESSORS[index] if is_processed else {}), **sampling}
        if choice == "seeded":
            options["seed"] = 40 + index
        if "min_tokens" in options:
            options["stop_token_ids"] = STOPS
        requests.append(
            GenerationRequest(
                request_id=str(index),
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(max_tokens=NUM_NEW_TOKENS, **options),
                plan=SpeculationPlan(draft_length=4),
            )
        )
    return requests


def plain_tokens(models: Models, request: GenerationRequest) -> list[int]:
    """Decode without an engine, up to the first token that stops or the limit."""
    sampling, prompt, output = request.sampling, list(request.prompt_token_ids), []
    stops = {*sampling.stop_token_ids, *models.target.eos_token_ids}
    while len(output) < sampling.max_tokens and not (output and output[-1] in stops):
        logits = full_logits(models.model, [*prompt, *output])[-1]
        row = processed_row(logits, sampling, prompt=prompt, output=output, stop_token_ids=stops)
        output.append(chosen(row[None], sampling, len(prompt) + len(output)))
    return output


def chosen(logits: torch.Tensor, sampling: SamplingParams, position: int) -> int:
    if sampling.mode is VerificationMode.GREEDY:
        return int(logits.argmax())
    assert sampling.seed is not None
    noise = gumbel_noise(sampling.seed, sampling.choice_index, torch.tensor([position]), logits.shape[1], "cpu")
    return int(coupled_choice(target_probs(logits, [sampling]), noise))


def run(
    models: Models, drafts: Drafts, requests: Sequence[GenerationRequest], limits: Limits | None = None
) -> Generated:
    return generate(make_engine(models.target, drafts, limits or Limits()), drafts, requests)


@pytest.fixture(scope="module", params=CHOICES)
def choice(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def expected(models, choice) -> dict[str, list[int]]:
    return {request.request_id: plain_tokens(models, request) for request in requests_of(choice)}


DRAFTERS: dict[str, Callable[[Models], Drafts]] = {
    "none": lambda _: NoDrafts(),
    "model": lambda models: ModelDrafts(models.draft),
    "padded": lambda _: RandomDrafts(VOCAB_SIZE + 40),  # guesses, many of them beyond the target's vocabulary
    "dying": lambda models: ModelDrafts(models.draft, num_polls_alive=6),
}
LIMITS = {
    "together": Limits(),
    "chunked": Limits(max_num_batched_tokens=9),
    "preempted": Limits(num_blocks=16),
}


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_the_references(models, choice, expected, drafter, limits):
    generated = run(models, DRAFTERS[drafter](models), requests_of(choice), LIMITS[limits])
    assert generated.token_ids == expected
    assert (generated.num_preempted_waits > 0) == (limits == "preempted")
    assert (generated.num_draft_tokens == 0) == (drafter == "none")


def test_every_processor_changes_the_output(models, choice, expected):
    plain = run(models, NoDrafts(), requests_of(choice, is_processed=False)).token_ids
    assert all(plain[request_id] != token_ids for request_id, token_ids in expected.items())
    assert 10 < len(expected["2"]) < NUM_NEW_TOKENS, "the first stop token after min_tokens ended it"
    assert not set(expected["2"][:10]) & set(STOPS)


def test_drafts_are_accepted_all_the_same(models, choice):
    generated = run(models, ModelDrafts(models.draft), requests_of(choice))
    assert generated.num_accepted_tokens > 10


@pytest.mark.parametrize("drafter", ["none", "model"])
def test_a_request_goes_on_where_another_verifier_left_it(models, choice, expected, drafter):
    """Counts and minimum length go on too: the published tokens are output, not prompt."""
    continued = [
        dataclasses.replace(request, output_token_ids=tuple(expected[request.request_id][:7]))
        for request in requests_of(choice)
    ]
    generated = run(models, DRAFTERS[drafter](models), continued)
    assert generated.token_ids == {request_id: token_ids[7:] for request_id, token_ids in expected.items()}


# --- logprobs ---


def check_entry(entry: TokenLogprobs, model: PreTrainedModel, prefix: list[int], token_id: int) -> None:
    """Compare one token's entry with the library's own logits after `prefix`."""
    logprobs = torch.log_softmax(full_logits(model, prefix)[-1], dim=0)
    best = logprobs.topk(NUM_TOP)
    assert entry.token_id == token_id
    assert entry.logprob == pytest.approx(logprobs[token_id].item(), abs=2e-4)
    assert entry.rank == 1 + int((logprobs > logprobs[token_id]).sum())
    assert entry.top_token_ids == tuple(best.indices.tolist())
    assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=2e-4)


def test_logprobs_are_the_models_own_with_and_without_drafts(models, choice, expected):
    found = {}
    for drafter in ("none", "model"):
        generated = run(models, DRAFTERS[drafter](models), requests_of(choice, logprobs=NUM_TOP))
        assert generated.token_ids == expected
        found[drafter] = {
            request_id: [entry for output in outputs for entry in output.logprobs]
            for request_id, outputs in generated.outputs.items()
        }
    for index, prompt in enumerate(PROMPTS):
        token_ids = expected[str(index)]
        plain, speculated = found["none"][str(index)], found["model"][str(index)]
        assert len(plain) == len(speculated) == len(token_ids)
        for position, token_id in enumerate(token_ids):
            check_entry(plain[position], models.model, [*prompt, *token_ids[:position]], token_id)
        for one, other in zip(plain, speculated, strict=True):
            assert (one.token_id, one.rank, one.top_token_ids) == (other.token_id, other.rank, other.top_token_ids)
            assert (one.logprob, *one.top_logprobs) == pytest.approx((other.logprob, *other.top_logprobs), abs=1e-4)


@pytest.mark.parametrize("limits", LIMITS)
def test_prompt_logprobs_come_once_and_are_the_models_own(models, limits):
    """Also where the prompt is in the prefix cache, and beside requests that want none."""
    drafts = ModelDrafts(models.draft)
    engine = make_engine(models.target, drafts, LIMITS[limits])
    generate(engine, drafts, requests_of("greedy"))
    requests = requests_of("greedy", prompt_logprobs=NUM_TOP, logprobs=NUM_TOP)
    others = [dataclasses.replace(request, request_id=f"{request.request_id}b") for request in requests_of("greedy")]
    generated = generate(engine, drafts, [request for pair in zip(others, requests, strict=True) for request in pair])
    for request, prompt in zip(requests, PROMPTS, strict=True):
        first, *later = generated.outputs[request.request_id]
        assert all(output.prompt_logprobs is None for output in later)
        assert first.prompt_logprobs[0] is None
        assert len(first.prompt_logprobs) == len(prompt) > BLOCK_SIZE
        for position in range(1, len(prompt)):
            check_entry(first.prompt_logprobs[position], models.model, prompt[:position], prompt[position])
        check_entry(first.logprobs[0], models.model, prompt, first.token_ids[0])
    assert all(output.prompt_logprobs is None for other in others for output in generated.outputs[other.request_id])


def test_prompt_logprobs_that_were_published_are_not_wanted_again(models):
    request = requests_of("greedy", prompt_logprobs=NUM_TOP, logprobs=0)[0]
    whole = run(models, NoDrafts(), [request])
    continued = dataclasses.replace(request, output_token_ids=tuple(whole.token_ids["0"][:5]))
    rest = run(models, NoDrafts(), [continued])
    assert rest.token_ids["0"] == whole.token_ids["0"][5:]
    assert all(output.prompt_logprobs is None for output in rest.outputs["0"])
    assert all(len(output.logprobs) == 1 for output in rest.outputs["0"])
