"""Structured output is that of plain decoding under the same mask, whatever drafts, trees and pool do.

Greedy and seeded tokens are compared with what the library's logits give, masked by brute force over the vocabulary.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from exactness.small_engines import (
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
from fakes.byte_tokens import UNFORCED, ByteTokens, allowed_ids, matches
from fakes.processed import processed_row
from outrider.verifier_service.drafting.coordinator import CoordinatorConfig, DraftCoordinator
from outrider.verifier_service.messages.draft import ROOT, Commit, Draft
from outrider.verifier_service.messages.request import (
    FinishReason,
    GenerationRequest,
    SamplingParams,
    SpeculationPlan,
    StructuredKind,
    StructuredOutput,
    VerificationMode,
)
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
CHOICES = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 3.0, "top_k": 20, "seed": 5}}
PROCESSORS = (
    {},
    {"frequency_penalty": 2.0},
    {"min_tokens": 12},
    {"stop_token_ids": (STOP,), "repetition_penalty": 1.5},
)
PROMPTS = random_sequences((5, 21, 14, 9))


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
        row = full_logits(model, [*prompt, *output])[-1]
        edited = processed_row(row, sampling, prompt=prompt, output=output, stop_token_ids=ends)
        barred = sorted({*range(VOCAB_SIZE)} - may_follow(output, ends=ends))
        masked = edited.index_fill(0, torch.tensor(barred), -torch.inf)
        output.append(chosen(masked[None], sampling, len(prompt) + len(output)))
    return output


def chosen(logits: torch.Tensor, sampling: SamplingParams, position: int) -> int:
    if sampling.mode is VerificationMode.GREEDY:
        return int(logits.argmax())
    assert sampling.seed is not None
    noise = gumbel_noise(sampling.seed, sampling.choice_index, torch.tensor([position]), logits.shape[1], "cpu")
    return int(coupled_choice(target_probs(logits, [sampling]), noise))


class Hints(RandomDrafts):
    """A drafter that is shown the outputs beforehand and is often right; trees where it is asked for them."""

    def __init__(self, expected: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        super().__init__(VOCAB_SIZE + 40)
        self._expected = expected  # by the prompt
        self._prompts: dict[str, int] = {}
        self._tokens: dict[str, tuple[int, ...]] = {}
        self.num_trees = 0

    def send(self, drafter_id: str, messages: Sequence[object]) -> None:
        for message in messages:
            if hasattr(message, "sampling"):
                self._tokens[message.request_id] = message.token_ids
        super().send(drafter_id, messages)

    def _draft(self, commit: Commit) -> Draft:
        plain = super()._draft(commit)
        tokens = self._tokens[commit.request_id] = self._tokens[commit.request_id] + commit.token_ids
        rest = next(
            output[len(tokens) - len(prompt) :]
            for prompt, output in self._expected.items()
            if tokens[: len(prompt)] == prompt
        )
        assert list(commit.forced_ids) == rest[: len(commit.forced_ids)], "forced, and yet something else"
        if commit.max_nodes == 0:
            hinted = (
                right if self._rng.random() < 0.7 else wrong
                for right, wrong in zip(rest, plain.token_ids, strict=False)
            )
            return replace(plain, token_ids=tuple(hinted))
        return self._tree(plain, rest, commit)

    def _tree(self, plain: Draft, rest: Sequence[int], commit: Commit) -> Draft:
        """Grow a random tree around the right path, as far as there is one."""
        token_ids, parents, depths, right = [], [], [], ROOT
        for node in range(commit.max_nodes):
            depth = 0 if right == ROOT else depths[right] + 1
            if depth < min(commit.max_length, len(rest)) and self._rng.random() < 0.4:
                parent, token_id, depth = right, rest[depth], depth
                right = node
            else:
                parent = self._rng.randrange(ROOT, node)
                depth = 0 if parent == ROOT else depths[parent] + 1
                token_id = self._rng.randrange(self._vocab_size)
            if depth >= commit.max_length or (parent, token_id) in zip(parents, token_ids, strict=True):
                break
            token_ids.append(token_id)
            parents.append(parent)
            depths.append(depth)
        self.num_trees += bool(token_ids)
        return replace(plain, token_ids=tuple(token_ids), parents=tuple(parents))


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


def test_the_expectation_says_something(expected):
    outputs = [b"".join(TOKENS[id_] for id_ in output if id_ not in (EOS, STOP)) for output in expected.values()]
    assert len(set(outputs)) == len(outputs)
    assert any(tokens[-1] in (EOS, STOP) for tokens in expected.values())
    assert all(b"~" not in output for output in outputs)
