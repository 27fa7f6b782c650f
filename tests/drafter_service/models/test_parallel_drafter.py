from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from exactness.law import p_value
from exactness.small_engines import Drafts, Generated, Limits, generate, load, make_engine, perturbed_copy
from fakes.runner import FakeRunner, next_token
from outrider.drafter_service.engine.drafter import Ask, DraftEngineConfig, SessionKey
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.engine.paged_drafter import PagedDrafter
from outrider.drafter_service.engine.tree_growth import TreeConfig, fixed_shape
from outrider.drafter_service.models.parallel_drafter import parse_mask_token_id
from outrider.drafter_service.service.drafter_spec import DrafterSpec
from outrider.drafter_service.service.drafters import build_drafter
from outrider.drafter_service.service.local_client import LocalDraftClient
from outrider.drafter_service.service.speculative_config import Method, SpeculativeConfig
from outrider.verifier_service.messages.draft import (
    DRAFT_PROB_SCALE,
    ROOT,
    Draft,
    DrafterEvent,
    DraftNeeds,
    DraftSampling,
    VerifierMessage,
    check_draft,
)
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.runner import ModelRunner
from outrider.verifier_service.sampling.coupled_sampler import coupled_choice, gumbel_noise
from outrider.verifier_service.sampling.sparse_rows import quantised_rows
from tiny.drafters import parallel_drafter
from tiny.models import VOCAB_SIZE, full_logits, make_checkpoint, make_model, random_sequences
from tiny.verified import target_probs

MASK_ID = 255
GREEDY = DraftSampling(temperature=0.0)
SAMPLED = DraftSampling(temperature=3.0)
SEEDED = DraftSampling(temperature=3.0, seed=5, choice_index=1)
PROMPTS = random_sequences((9, 23, 5))
NUM_NEW_TOKENS = 20


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("llama")


@pytest.fixture(scope="module")
def runner(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load(model, tmp_path_factory.mktemp("masked"))


def drafter_of(runner: ModelRunner | FakeRunner, *, mask_token_id: int = MASK_ID, seed: int = 0) -> PagedDrafter[Any]:
    return parallel_drafter(runner, torch.Generator().manual_seed(seed), mask_token_id=mask_token_id)


def ask_of(tokens: Sequence[int], length: int, name: str = "r", ask_id: int = 1, **fields: object) -> Ask:
    ask = Ask(key=SessionKey("v", name), ask_id=ask_id, token_ids=list(tokens), sampling=GREEDY, length=length)
    return replace(ask, **fields)  # type: ignore[arg-type]


def run(drafter: PagedDrafter[Any], *asks: Ask, budget: int = 256, max_steps: int = 200) -> list[Draft]:
    """Ask until all is answered, checking the books after every step; return the answers in the order of the asks."""
    waiting, results = list(asks), {}
    for _ in range(max_steps):
        for result in drafter.draft(waiting, max_num_tokens=budget):
            results[result.round_id] = result
        drafter.check_integrity([ask.key for ask in asks])
        waiting = [ask for ask in waiting if ask.ask_id not in results]
        if not waiting:
            return [results[ask.ask_id] for ask in asks]
    raise AssertionError("drafts do not become complete")


def rows_of(model: PreTrainedModel, tokens: Sequence[int], length: int) -> torch.Tensor:
    """Return the reference: one dense forward over the tokens and the masks, [length, vocab_size]."""
    return full_logits(model, [*tokens, *[MASK_ID] * (length - 1)])[len(tokens) - 1 :]


def require_valid(ask: Ask, result: Draft) -> None:
    draft = Draft(
        request_id="r",
        round_id=1,
        position=len(ask.token_ids),
        token_ids=result.token_ids,
        draft_probs=result.draft_probs,
        parents=result.parents,
        confidences=result.confidences,
    )
    assert check_draft(draft, draft_vocab_size=VOCAB_SIZE, max_length=ask.length, max_nodes=ask.max_nodes) is None


# --- what is drafted ---


@pytest.mark.parametrize("budget", [3, 256])
def test_greedy_chains_of_several_sessions_are_those_of_dense_forwards(model, runner, budget: int) -> None:
    asks = [ask_of(prompt, 5 + index, str(index), index) for index, prompt in enumerate(PROMPTS)]
    for ask, result in zip(asks, run(drafter_of(runner), *asks, budget=budget), strict=True):
        rows = rows_of(model, ask.token_ids, ask.length)
        assert list(result.token_ids) == rows.argmax(dim=1).tolist()
        assert (result.draft_probs, result.parents) == (None, None)
        assert result.confidences == pytest.approx(rows.softmax(dim=1).amax(dim=1).tolist(), abs=1e-4)


@pytest.mark.parametrize("num_accepted", [0, 2, 5])
def test_kv_of_masks_does_not_outlive_a_draft(model, runner, num_accepted: int) -> None:
    drafter = drafter_of(runner)
    prompt = list(PROMPTS[0])
    (first,) = run(drafter, ask_of(prompt, 5))
    grown = [*prompt, *first.token_ids[:num_accepted], 7]
    (second,) = run(drafter, ask_of(grown, 4, ask_id=2))
    assert list(second.token_ids) == rows_of(model, grown, 4).argmax(dim=1).tolist()


def test_only_what_is_new_is_computed() -> None:
    runner = FakeRunner()
    drafter = drafter_of(runner, mask_token_id=96)
    run(drafter, ask_of(range(20), 4))
    run(drafter, ask_of([*range(20), 30, 31], 4, ask_id=2))
    run(drafter, ask_of([*range(10), 50], 3, ask_id=3))
    other = [*range(5), 60, 61, 62]
    (result,) = run(drafter, ask_of(other, 1, ask_id=4))
    assert result.token_ids == (next_token(other, 97),)
    assert [batch.num_tokens for batch in runner.batches] == [20 + 3, 3 + 3, 1 + 2, 3]
    assert runner.batches[1].token_ids == [19, 30, 31, 96, 96, 96]
    assert runner.batches[1].positions == list(range(19, 25))
    assert runner.batches[1].logits_indices == [2, 3, 4, 5]


def test_seeded_chains_are_chosen_under_the_noise_of_their_positions(model, runner) -> None:
    prompt = PROMPTS[0]
    (result,) = run(drafter_of(runner), ask_of(prompt, 4, sampling=SEEDED))
    probs = target_probs(rows_of(model, prompt, 4), [SEEDED] * 4)
    noise = gumbel_noise(5, 1, torch.arange(len(prompt), len(prompt) + 4), VOCAB_SIZE, "cpu")
    assert list(result.token_ids) == coupled_choice(probs, noise).tolist()
    assert result.draft_probs is None
    (result,) = run(drafter_of(runner), ask_of(prompt, 4, sampling=SEEDED, forced_ids=(9,)))
    probs = target_probs(full_logits(model, [*prompt, 9, MASK_ID, MASK_ID])[len(prompt) :], [SEEDED] * 3)
    assert list(result.token_ids[1:]) == coupled_choice(probs, noise[1:]).tolist()


def test_sampled_chains_are_drawn_from_the_rows_they_carry(model, runner) -> None:
    sampling = replace(SAMPLED, top_k=5)
    drafter = drafter_of(runner)
    asks = [ask_of(PROMPTS[2], 2, str(i), i, sampling=sampling) for i in range(8)]
    drawn = []
    for turn in range(150):
        again = [replace(ask, ask_id=1000 * (turn + 1) + i) for i, ask in enumerate(asks)]
        results = run(drafter, *again, budget=1024)
        drawn += [result.token_ids for result in results]
    require_valid(again[0], results[0])
    ids, weights = quantised_rows(target_probs(rows_of(model, PROMPTS[2], 2), [sampling] * 2), 5)
    for row, row_ids, row_weights in zip(results[0].draft_probs, ids.tolist(), weights.tolist(), strict=True):
        assert row.token_ids == tuple(row_ids)
        assert row.weights == pytest.approx(tuple(row_weights), abs=4)
    counts = np.zeros((5, 5))
    for first, second in drawn:
        counts[ids[0].tolist().index(first), ids[1].tolist().index(second)] += 1
    expected = np.outer(weights[0] / DRAFT_PROB_SCALE, weights[1] / DRAFT_PROB_SCALE)
    assert p_value(counts, expected) > 1e-3


def test_a_tree_is_the_best_part_of_the_product(model, runner) -> None:
    ask = ask_of(PROMPTS[1], 3, max_nodes=12, sampling=replace(SAMPLED, temperature=8.0))
    (result,) = run(drafter_of(runner), ask)
    require_valid(ask, result)
    probs = target_probs(rows_of(model, PROMPTS[1], 3), [ask.sampling] * 3)
    first, second, third = probs.topk(10, dim=1).values.tolist()  # as many as a node has children
    scores = [*first, *(a * b for a in first for b in second)]
    scores += [a * b * c for a in first for b in second for c in third]
    found: list[float] = []
    for parent, prob in zip(result.parents, result.confidences, strict=True):
        found.append(prob * (1.0 if parent == ROOT else found[parent]))
    assert sorted(found, reverse=True) == pytest.approx(sorted(scores, reverse=True)[:12], rel=1e-3)
    assert result.draft_probs is None
    assert len(set(result.parents)) > 1


def test_a_sampled_tree_has_the_shape_and_the_rows_of_its_depths(model, runner) -> None:
    ask = ask_of(PROMPTS[1], 3, max_nodes=9, sampling=replace(SAMPLED, temperature=8.0), forced_ids=(4,))
    drafter = parallel_drafter(runner, torch.Generator(), mask_token_id=MASK_ID, trees=TreeConfig(method="sampled"))
    (result, _) = run(drafter, ask, ask_of(PROMPTS[0], 3, "other", 2, sampling=SAMPLED, max_nodes=4))
    require_valid(ask, result)
    shape = fixed_shape(2, 8, TreeConfig().branching)
    depths = [0]
    for parent in result.parents[1:]:
        depths.append(depths[parent] + 1)
    assert sorted(depths) == sorted([0] + [1 if place in shape[ROOT] else 2 for place in shape if place != ROOT])
    rows = full_logits(model, [*PROMPTS[1], 4, MASK_ID])[len(PROMPTS[1]) :]
    ids, _ = quantised_rows(target_probs(rows, [ask.sampling] * 2), 32)
    first, *below = result.draft_probs[1:]
    assert set(first.token_ids) == set(ids[0].tolist())
    assert below
    assert all(set(row.token_ids) == set(ids[1].tolist()) for row in below)
    tree = list(zip(result.token_ids, result.parents, depths, strict=True))
    first_born = [next(own[0] for own in tree if own[1] == node) for node in {p for _, p, depth in tree if depth == 2}]
    assert len(set(first_born)) == len(first_born) > 1, "every node draws anew"


@pytest.mark.parametrize("max_nodes", [0, 8])
def test_forced_tokens_stand_before_the_masks(model, runner, max_nodes: int) -> None:
    ask = ask_of(PROMPTS[0], 4, forced_ids=(11, 12), max_nodes=max_nodes)
    (result,) = run(drafter_of(runner), ask)
    assert result.token_ids[:2] == (11, 12)
    rows = full_logits(model, [*PROMPTS[0], 11, 12, MASK_ID])[len(PROMPTS[0]) + 1 :]
    assert result.token_ids[2] == int(rows[0].argmax())
    if not max_nodes:
        assert list(result.token_ids[2:]) == rows.argmax(dim=1).tolist()


def test_forced_tokens_alone_need_no_forward() -> None:
    runner = FakeRunner()
    (result,) = run(drafter_of(runner, mask_token_id=96), ask_of([1, 2], 2, forced_ids=(5, 6, 7)))
    assert result.token_ids == (5, 6)
    assert runner.batches == []
    (result,) = run(drafter_of(runner, mask_token_id=96), ask_of([1, 2], 2, forced_ids=(5, 97)))
    assert result.token_ids == (5, next_token([1, 2, 5], 97)), "what the draft model does not know is not forced on it"


# --- memory ---


def test_a_small_pool_is_shared_and_every_ask_is_answered() -> None:
    runner = FakeRunner(num_blocks=9)  # 36 slots
    drafter = drafter_of(runner, mask_token_id=96)
    prompts = [[(7 * i + n) % 90 for i in range(24)] for n in range(3)]
    asks = [ask_of(prompt, 4, str(n), n) for n, prompt in enumerate(prompts)]
    for result, prompt in zip(run(drafter, *asks, budget=40), prompts, strict=True):
        assert result.token_ids[0] == next_token(prompt, 97)
    too_long = ask_of(range(35), 4, "long", 9)
    (result,) = run(drafter_of(runner, mask_token_id=96), too_long)
    assert result.token_ids == ()


def test_an_older_ask_takes_what_a_younger_one_has_cached() -> None:
    runner = FakeRunner(num_blocks=9)
    drafter = drafter_of(runner, mask_token_id=96)
    young, old = ask_of(range(16), 4, "young", 1), ask_of(range(40, 64), 4, "old", 2)
    run(drafter, young)
    results = run(drafter, old, replace(young, ask_id=3), budget=64)
    expected = [next_token(list(tokens), 97) for tokens in (range(40, 64), range(16))]
    assert [result.token_ids[0] for result in results] == expected


def test_released_sessions_hold_nothing() -> None:
    drafter = drafter_of(FakeRunner(), mask_token_id=96)
    run(drafter, ask_of([1, 2, 3], 3))
    drafter.release(SessionKey("v", "r"))
    drafter.release(SessionKey("v", "unknown"))
    drafter.check_integrity([])


# --- the config ---


def test_the_mask_token_is_found_as_vllm_finds_it() -> None:
    assert parse_mask_token_id({"pard_token": 3}, 10) == 3
    assert parse_mask_token_id({"ptd_token_id": 4, "mask_token_id": None}, 10) == 4
    assert parse_mask_token_id({"pard_token": 3, "mask_token_id": 0}, 10) == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "pard_token: the model's config names no mask token"),
        ({"pard_token": 10}, "pard_token: 10 is no token of a vocabulary of 10"),
        ({"mask_token_id": True}, "mask_token_id: True"),
        ({"mask_token_id": "<mask>"}, "mask_token_id: '<mask>'"),
    ],
)
def test_a_config_without_a_mask_token_is_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_mask_token_id(config, 10)


def test_it_is_built_from_a_configuration(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, vocab_size=97)
    model = ModelConfig(path=str(tmp_path), device="cpu")
    speculative = SpeculativeConfig(method=Method.PARALLEL_DRAFT, num_tree_nodes=6)
    spec = DrafterSpec(model=model, target=model, speculative=speculative)
    assert spec.loads_model
    with pytest.raises(ValueError, match="pard_token: the model's config names no mask token"):
        build_drafter(spec, runner=FakeRunner())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "pard_token": 90}))
    runner = FakeRunner()
    drafter = build_drafter(spec, runner=runner)
    assert drafter.needs == DraftNeeds()
    drafter.draft([ask_of([4, 5], 3)], max_num_tokens=64)
    assert runner.batches[0].token_ids == [4, 5, 90, 90]


# --- through the engine ---


class ParallelDrafts:
    """A parallel drafter in this process."""

    def __init__(self, runner: ModelRunner) -> None:
        config = DraftEngineConfig(max_draft_length=8)
        self.engine = DraftEngine(drafter_of(runner, seed=3), clock=lambda: 0.0, config=config)
        self._client = LocalDraftClient(self.engine)

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        self._client.send(drafter_id, messages)

    def poll(self) -> list[DrafterEvent]:
        return self._client.poll()

    def check_integrity(self) -> None:
        self.engine.check_integrity()


def requests_of(sampling: Callable[[int], SamplingParams], draft_length: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=str(index),
            prompt_token_ids=tuple(prompt),
            sampling=sampling(index),
            plan=SpeculationPlan(draft_length=draft_length),
        )
        for index, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def draft_runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder: Path = tmp_path_factory.mktemp("draft")
    return load(perturbed_copy("llama", 0.05), folder)


def greedy(index: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)


def seeded(index: int) -> SamplingParams:
    return SamplingParams(temperature=3.0, seed=7 + index, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)


@pytest.mark.parametrize("sampling", [greedy, seeded])
def test_tokens_are_those_without_drafts(runner, draft_runner, sampling: Callable[[int], SamplingParams]) -> None:
    expected = generate_with(runner, ParallelDrafts(draft_runner), requests_of(sampling, 0))
    generated = generate_with(runner, ParallelDrafts(draft_runner), requests_of(sampling, 5))
    assert generated.token_ids == expected.token_ids
    assert expected.num_draft_tokens == 0
    assert 0 < generated.num_accepted_tokens < generated.num_draft_tokens


def generate_with(runner: ModelRunner, drafts: Drafts, requests: list[GenerationRequest]) -> Generated:
    return generate(make_engine(runner, drafts, Limits()), drafts, requests)
