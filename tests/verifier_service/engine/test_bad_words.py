"""Bad words never come, and the tokens are those of plain decoding, whatever drafts.

The expectation needs no engine: the library's logits of the whole prefix, one token after the other, and the last token
of every bad word barred wherever the output ends with the others. Each word is one that the model says without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from exactness.small_engines import (
    Drafts,
    Generated,
    Limits,
    ModelDrafts,
    Models,
    NoDrafts,
    RandomDrafts,
    ShownDrafts,
    generate,
    lively_models,
    make_engine,
)
from fakes.processed import processed_row
from outrider.verifier_service.drafting.coordinator import CoordinatorConfig, DraftCoordinator
from outrider.verifier_service.messages.draft import ROOT, Commit, Draft
from outrider.verifier_service.messages.request import (
    GenerationRequest,
    SamplingParams,
    SpeculationPlan,
    VerificationMode,
)
from outrider.verifier_service.sampling.coupled_sampler import coupled_choice, gumbel_noise
from tiny.models import VOCAB_SIZE, full_logits, random_sequences
from tiny.verified import target_probs

ARCHITECTURE = "llama"
NUM_NEW_TOKENS = 20
PROMPTS = random_sequences((5, 21, 9))
PLACES = (range(1, 4), range(6, 8), range(9, 12), range(13, 15), range(16, 17))  # of the words, one after the other
CHOICES = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 3.0, "top_k": 20}}
ROOMY, TIGHT = Limits(), Limits(num_blocks=12)
Words = tuple[tuple[int, ...], ...]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Iterator[Models]:
    yield from lively_models(ARCHITECTURE, tmp_path_factory.mktemp("bad_words"))


@pytest.fixture(scope="module", params=CHOICES)
def choice(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def words(models, choice) -> dict[str, Words]:
    """For each prompt one word after the other, out of what the model says under those before."""
    found: dict[str, Words] = {}
    for index in range(len(PROMPTS)):
        own: Words = ()
        for place in PLACES:
            said = plain_tokens(models.model, request_of(choice, index, own))
            own += (tuple(said[position] for position in place),)
        found[str(index)] = own
    return found


@pytest.fixture(scope="module")
def requests(choice, words) -> list[GenerationRequest]:
    return [request_of(choice, index, words[str(index)]) for index in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def expected(models, requests) -> dict[str, list[int]]:
    return {request.request_id: plain_tokens(models.model, request) for request in requests}


def request_of(choice: str, index: int, words: Words) -> GenerationRequest:
    seed = {"seed": 40 + index} if choice == "seeded" else {}
    sampling = SamplingParams(max_tokens=NUM_NEW_TOKENS, ignore_eos=True, bad_words=words, **CHOICES[choice], **seed)
    return GenerationRequest(
        request_id=str(index),
        prompt_token_ids=tuple(PROMPTS[index]),
        sampling=sampling,
        plan=SpeculationPlan(draft_length=4),
    )


def plain_tokens(model: PreTrainedModel, request: GenerationRequest) -> list[int]:
    sampling, prompt, output = request.sampling, list(request.prompt_token_ids), []
    while len(output) < sampling.max_tokens:
        logits = full_logits(model, [*prompt, *output])[-1]
        row = processed_row(logits, sampling, prompt=prompt, output=output)
        output.append(chosen(row[None], sampling, len(prompt) + len(output)))
    return output


def chosen(logits: torch.Tensor, sampling: SamplingParams, position: int) -> int:
    if sampling.mode is VerificationMode.GREEDY:
        return int(logits.argmax())
    assert sampling.seed is not None
    noise = gumbel_noise(sampling.seed, sampling.choice_index, torch.tensor([position]), logits.shape[1], "cpu")
    return int(coupled_choice(target_probs(logits, [sampling]), noise))


def has_word(output: Sequence[int], words: Words) -> bool:
    return any(tuple(output[start : start + len(word)]) == word for word in words for start in range(len(output)))


class Tempting(ShownDrafts):
    """Knows the bad words, too: it drafts trees that go on rightly, and with each word's end."""

    def __init__(self, expected: Mapping[tuple[int, ...], Sequence[int]], words: Mapping[tuple[int, ...], Words]):
        super().__init__(VOCAB_SIZE, expected)
        self._words = words  # by the prompt
        self.num_tempted = 0

    def _draft(self, commit: Commit) -> Draft:
        plain = super()._draft(commit)
        tokens = self._follow(commit)
        prompt = self._prompt_of(tokens)
        output = list(tokens[len(prompt) :])
        token_ids: list[int] = []
        parents: list[int] = []
        on_path = ROOT
        for right in self._expected[prompt][len(output) :][: commit.max_length]:
            begun = [word[-1] for word in self._words[prompt] if has_word([*output, word[-1]][-len(word) :], (word,))]
            self.num_tempted += len(begun)
            for id_ in (*dict.fromkeys(begun), right):
                token_ids.append(id_)
                parents.append(on_path)
            on_path = len(token_ids) - 1
            output.append(right)
        size = commit.max_nodes
        return replace(plain, token_ids=tuple(token_ids[:size]), parents=tuple(parents[:size]))


def run(
    models: Models, drafts: Drafts, requests: Sequence[GenerationRequest], limits: Limits, max_tree_nodes: int = 0
) -> Generated:
    engine = make_engine(models.target, drafts, limits)
    model = {"max_model_len": models.target.max_model_len, "vocab_size": VOCAB_SIZE}
    engine.drafting = DraftCoordinator(drafts, CoordinatorConfig(**model, max_tree_nodes=max_tree_nodes))
    generated = generate(engine, drafts, requests)
    engine.check_integrity()
    return generated


DRAFTERS: dict[str, Callable[[Models], Drafts]] = {
    "none": lambda _: NoDrafts(),
    "model": lambda models: ModelDrafts(models.draft),
    "padded": lambda _: RandomDrafts(VOCAB_SIZE + 40),
}


@pytest.mark.parametrize("limits", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_those_of_plain_decoding_and_no_word_is_among_them(
    models, requests, words, expected, drafter, limits
):
    generated = run(models, DRAFTERS[drafter](models), requests, limits)
    assert generated.token_ids == expected
    assert not any(has_word(output, words[id_]) for id_, output in generated.token_ids.items())
    assert (generated.num_draft_tokens == 0) == (drafter == "none")
    assert (generated.num_preempted_waits > 0) == (limits is TIGHT)


def test_a_drafter_that_tempts_at_every_node_changes_nothing(models, requests, words, expected):
    by_prompt = {request.prompt_token_ids: request.request_id for request in requests}
    tempting = Tempting(
        {prompt: expected[id_] for prompt, id_ in by_prompt.items()},
        {prompt: words[id_] for prompt, id_ in by_prompt.items()},
    )
    generated = run(models, tempting, requests, ROOMY, max_tree_nodes=16)
    assert generated.token_ids == expected
    assert generated.num_accepted_tokens > 30
    assert tempting.num_tempted > 30


@pytest.mark.parametrize("num_published", [1, 9])
def test_a_word_that_another_verifier_began_is_not_ended_here(models, requests, expected, num_published):
    published = [
        replace(request, output_token_ids=tuple(expected[request.request_id][:num_published])) for request in requests
    ]
    generated = run(models, ModelDrafts(models.draft), published, ROOMY)
    assert generated.token_ids == {id_: output[num_published:] for id_, output in expected.items()}


def test_a_word_is_said_without_it(models, choice, words, expected):
    said = plain_tokens(models.model, request_of(choice, 0, words["0"][:-1]))
    assert has_word(said, words["0"][-1:])
    assert not has_word(said, words["0"][:-1])
    assert expected["0"] != said
