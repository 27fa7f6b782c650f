"""Greedy tokens are those of transformers' `generate`, for every architecture, whatever drafts and pool do.

And the comparison can fail: engines that read wrong KV, shift positions or ignore a window give other tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from exactness.small_engines import (
    BLOCK_SIZE,
    Drafts,
    Generated,
    Limits,
    ModelDrafts,
    NoDrafts,
    RandomDrafts,
    generate,
    load,
    make_engine,
    make_lively_model,
    perturbed_copy,
)
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan
from outrider.verifier_service.model.attention import AttentionContext, AttentionOptions
from outrider.verifier_service.model.runner import ModelRunner, forward_packed
from tiny.models import TINY_ARCHITECTURES, random_sequences

NUM_NEW_TOKENS = 20
PROMPTS = random_sequences((5, 33, 14))
PERTURBATION = 0.05  # chosen so that the draft model is often right and often wrong
WINDOWED = {name for name, options in TINY_ARCHITECTURES.items() if "sliding_window" in options}

Execute = Callable[[ModelRunner, ScheduledBatch], torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """One architecture: its target, a perturbed copy as draft model, and what `generate` says."""

    model_type: str
    target: ModelRunner
    draft: ModelRunner
    expected: list[list[int]]  # one per prompt


@pytest.fixture(scope="module", params=sorted(TINY_ARCHITECTURES))
def pair(request, tmp_path_factory) -> Iterator[Pair]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    model = make_lively_model(request.param)
    yield Pair(
        model_type=request.param,
        target=load(model, folder / "target"),
        draft=load(perturbed_copy(request.param, PERTURBATION), folder / "draft"),
        expected=[library_tokens(model, prompt) for prompt in PROMPTS],
    )
    torch.set_num_threads(threads)


def library_tokens(model, prompt: Sequence[int]) -> list[int]:
    token_ids = torch.tensor([prompt])
    output = model.generate(
        token_ids, attention_mask=torch.ones_like(token_ids), do_sample=False, max_new_tokens=NUM_NEW_TOKENS
    )
    return output[0, len(prompt) :].tolist()


def requests_of(prompts: Sequence[Sequence[int]], *, draft_length: int = 4) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=str(index),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS),
            plan=SpeculationPlan(draft_length=draft_length),
        )
        for index, prompt in enumerate(prompts)
    ]


def run(pair: Pair, drafts: Drafts, limits: Limits | None = None) -> Generated:
    engine = make_engine(pair.target, drafts, limits or Limits())
    generated = generate(engine, drafts, requests_of(PROMPTS))
    assert [generated.token_ids[str(index)] for index in range(len(PROMPTS))] == pair.expected
    return generated


def test_there_is_something_to_get_wrong(pair):
    assert sum(len(tokens) for tokens in pair.expected) > NUM_NEW_TOKENS
    assert len({token_id for tokens in pair.expected for token_id in tokens}) > NUM_NEW_TOKENS / 2


def test_without_drafts(pair):
    assert run(pair, NoDrafts()).num_draft_tokens == 0


def test_with_a_draft_model_that_is_often_wrong(pair):
    generated = run(pair, ModelDrafts(pair.draft))
    assert 0.02 < generated.num_accepted_tokens / generated.num_draft_tokens < 0.98


def test_with_chunked_prefill_and_random_drafts(pair):
    generated = run(pair, RandomDrafts(pair.target.vocab_size), Limits(max_num_batched_tokens=7))
    assert generated.num_draft_tokens > 0


def test_with_preemption(pair):
    num_blocks = -(-(max(map(len, PROMPTS)) + NUM_NEW_TOKENS) // BLOCK_SIZE) + 1  # the longest request, hardly more
    limits = Limits(num_blocks=num_blocks, max_num_batched_tokens=24)
    generated = run(pair, ModelDrafts(pair.draft), limits)
    assert generated.num_preempted_waits > 0
    assert generated.num_draft_tokens > 0


def test_with_prefix_cache_hits(pair):
    """The same prompts again, and one that shares only its beginning, on an engine that has seen them."""
    drafts = ModelDrafts(pair.draft)
    engine = make_engine(pair.target, drafts, Limits())
    assert generate(engine, drafts, requests_of(PROMPTS)).num_cached_tokens == 0
    again = generate(engine, drafts, requests_of(PROMPTS))
    assert [again.token_ids[str(index)] for index in range(len(PROMPTS))] == pair.expected
    assert again.num_cached_tokens == sum((len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in PROMPTS)
    longer = [*PROMPTS[1], *pair.expected[1][:3]]
    shared = generate(engine, drafts, requests_of([longer]))
    assert shared.num_cached_tokens >= len(PROMPTS[1]) // BLOCK_SIZE * BLOCK_SIZE
    assert shared.token_ids["0"][: NUM_NEW_TOKENS - 3] == pair.expected[1][3:]


# --- mistakes must show ---


class AlteredRunner:
    """A runner that makes a mistake in every forward."""

    def __init__(self, runner: ModelRunner, execute: Execute) -> None:
        self._runner, self._execute = runner, execute
        self.vocab_size, self.max_model_len = runner.vocab_size, runner.max_model_len
        self.num_blocks, self.block_size = runner.num_blocks, runner.block_size
        self.eos_token_ids, self.states = runner.eos_token_ids, runner.states

    def execute(self, batch: ScheduledBatch, chosen: torch.Tensor | None = None) -> torch.Tensor:
        assert chosen is None
        return self._execute(self._runner, batch)


def unchanged(runner: ModelRunner, batch: ScheduledBatch) -> torch.Tensor:
    return runner.execute(batch)


def reading_other_blocks(runner: ModelRunner, batch: ScheduledBatch) -> torch.Tensor:
    """Find earlier steps' keys and values in the wrong blocks; this step's own are right."""
    tables = []
    for table, context, length in zip(batch.block_tables, batch.context_lengths, batch.query_lengths, strict=True):
        num_old = (context - length) // BLOCK_SIZE
        tables.append([*((block + 1) % runner.num_blocks for block in table[:num_old]), *table[num_old:]])
    return runner.execute(dataclasses.replace(batch, block_tables=tables))


def shifting_positions(runner: ModelRunner, batch: ScheduledBatch) -> torch.Tensor:
    """Shift positions from 8 on: a shift of all of them is no mistake under rotary embeddings."""
    return runner.execute(dataclasses.replace(batch, positions=[p + 3 if p >= 8 else p for p in batch.positions]))


class WindowIgnored:
    def __init__(self, context: AttentionContext) -> None:
        self._context = context

    def attend(self, layer_index: int, query, key, value, options: AttentionOptions) -> torch.Tensor:
        options = dataclasses.replace(options, sliding_window=None)
        return self._context.attend(layer_index, query, key, value, options)


def ignoring_windows(runner: ModelRunner, batch: ScheduledBatch) -> torch.Tensor:
    with torch.inference_mode():
        return forward_packed(runner.model, batch, WindowIgnored(AttentionContext.of(batch, runner.pool)))[0]


def is_right(pair: Pair, execute: Execute) -> bool:
    runner, drafts = AlteredRunner(pair.target, execute), NoDrafts()
    generated = generate(make_engine(runner, drafts, Limits()), drafts, requests_of(PROMPTS))
    return [generated.token_ids[str(index)] for index in range(len(PROMPTS))] == pair.expected


def test_mistakes_change_tokens(pair):
    assert is_right(pair, unchanged)
    assert not is_right(pair, reading_other_blocks)
    assert not is_right(pair, shifting_positions)
    assert is_right(pair, ignoring_windows) != (pair.model_type in WINDOWED)
