"""TiDAR on small models that nobody taught: tokens are the model's own, drafts what its masks say in the library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from exactness.drafter_runs import ALPHA, LAW_PROMPT, law_requests
from outrider.cluster.offline.engine import NoDrafters
from outrider.drafter_service.engine.drafter import DraftEngineConfig
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.engine.tree_growth import DraftRules
from outrider.drafter_service.service.local_client import LocalDraftClient
from outrider.drafter_service.target.target_view import TargetView
from outrider.drafter_service.target.tidar_drafter import BLOCK_KEY, TidarDrafter, parse_blocks
from outrider.verifier_service.engine import factory
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.engine.factory import build_engine
from outrider.verifier_service.engine.pipelined import PipelinedEngine
from outrider.verifier_service.engine.verifier_spec import VerifierSpec
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.draft import DraftClient
from outrider.verifier_service.messages.request import (
    GenerationRequest,
    SamplingParams,
    SpeculationPlan,
    TokenLogprobs,
)
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.runner import ModelRunner, ParallelRunner
from outrider.verifier_service.model.step_graphs import GraphBackend
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from outrider.verifier_service.pricing.draft_pricing import DraftPricing
from outrider.verifier_service.scheduling.masks import MaskBlocks, PlacedMasks
from tiny.markov_target import count_transitions, make_target, transition_p_value
from tiny.models import full_logits, make_checkpoint, random_sequences, without_kernels
from tiny.played_graphs import played_backend

MASK, LENGTH = 3, 3
BLOCKS = MaskBlocks(token_id=MASK, length=LENGTH)
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=1.0, seed=7)
NUM_LAW_REQUESTS = 60

Change = Callable[[ScheduledBatch], ScheduledBatch]


@dataclass
class Target:
    runner: ParallelRunner
    spec: VerifierSpec
    model: PreTrainedModel
    batches: list[ScheduledBatch] = field(default_factory=list)

    @classmethod
    def of(cls, folder: Path, model: PreTrainedModel, backend: GraphBackend | None = None, **options: int) -> Target:
        config = ModelConfig(path=str(folder), device="cpu", block_size=4, check_logits=False, **options)
        runner = ParallelRunner(ModelRunner(config, TensorParallelGroup.single(), backend))
        return cls(runner, VerifierSpec(model=config, sampling_seed=0, max_num_seqs=512), model)

    def engine(self, blocks: MaskBlocks | None, change: Change = lambda batch: batch) -> VerifierEngine:
        """An engine whose drafts come from masks (None: from nobody); what it runs goes through `change`."""
        view = TargetView(self.runner)
        rules = DraftRules(rng=torch.Generator().manual_seed(1), vocab_size=self.runner.vocab_size)
        client: DraftClient = NoDrafters()
        if blocks is not None:
            config = DraftEngineConfig(max_draft_length=LENGTH)
            client = LocalDraftClient(DraftEngine(TidarDrafter(view, rules, blocks), clock=lambda: 0.0, config=config))
        engine = build_engine(self.runner, self.spec, client, has_grammars=False)
        view.attach(engine)
        self.batches.clear()
        execute = type(self.runner).execute

        def noted(batch: ScheduledBatch, chosen: torch.Tensor | None = None) -> torch.Tensor:
            self.batches.append(batch)
            return execute(self.runner, change(batch), chosen)

        self.runner.execute = noted
        return engine


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    return Target.of(folder, make_checkpoint(folder), num_kv_blocks=96)


@dataclass
class Ran:
    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)  # of the prompt, then of the tokens
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps: int = 0
    drafts: list[tuple[list[int], tuple[int, ...]]] = field(default_factory=list)  # committed tokens, draft


def run(engine: VerifierEngine, requests: Sequence[GenerationRequest]) -> Ran:
    ran = Ran()
    for request in requests:
        assert engine.add(request) is None
    while engine.has_work():
        for output in engine.step() or []:
            ran.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            ran.logprobs.setdefault(output.request_id, []).extend(
                each for each in (*(output.prompt_logprobs or ()), *(output.logprobs or ())) if each is not None
            )
            ran.num_drafted += output.num_draft_tokens
            ran.num_accepted += output.num_accepted_tokens
        ran.num_steps += 1
        engine.check_integrity()
        engine.drafting.receive(engine.requests, 0.0)
        drafts = [(list(r.token_ids), r.draft.token_ids) for r in engine.requests.values() if r.draft is not None]
        ran.drafts += drafts
    return ran


def requests_of(sampling: SamplingParams = GREEDY, length: int = LENGTH) -> list[GenerationRequest]:
    plan = SpeculationPlan(draft_length=length)
    return [
        GenerationRequest(request_id=str(index), prompt_token_ids=tuple(prompt), sampling=sampling, plan=plan)
        for index, prompt in enumerate(random_sequences((5, 8, 13)))
    ]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("num_blocks", [0, 1, 2])
def test_tokens_are_those_of_plain_decoding(target: Target, sampling: SamplingParams, num_blocks: int):
    plain = run(target.engine(None), requests_of(sampling))
    assert plain.num_drafted == 0
    assert not any(batch.tree_parents for batch in target.batches)
    ran = run(target.engine(replace(BLOCKS, num_blocks=num_blocks)), requests_of(sampling))
    assert ran.tokens == plain.tokens
    assert ran.num_drafted > 0


def test_a_draft_is_what_the_masks_behind_the_accepted_tokens_say_in_the_library(target: Target):
    """From the first token on: the prompt's last step has masks, too."""
    ran = run(target.engine(BLOCKS), requests_of())
    assert len(ran.drafts) >= ran.num_steps
    for tokens, draft in ran.drafts:
        expected = block_logits(target.model, tokens[:-1]).argmax(dim=-1).tolist()
        assert list(draft) == expected[: len(draft)]
        assert draft
    first = min(ran.drafts, key=lambda draft: len(draft[0]))
    assert len(first[0]) == 6, "a prompt of five and the first token"


def block_logits(model: PreTrainedModel, before: Sequence[int]) -> torch.Tensor:
    """The library's rows of a block of masks that see each other and all before them: [LENGTH, vocab_size]."""
    size = len(before) + LENGTH
    seen = torch.ones(size, size).tril().bool()
    seen[-LENGTH:, -LENGTH:] = True
    bias = torch.zeros(1, 1, size, size).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        return model(input_ids=torch.tensor([[*before, *[MASK] * LENGTH]]), attention_mask=bias).logits[0, -LENGTH:]


@without_kernels()
def test_masks_are_captured_like_any_tree(target: Target):
    plain = run(target.engine(None), requests_of())
    folder = Path(target.spec.model.path)
    captured = Target.of(folder, target.model, played_backend(), num_kv_blocks=96)
    ran = run(captured.engine(BLOCKS), requests_of())
    assert ran.tokens == plain.tokens
    assert ran.num_drafted > 0
    counts = captured.runner.graph_counts
    assert (counts.num_replayed, counts.eager) == (len(captured.batches), {})


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_pipelined_engine_reads_masks_before_it_goes_on(
    target: Target, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
):
    plain = run(target.engine(None), requests_of(sampling))
    monkeypatch.setattr(factory, "resolve_device", lambda name: torch.device("cuda"))
    engine = target.engine(BLOCKS)
    assert isinstance(engine, PipelinedEngine)
    ran = run(engine, requests_of(sampling))
    assert ran.tokens == plain.tokens
    assert ran.num_drafted > 0


def test_requests_that_are_preempted_go_on_with_the_same_tokens(target: Target):
    plain = run(target.engine(None), requests_of())
    small = Target.of(Path(target.spec.model.path), target.model, num_kv_blocks=12)
    engine = small.engine(BLOCKS)
    ran = run(engine, requests_of())
    assert engine.scheduler.num_preemptions > 0
    assert ran.tokens == plain.tokens
    assert ran.num_drafted > 0


def test_logprobs_are_of_the_sampled_rows(target: Target):
    sampling = replace(GREEDY, logprobs=2, prompt_logprobs=1)
    plain, ran = (run(target.engine(blocks), requests_of(sampling)) for blocks in (None, BLOCKS))
    assert ran.num_drafted > 0
    assert ran.logprobs.keys() == plain.logprobs.keys()
    for name, found in plain.logprobs.items():
        assert [each.token_id for each in ran.logprobs[name]] == [each.token_id for each in found]
        assert [each.logprob for each in ran.logprobs[name]] == pytest.approx([e.logprob for e in found], abs=1e-4)


def test_one_block_is_there_for_what_comes_most_often_and_misses_have_no_draft(target: Target):
    ran = run(target.engine(replace(BLOCKS, num_blocks=1)), requests_of())
    assert any(batch.token_ids.count(MASK) >= LENGTH for batch in target.batches)
    assert len(ran.drafts) < sum(len(tokens) - 1 for tokens in ran.tokens.values())
    assert all(len(parents) <= 2 * LENGTH for batch in target.batches for parents in batch.tree_parents)


def test_every_row_of_a_step_is_a_row_of_its_shape(target: Target, monkeypatch: pytest.MonkeyPatch):
    shapes: list[int] = []
    monkeypatch.setattr(DraftPricing, "end_step", lambda pricing, step: shapes.append(step.shape.num_tokens))
    run(target.engine(BLOCKS), requests_of())
    assert shapes == [batch.num_tokens for batch in target.batches]
    assert max(shapes) >= 3 * (1 + LENGTH + (LENGTH + 1) * LENGTH)


@pytest.mark.parametrize(
    "change", [{"sampling": replace(GREEDY, num_speculative_tokens=0)}, {"length": 0}], ids=["opted out", "plan"]
)
def test_requests_without_drafts_have_no_masks(target: Target, change: dict[str, object]):
    plain = run(target.engine(None), requests_of())
    ran = run(target.engine(BLOCKS), requests_of(**change))
    assert ran.tokens == plain.tokens
    assert not any(batch.tree_parents for batch in target.batches)


def leaking(batch: ScheduledBatch) -> ScheduledBatch:
    """Mistake: draft tokens see the masks behind them."""
    ends = [
        [len(own) if end <= index + 1 else end for index, end in enumerate(own)] if own else []
        for own in batch.tree_ends
    ]
    return replace(batch, tree_ends=ends)


def left_behind(batch: ScheduledBatch) -> ScheduledBatch:
    """Mistake: the KV of a mask stays where that of the token in its place belongs, which goes to a free block."""
    slots, start = list(batch.slot_mapping), 0
    for length, tree in zip(batch.query_lengths, batch.tree_parents or [[]] * len(batch.query_lengths), strict=True):
        if length == len(tree) + 1:  # no prompt: the last committed token is where a mask stood before
            slots[start] = 4 * 96 - 1
        start += length
    return replace(batch, slot_mapping=slots)


@pytest.mark.parametrize("defect", [leaking, left_behind])
def test_masks_that_tokens_see_change_tokens(target: Target, defect: Change):
    plain = run(target.engine(None), requests_of())
    assert run(target.engine(BLOCKS, defect), requests_of()).tokens != plain.tokens


def test_a_block_of_another_count_changes_drafts_and_no_token(target: Target, monkeypatch: pytest.MonkeyPatch):
    plain = run(target.engine(None), requests_of())
    right = run(target.engine(BLOCKS), requests_of())
    rows_of = PlacedMasks.rows_of
    monkeypatch.setattr(PlacedMasks, "rows_of", lambda masks, count: rows_of(masks, masks.counts[-1 - count]))
    wrong = run(target.engine(BLOCKS), requests_of())
    assert wrong.tokens == plain.tokens
    assert wrong.drafts != right.drafts


def test_nothing_of_the_masks_is_found_in_the_prefix_cache(target: Target):
    """A request that goes on from cached blocks, where masks stood behind the first one's tokens."""
    engine = target.engine(BLOCKS)
    first = run(engine, requests_of())
    again = [
        replace(request, request_id=f"again {index}", prompt_token_ids=(*request.prompt_token_ids, *tokens[:9]))
        for index, (request, tokens) in enumerate(zip(requests_of(), first.tokens.values(), strict=True))
    ]
    ran = run(engine, again)
    assert engine.scheduler.num_prefix_hit_tokens > 0
    for request, tokens in zip(again, ran.tokens.values(), strict=True):
        context = list(request.prompt_token_ids)
        for token_id in tokens[:6]:
            assert token_id == int(full_logits(target.model, context)[-1].argmax())
            context.append(token_id)


@pytest.mark.parametrize("defect", [None, leaking, left_behind], ids=["right", "leaking", "left behind"])
def test_the_law_is_the_models_and_leaks_are_caught(tmp_path: Path, defect: Change | None):
    """At temperature 1, by Pearson's chi-square over 25 laws (`markov_target`), with drafts drawn from masks' rows."""
    markov = make_target(tmp_path / "target")
    target = Target.of(markov.folder, markov.model, num_kv_blocks=4096)
    requests = [each for each in law_requests(num_requests=NUM_LAW_REQUESTS) if each.request_id.startswith("rejection")]
    ran = run(target.engine(BLOCKS, defect or (lambda batch: batch)), requests)
    assert 0 < ran.num_accepted < ran.num_drafted
    p_value = transition_p_value(count_transitions(LAW_PROMPT, ran.tokens.values()), markov.laws)
    assert p_value >= ALPHA if defect is None else p_value < ALPHA


def test_what_a_model_cannot_do_is_refused():
    assert parse_blocks({}, 5, length=7, num_blocks=0) == MaskBlocks(token_id=5, length=7)
    with pytest.raises(ValueError, match="drafts of 8 and their masks take 80 tokens of a step, at most 64"):
        parse_blocks({}, 5, length=8, num_blocks=0)
    assert parse_blocks({}, 5, length=8, num_blocks=1).num_blocks == 1
    with pytest.raises(ValueError, match="num_speculative_tokens: the model guesses 3 tokens ahead, not 4"):
        parse_blocks({BLOCK_KEY: 3}, 5, length=4, num_blocks=0)
