"""Structured output is that of plain decoding under the same mask, whatever drafts, trees and pool do.

Greedy and seeded tokens are compared with what the library's logits give, masked by brute force over the vocabulary. So
is what comes behind a thought, which the same drafts cross.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from exactness.small_engines import (
    Generated,
    Hints,
    Limits,
    ModelDrafts,
    Models,
    NoDrafts,
    RandomDrafts,
    generate,
    lively_models,
    make_engine,
)
from fakes.byte_tokens import UNFORCED, ByteTokens, allowed_ids, matches
from fakes.processed import processed_row
from outrider.verifier_service.drafting.asking import CoordinatorConfig
from outrider.verifier_service.drafting.coordinator import DraftCoordinator
from outrider.verifier_service.messages.request import (
    FinishReason,
    GenerationRequest,
    LogprobsMode,
    SamplingParams,
    SpeculationPlan,
    StructuredKind,
    StructuredOutput,
    VerificationMode,
)
from outrider.verifier_service.messages.thought import Thought
from outrider.verifier_service.sampling.coupled_sampler import coupled_choice, gumbel_noise
from outrider.verifier_service.sampling.grammar import GrammarCompiler
from tiny.models import VOCAB_SIZE, full_logits, random_sequences
from tiny.verified import target_probs

ARCHITECTURE = "llama"
EOS, STOP = 2, 10  # the tiny models' end, and a token that no text of the grammar has
NUM_NEW_TOKENS = 20
PARTS = [bytes(letters) for length in (1, 2, 3) for letters in itertools.product(b"abcd", repeat=length)]
TOKENS = [PARTS[id_ // 3] if id_ % 3 == 0 and id_ // 3 < len(PARTS) else b"~%d" % id_ for id_ in range(VOCAB_SIZE)]
GRAMMAR = StructuredOutput(kind=StructuredKind.GRAMMAR, text=UNFORCED + 'start: ("ab" | "c" | "da"){4,} "d"')
may_follow = functools.partial(
    allowed_ids, tokens=TOKENS, is_whole=matches(b"(ab|c|da){4,}d"), is_prefix=matches(b"(ab|c|da)*[ad]?")
)
THOUGHT = Thought(opening="~", closing="d", is_open=True, max_tokens=5)
CHOICES = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 3.0, "top_k": 20, "seed": 5},
    "greedy after a thought": {"temperature": 0.0, "thought": THOUGHT},
    "seeded after a thought": {"temperature": 3.0, "top_k": 20, "seed": 5, "thought": THOUGHT},
}
PROCESSORS = (
    {},
    {"frequency_penalty": 2.0},
    {"min_tokens": 12},
    {"stop_token_ids": (STOP,), "repetition_penalty": 1.5},
)
PROMPTS = random_sequences((5, 21, 14, 9))


def num_thought(output: Sequence[int]) -> int | None:
    """Return the number of tokens up to the one that ends the thought; None: it goes on."""
    return next((index + 1 for index, id_ in enumerate(output) if b"d" in TOKENS[id_]), None)


def may_follow_thought(output: Sequence[int], *, ends: set[int]) -> set[int]:
    """Return what may follow: what has no text behind the mark, five tokens at most unless they have it; the form."""
    if (num := num_thought(output)) is not None:
        return may_follow(output[num:], ends=ends)
    if len(output) >= THOUGHT.max_tokens:
        return {TOKENS.index(b"d")}
    return {id_ for id_, text in enumerate(TOKENS) if b"d" not in text[:-1]} - ends


class EndingTokens(ByteTokens):
    eos_token_id = EOS


ROOMY, TIGHT = Limits(), Limits(max_num_batched_tokens=16, num_blocks=15)
GRAMMARS = GrammarCompiler(EndingTokens(TOKENS, (EOS,)).load)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Iterator[Models]:
    yield from lively_models(ARCHITECTURE, tmp_path_factory.mktemp("structured"))


def requests_of(choice: str) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=str(index),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(
                max_tokens=NUM_NEW_TOKENS, structured=GRAMMAR, **CHOICES[choice], **PROCESSORS[index]
            ),
            plan=SpeculationPlan(draft_length=4),
        )
        for index, prompt in enumerate(PROMPTS)
    ]


def plain_tokens(model: PreTrainedModel, request: GenerationRequest) -> list[int]:
    """Decode without an engine, up to the first token that stops or the limit."""
    sampling, prompt, output = request.sampling, list(request.prompt_token_ids), []
    ends = {*sampling.stop_token_ids, EOS}
    while len(output) < sampling.max_tokens and not (output and output[-1] in ends):
        output.append(chosen(masked_row(model, request, output)[None], sampling, len(prompt) + len(output)))
    return output


def masked_row(model: PreTrainedModel, request: GenerationRequest, output: list[int]) -> torch.Tensor:
    """Return the logits that the token after `output` is chosen by, before temperature: float32 [VOCAB_SIZE]."""
    prompt, ends = list(request.prompt_token_ids), {*request.sampling.stop_token_ids, EOS}
    row = full_logits(model, [*prompt, *output])[-1]
    edited = processed_row(row, request.sampling, prompt=prompt, output=output, stop_token_ids=ends)
    allowed = (may_follow if request.sampling.thought is None else may_follow_thought)(output, ends=ends)
    barred = sorted({*range(VOCAB_SIZE)} - allowed)
    return edited.index_fill(0, torch.tensor(barred), -torch.inf)


def chosen(logits: torch.Tensor, sampling: SamplingParams, position: int) -> int:
    if sampling.mode is VerificationMode.GREEDY:
        return int(logits.argmax())
    assert sampling.seed is not None
    noise = gumbel_noise(sampling.seed, sampling.choice_index, torch.tensor([position]), logits.shape[1], "cpu")
    return int(coupled_choice(target_probs(logits, [sampling]), noise))


@pytest.fixture(scope="module", params=CHOICES)
def choice(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def expected(models, choice) -> dict[str, list[int]]:
    return {request.request_id: plain_tokens(models.model, request) for request in requests_of(choice)}


def run(
    models: Models,
    drafts: object,
    requests: Sequence[GenerationRequest],
    *,
    limits: Limits = ROOMY,
    max_tree_nodes: int = 0,
) -> Generated:
    engine = make_engine(models.target, drafts, limits, grammars=GRAMMARS)
    model = {"max_model_len": models.target.max_model_len, "vocab_size": VOCAB_SIZE}
    engine.drafting = DraftCoordinator(drafts, CoordinatorConfig(**model, max_tree_nodes=max_tree_nodes))
    generated = generate(engine, drafts, requests)
    engine.check_integrity()
    return generated


DRAFTERS: dict[str, Callable[[Models], object]] = {
    "none": lambda _: NoDrafts(),
    "model": lambda models: ModelDrafts(models.draft),
    "padded": lambda _: RandomDrafts(VOCAB_SIZE + 40),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("limits", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_tokens_are_those_of_plain_decoding_under_the_mask(models, choice, expected, drafter, limits):
    generated = run(models, DRAFTERS[drafter](models), requests_of(choice), limits=limits)
    assert generated.token_ids == expected
    assert (generated.num_preempted_waits > 0) == (limits is TIGHT)


@pytest.mark.parametrize("max_tree_nodes", [0, 12], ids=["chains", "trees"])
def test_a_drafter_that_is_often_right_changes_nothing(models, choice, expected, max_tree_nodes):
    hints = Hints({request.prompt_token_ids: expected[request.request_id] for request in requests_of(choice)})
    generated = run(models, hints, requests_of(choice), max_tree_nodes=max_tree_nodes)
    assert generated.token_ids == expected
    assert generated.num_accepted_tokens > 15
    assert (hints.num_trees > 10) == (max_tree_nodes > 0)


@pytest.mark.parametrize("max_tree_nodes", [0, 12], ids=["chains", "trees"])
def test_processed_logprobs_are_those_under_the_mask(models, choice, expected, max_tree_nodes):
    asked = [
        replace(request, sampling=replace(request.sampling, logprobs=0, logprobs_mode=LogprobsMode.PROCESSED))
        for request in requests_of(choice)
    ]
    hints = Hints({request.prompt_token_ids: expected[request.request_id] for request in asked})
    generated = run(models, hints, asked, max_tree_nodes=max_tree_nodes)
    assert generated.token_ids == expected
    for request in asked:
        entries = [entry for output in generated.outputs[request.request_id] for entry in output.logprobs]
        output = expected[request.request_id]
        for index, entry in enumerate(entries):
            masked = masked_row(models.model, request, output[:index])[None]
            law = masked.softmax(1) if choice.startswith("greedy") else target_probs(masked, [request.sampling])
            assert entry.logprob == pytest.approx(float(law[0, output[index]].log()), abs=2e-4)


def test_what_is_published_elsewhere_goes_on_as_it_would_have(models, choice, expected):
    for num_published in (1, 7):
        rest = {id_: tokens[num_published:] for id_, tokens in expected.items() if len(tokens) > num_published}
        requests = [
            replace(request, output_token_ids=tuple(expected[request.request_id][:num_published]))
            for request in requests_of(choice)
            if request.request_id in rest
        ]
        assert len(requests) > 1
        assert run(models, RandomDrafts(VOCAB_SIZE), requests).token_ids == rest


def test_an_output_that_cannot_go_on_fails_alone(models):
    dead = StructuredOutput(kind=StructuredKind.CHOICE, choices=("abcdz",))  # no token is or begins with a z
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, structured=dead)
    right, other = requests_of("greedy")[:2]
    wrong = replace(other, sampling=sampling, request_id="wrong")
    assert "does not know the text" in make_engine(models.target, NoDrafts(), ROOMY).add(wrong).error
    engine = make_engine(models.target, NoDrafts(), ROOMY, grammars=GRAMMARS)
    assert engine.add(wrong) is engine.add(right) is None
    outputs = []
    while engine.has_work():
        outputs += engine.step()
        engine.check_integrity()
    last = [output for output in outputs if output.finish_reason is not None]
    assert [output.request_id for output in last] == ["wrong", right.request_id]
    assert [output.finish_reason for output in last] == [FinishReason.ERROR, FinishReason.LENGTH]
    assert "cannot be followed" in last[0].error


def test_the_expectation_says_something(choice, expected):
    thoughts = {id_: num_thought(output) if "thought" in choice else 0 for id_, output in expected.items()}
    forms = [output[thoughts[id_] :] for id_, output in expected.items()]
    outputs = [b"".join(TOKENS[id_] for id_ in form if id_ not in (EOS, STOP)) for form in forms]
    assert len(set(outputs)) == len(outputs)
    assert all(b"~" not in output for output in outputs)
    if "thought" in choice:
        assert all(1 < num <= THOUGHT.max_tokens + 1 for num in thoughts.values())
    else:
        assert any(tokens[-1] in (EOS, STOP) for tokens in expected.values())
