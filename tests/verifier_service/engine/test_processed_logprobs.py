"""Processed log probabilities are those of the law that each token was drawn from, whatever drafts do.

The expectation needs no engine: the library's logits of the whole prefix, edits that count everything again, then the
library's own warpers and its log_softmax. Mistakes that are planted in the engine are caught by the same comparison.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from exactness.small_engines import (
    Drafts,
    Generated,
    Hints,
    Limits,
    ModelDrafts,
    Models,
    NoDrafts,
    generate,
    lively_models,
    make_engine,
)
from fakes.processed import processed_row, warpers
from outrider.verifier_service.cpu.kernels import load_kernels
from outrider.verifier_service.drafting.asking import CoordinatorConfig
from outrider.verifier_service.drafting.coordinator import DraftCoordinator
from outrider.verifier_service.engine import step_rows
from outrider.verifier_service.engine.launched_step import LaunchedStep
from outrider.verifier_service.messages.request import (
    LOWEST_LOGPROB,
    AcceptanceRule,
    GenerationRequest,
    LogitBias,
    LogprobsMode,
    SamplingParams,
    SpeculationPlan,
    TokenLogprobs,
    VerificationMode,
)
from outrider.verifier_service.sampling.logits_processors import LogitEdits
from outrider.verifier_service.sampling.logprobs import shape_of_logprobs
from tiny.models import VOCAB_SIZE, full_logits, random_sequences

ARCHITECTURE = "gpt_neox"  # one whose plain output repeats itself, so that penalties show
NUM_NEW_TOKENS = 20
NUM_TOP = 12  # more than some truncations leave
PROMPTS = random_sequences((5, 21, 14, 9))
PROCESSORS: tuple[dict[str, Any], ...] = (
    {},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "bad_words": ((7,), (31, 8))},
    {"repetition_penalty": 1.4, "logit_bias": (LogitBias(token_id=7, bias=4.0), LogitBias(token_id=31, bias=-100.0))},
    {"frequency_penalty": 1.0, "repetition_penalty": 0.9, "min_tokens": 10},
)
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.7, "top_p": 0.9},
    "drawn": {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
    "drawn_from_all": {"temperature": 0.8},
}
LIBRARY = 1e-3  # how far two engines' log probabilities may be apart
BY_TORCH = 1e-5  # the same of one engine whose operators are torch's: rows together are rounded otherwise than alone


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Iterator[Models]:
    yield from lively_models(ARCHITECTURE, tmp_path_factory.mktemp("processed_logprobs"))


def requests_of(choice: str, rule: AcceptanceRule = AcceptanceRule.STANDARD) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=str(index),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(
                max_tokens=NUM_NEW_TOKENS,
                seed=40 + index if choice == "seeded" else None,
                acceptance=rule,
                logprobs=NUM_TOP,
                logprobs_mode=LogprobsMode.PROCESSED,
                **CHOICES[choice],
                **PROCESSORS[index],
            ),
            plan=SpeculationPlan(draft_length=4),
        )
        for index, prompt in enumerate(PROMPTS)
    ]


def run(models: Models, drafts: Drafts, requests: Sequence[GenerationRequest], *, max_tree_nodes: int = 0) -> Generated:
    engine = make_engine(models.target, drafts, Limits())
    model = {"max_model_len": models.target.max_model_len, "vocab_size": VOCAB_SIZE}
    engine.drafting = DraftCoordinator(drafts, CoordinatorConfig(**model, max_tree_nodes=max_tree_nodes))
    return generate(engine, drafts, requests)


def entries_of(generated: Generated, request: GenerationRequest) -> list[TokenLogprobs]:
    return [entry for output in generated.outputs[request.request_id] for entry in output.logprobs or ()]


def expected_logprobs(models: Models, sampling: SamplingParams, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Return those of the token after `output`: float32 [VOCAB_SIZE]."""
    row = full_logits(models.model, [*prompt, *output])[-1]
    stops = {*sampling.stop_token_ids, *models.target.eos_token_ids}
    edited = processed_row(row, sampling, prompt=prompt, output=output, stop_token_ids=stops)
    scores = warpers(sampling)(torch.tensor([[*prompt, *output]]), edited[None])
    return torch.log_softmax(scores[0], dim=0).clamp(min=LOWEST_LOGPROB)


def check(models: Models, generated: Generated, requests: Sequence[GenerationRequest]) -> None:
    for request in requests:
        prompt, output = list(request.prompt_token_ids), generated.token_ids[request.request_id]
        entries = entries_of(generated, request)
        assert [entry.token_id for entry in entries] == output
        for index, entry in enumerate(entries):
            expected = expected_logprobs(models, request.sampling, prompt, output[:index])
            assert LOWEST_LOGPROB < entry.logprob <= 0.0, "a token that was drawn can be drawn"
            assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=LIBRARY)
            best = expected.topk(NUM_TOP).values.tolist()
            assert entry.top_logprobs == pytest.approx(best, abs=LIBRARY)
            fewest, most = ((expected > expected[entry.token_id] + gap).sum() for gap in (LIBRARY, -LIBRARY))
            assert 1 + fewest <= entry.rank <= max(1, most)


class LikeliestNext(Hints):
    """A drafter for unseeded requests: what the target finds likeliest."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__({})
        self._model = model

    def _rest(self, tokens: tuple[int, ...]) -> list[int]:
        rest: list[int] = []
        while len(rest) < 4:
            rest.append(int(full_logits(self._model, [*tokens, *rest])[-1].argmax()))
        return rest


def hints(models: Models, requests: Sequence[GenerationRequest]) -> Hints:
    """Return a drafter that is often right: if it can be, it knows what comes without drafts."""
    if requests[0].sampling.mode is VerificationMode.REJECTION:
        return LikeliestNext(models.model)
    plain = run(models, NoDrafts(), requests).token_ids
    return Hints({request.prompt_token_ids: plain[request.request_id] for request in requests})


@pytest.mark.parametrize("choice", CHOICES)
def test_they_are_the_librarys_without_drafts(models, choice):
    requests = requests_of(choice)
    check(models, run(models, NoDrafts(), requests), requests)


@pytest.mark.parametrize("drafter", ["model", "chains", "trees"])
@pytest.mark.parametrize("rule", [AcceptanceRule.STANDARD, AcceptanceRule.BLOCK])
@pytest.mark.parametrize("choice", CHOICES)
def test_they_are_the_librarys_under_every_lossless_rule(models, choice, rule, drafter):
    requests = requests_of(choice, rule)
    drafts = ModelDrafts(models.draft) if drafter == "model" else hints(models, requests)
    generated = run(models, drafts, requests, max_tree_nodes=12 if drafter == "trees" else 0)
    assert generated.num_accepted_tokens > 5
    if isinstance(drafts, Hints):
        assert (drafts.num_trees > 5) == (drafter == "trees" and rule is AcceptanceRule.STANDARD)
    check(models, generated, requests)


@pytest.mark.parametrize("max_tree_nodes", [0, 12], ids=["chains", "trees"])
@pytest.mark.parametrize("choice", ["greedy", "seeded"])
def test_they_are_the_same_with_drafts_and_without(models, choice, max_tree_nodes):
    requests, tolerance = requests_of(choice), BY_TORCH if load_kernels(torch.float32) is None else 0.0
    plain = run(models, NoDrafts(), requests)
    drafted = run(models, hints(models, requests), requests, max_tree_nodes=max_tree_nodes)
    assert drafted.token_ids == plain.token_ids
    assert drafted.num_accepted_tokens > 5
    for request in requests:
        for one, other in zip(entries_of(plain, request), entries_of(drafted, request), strict=True):
            assert (one.token_id, one.rank, one.top_token_ids) == (other.token_id, other.rank, other.top_token_ids)
            numbers = (other.logprob, *other.top_logprobs)
            assert (one.logprob, *one.top_logprobs) == pytest.approx(numbers, abs=tolerance, rel=0)


@pytest.mark.parametrize("choice", ["drawn", "drawn_from_all"])
def test_a_prompts_are_the_scores_of_the_librarys_generate(models, choice):
    """As a trainer scores a sample: the prompt's and the answer's tokens are a prompt, whatever drew them."""
    sampling = SamplingParams(**CHOICES[choice], max_tokens=1, prompt_logprobs=0, logprobs_mode=LogprobsMode.PROCESSED)
    prompt = PROMPTS[1]
    whole, scores = library_sample(models.model, prompt, sampling)
    request = GenerationRequest(request_id="0", prompt_token_ids=tuple(whole), sampling=sampling)
    entries = run(models, NoDrafts(), [request]).outputs["0"][0].prompt_logprobs[len(prompt) :]
    assert len(entries) == len(scores) == NUM_NEW_TOKENS
    for entry, score in zip(entries, scores, strict=True):
        assert entry.logprob == pytest.approx(float(torch.log_softmax(score, 0)[entry.token_id]), abs=LIBRARY)


def library_sample(
    model: PreTrainedModel, prompt: list[int], sampling: SamplingParams
) -> tuple[list[int], list[torch.Tensor]]:
    """Return prompt and sampled tokens, and the scores that each was drawn by: [VOCAB_SIZE] per sampled token."""
    torch.manual_seed(3)
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        max_new_tokens=NUM_NEW_TOKENS,
        min_new_tokens=NUM_NEW_TOKENS,
        output_scores=True,
        return_dict_in_generate=True,
    )
    return found.sequences[0].tolist(), [score[0] for score in found.scores]


def test_a_token_that_cannot_be_drawn_has_the_lowest(models):
    sampling = SamplingParams(top_k=1, prompt_logprobs=2, max_tokens=1, logprobs_mode=LogprobsMode.PROCESSED)
    request = GenerationRequest(request_id="0", prompt_token_ids=tuple(PROMPTS[2]), sampling=sampling)
    entries = run(models, NoDrafts(), [request]).outputs["0"][0].prompt_logprobs[1:]
    assert all(entry.top_logprobs == (0.0, LOWEST_LOGPROB) for entry in entries)
    assert {entry.logprob for entry in entries} <= {0.0, LOWEST_LOGPROB}
    assert LOWEST_LOGPROB in {entry.logprob for entry in entries}
    assert all(math.isfinite(entry.logprob) for entry in entries)


def test_the_speculation_counts_of_a_request_come_with_its_last_output(models):
    """SGLang's spec_verify_ct, spec_draft_token_num and spec_accept_token_num, in this order."""
    generated = run(models, ModelDrafts(models.draft), requests_of("drawn"))
    for outputs in generated.outputs.values():
        counts, drafted = outputs[-1].speculation, [output for output in outputs if output.num_draft_tokens]
        assert counts.num_drafts == len(drafted) > 0
        assert counts.num_draft_tokens == sum(output.num_draft_tokens for output in drafted)
        assert counts.num_accepted_tokens == sum(output.num_accepted_tokens for output in drafted)


# --- mistakes ---


def at_temperature_1(sampling: SamplingParams) -> SamplingParams:
    return dataclasses.replace(sampling, temperature=1.0)


def without_truncation(sampling: SamplingParams) -> SamplingParams:
    return dataclasses.replace(sampling, top_k=0, top_p=1.0, min_p=0.0)


def of_the_first_row(edits: LogitEdits, rows: Sequence[int]) -> LogitEdits:
    return real_of_rows(edits, [0] * len(rows))


real_of_rows = LogitEdits.of_rows
DEFECTS: dict[str, tuple[object, str, object]] = {
    "temperature left out": (step_rows, "shape_of_logprobs", at_temperature_1),
    "truncation left out": (step_rows, "shape_of_logprobs", without_truncation),
    "penalties left out": (LaunchedStep, "edits", lambda step: {}),
    "penalties of the draft's root": (LogitEdits, "of_rows", of_the_first_row),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_mistake_is_caught(models, monkeypatch, defect):
    requests = requests_of("drawn")
    drafts = hints(models, requests)
    monkeypatch.setattr(*DEFECTS[defect])
    generated = run(models, drafts, requests)
    assert generated.num_accepted_tokens > 5
    with pytest.raises(AssertionError):
        check(models, generated, requests)
    monkeypatch.undo()
    assert step_rows.shape_of_logprobs is shape_of_logprobs
