"""Self-speculation on a tiny model: its drafts are the shortened model's own, and it leaves no trace in the KV."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel

from fakes.drafter_play import ask_of, check_form, paths_of
from outrider.drafter_service.engine.drafter import Ask, DraftEngineConfig, Drafter, SessionKey
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.service.local_client import LocalDraftClient
from outrider.drafter_service.target.early_exit_drafter import early_exit_drafter
from outrider.drafter_service.target.self_drafter import SelfDrafter
from outrider.drafter_service.target.sparse_drafter import choose_blocks, sparse_drafter
from outrider.drafter_service.target.target_view import TargetView
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.engine.factory import build_engine
from outrider.verifier_service.engine.verifier_spec import VerifierSpec
from outrider.verifier_service.messages.draft import Draft, DraftNeeds
from outrider.verifier_service.messages.request import (
    GenerationRequest,
    Request,
    RequestOutput,
    SamplingParams,
    SpeculationPlan,
)
from outrider.verifier_service.model.runner import ParallelRunner
from tiny.drafting.methods import tiny_target
from tiny.drafting.self_drafting import BLOCK_SIZE, EXIT_LAYER, GREEDY_PARAMS, NUM_BLOCKS, NUM_NODES, TinyTarget
from tiny.models import full_logits, random_sequences

LENGTH = 4

MakeDrafter = Callable[[TargetView], Drafter]


def early(view: TargetView, *, exit_layer: int = EXIT_LAYER, **options: object) -> SelfDrafter:
    return early_exit_drafter(view, torch.Generator().manual_seed(0), exit_layer=exit_layer, **options)


def sparse(view: TargetView, *, num_blocks: int = 99) -> SelfDrafter:
    return sparse_drafter(view, torch.Generator().manual_seed(0), num_blocks=num_blocks)


@pytest.fixture(scope="module")
def target() -> TinyTarget:
    return tiny_target()


@dataclass
class Watched:
    """A drafter that holds every call against what it may do, and keeps its answers."""

    inner: Drafter
    runner: ParallelRunner
    results: list[tuple[list[int], Ask, Draft]] = field(default_factory=list)
    engine: VerifierEngine | None = None
    num_moved: int = 0

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.inner.max_model_len

    @property
    def needs(self) -> DraftNeeds:
        return self.inner.needs

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[Draft]:
        before = self._own_kv()
        for source, target in self.engine.scheduler.moves if self.engine else ():
            self.num_moved += 1
            for cache, kept in before:
                kept[target] = cache[source]
        results = self.inner.draft(asks, max_num_tokens=max_num_tokens)
        assert results, "no progress"
        if self.engine is not None and not self.engine.scheduler.moves:
            assert all(torch.equal(cache[: len(kept)], kept) for cache, kept in before), "written outside of scratch"
        by_id = {ask.ask_id: ask for ask in asks}
        self.results += [(list(by_id[result.round_id].token_ids), by_id[result.round_id], result) for result in results]
        return results

    def _own_kv(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pool, num_slots = self.runner.pool, NUM_BLOCKS * BLOCK_SIZE
        caches = [*pool.keys.values(), *pool.values.values()]
        return [(cache, cache[:num_slots].clone()) for cache in caches]

    def release(self, key: SessionKey) -> None:
        self.inner.release(key)

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        self.inner.check_integrity(keys)


def build(target: TinyTarget, make: MakeDrafter, *, max_tree_nodes: int = 0) -> tuple[VerifierEngine, Watched]:
    runner = target.runner
    view = TargetView(runner)
    watched = Watched(make(view), runner)
    config = DraftEngineConfig(max_draft_length=LENGTH, max_tree_nodes=max_tree_nodes)
    drafts = LocalDraftClient(DraftEngine(watched, clock=lambda: 0.0, config=config))
    engine = build_engine(
        runner, VerifierSpec(model=target.config, max_tree_nodes=max_tree_nodes, sampling_seed=0), drafts
    )
    view.attach(engine)
    watched.engine = engine
    return engine, watched


def run(
    engine: VerifierEngine, sampling: SamplingParams = GREEDY_PARAMS, *, lengths: tuple[int, ...] = (5, 8, 13)
) -> tuple[dict[str, list[int]], dict[str, RequestOutput]]:
    """Return each request's tokens and last output."""
    for index, prompt in enumerate(random_sequences(lengths)):
        request = GenerationRequest(
            request_id=str(index),
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            plan=SpeculationPlan(draft_length=LENGTH),
        )
        assert engine.add(request) is None
    tokens: dict[str, list[int]] = {}
    last: dict[str, RequestOutput] = {}
    for _ in range(200):
        if not engine.has_work():
            return tokens, last
        for output in engine.step() or []:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            last[output.request_id] = output
        engine.check_integrity()
    raise AssertionError("requests do not finish")


def library_greedy(model: PreTrainedModel, token_ids: Sequence[int], length: int) -> list[int]:
    tokens = list(token_ids)
    for _ in range(length):
        tokens.append(int(full_logits(model, tokens)[-1].argmax()))
    return tokens[len(token_ids) :]


def test_early_drafts_are_the_shortened_models_and_the_tokens_the_whole_ones(target: TinyTarget):
    engine, watched = build(target, early)
    tokens, last = run(engine)
    for index, prompt in enumerate(random_sequences((5, 8, 13))):
        assert tokens[str(index)] == library_greedy(target.model, prompt, 14)
    assert len(watched.results) > 6
    for context, ask, result in watched.results:
        check_form(replace(ask, token_ids=context), result)
        assert list(result.token_ids) == library_greedy(target.shortened, context, ask.length)
    num_accepted = sum(output.speculation.num_accepted_tokens for output in last.values())
    assert 0 < num_accepted < sum(output.speculation.num_draft_tokens for output in last.values())


def test_early_trees_hold_the_shortened_models_likeliest_tokens(target: TinyTarget):
    """After accepted paths too, whose KV the drafter's batch moves before it reads it."""
    engine, watched = build(target, early, max_tree_nodes=NUM_NODES)
    tokens, _ = run(engine)
    for index, prompt in enumerate(random_sequences((5, 8, 13))):
        assert tokens[str(index)] == library_greedy(target.model, prompt, 14)
    assert watched.num_moved > 0
    num_trees = 0
    for context, ask, result in watched.results:
        check_form(replace(ask, token_ids=context), result)
        num_trees += len(set(result.parents or ())) < len(result.token_ids)
        for path, confidence in zip(paths_of(result), result.confidences, strict=True):
            probs = full_logits(target.shortened, [*context, *path[:-1]])[-1].softmax(0)
            assert path[-1] in probs.topk(4).indices.tolist()
            assert confidence == pytest.approx(probs[path[-1]].item(), abs=1e-4)
    assert num_trees > 3


@pytest.mark.parametrize("sampling", [GREEDY_PARAMS, SamplingParams(temperature=1, seed=3, max_tokens=14)])
def test_attention_to_all_blocks_drafts_what_the_target_says(target: TinyTarget, sampling):
    engine, _ = build(target, sparse)
    _, last = run(engine, sampling)
    metrics = [output.speculation for output in last.values()]
    assert all(each.num_accepted_tokens == each.num_draft_tokens > 4 for each in metrics)


def ask_for(engine: VerifierEngine, name: str, **fields: object) -> Ask:
    fields = {"length": LENGTH, **fields}
    return ask_of(list(engine.requests[name].token_ids), key=SessionKey("local", name), **fields)


@pytest.mark.parametrize(("length", "num_at_once"), [(LENGTH, 4), (NUM_NODES, 2)])
def test_as_many_are_drafted_together_as_there_is_scratch_for(target: TinyTarget, length, num_at_once):
    engine, drafter = target.started(early)
    asks = [ask_for(engine, str(index), length=length) for index in range(5)]
    first = drafter.draft(asks, max_num_tokens=1)
    assert [result.request_id for result in first] == [str(index) for index in range(num_at_once)]
    second = drafter.draft(asks[num_at_once:], max_num_tokens=1)
    second += drafter.draft(asks[num_at_once + len(second) :], max_num_tokens=1) if num_at_once == 2 else []
    alone = [drafter.draft([ask], max_num_tokens=1)[0].token_ids for ask in asks]
    assert [result.token_ids for result in (*first, *second)] == alone
    assert all(len(token_ids) == length for token_ids in alone)


def test_a_chain_computes_every_token_once(target: TinyTarget):
    """The partly filled block is copied, not computed; so is nothing that an earlier level has."""
    engine, drafter = target.started(early)
    sizes: list[int] = []
    execute = engine._runner.execute

    def counting(batch):
        sizes.append(batch.num_tokens)
        assert min(batch.slot_mapping) >= NUM_BLOCKS * BLOCK_SIZE
        return execute(batch)

    target.runner.execute = counting
    drafter.draft([ask_for(engine, "0")], max_num_tokens=1)
    del target.runner.execute
    assert sizes == [1] * LENGTH


def test_requests_without_kv_are_answered_by_empty_drafts_and_take_no_scratch(target: TinyTarget):
    engine, drafter = target.started(early)
    gone = ask_of([1, 2, 3], key=SessionKey("local", "gone"), length=LENGTH)
    asks = [gone, *(ask_for(engine, str(index)) for index in range(3))]
    engine.requests["0"].num_computed_tokens = 0  # preempted
    results = {result.request_id: result for result in drafter.draft(asks, max_num_tokens=1)}
    engine.requests["0"].num_computed_tokens = 9
    assert {name: len(result.token_ids) for name, result in results.items()} == {"gone": 0, "0": 0, "1": 4, "2": 4}


@pytest.mark.parametrize("exit_layer", [0, 4, 9])
def test_an_exit_that_the_target_does_not_have_is_refused(target: TinyTarget, exit_layer: int):
    with pytest.raises(ValueError, match=r"exit_layer must be in \[1, 3\]"):
        early(TargetView(target.runner), exit_layer=exit_layer)
    assert early_exit_drafter(TargetView(target.runner), torch.Generator())._num_layers == 1, (
        "a third, where nothing is said"
    )


class ScoredView:
    """A view whose blocks are as like as the test says."""

    block_size = BLOCK_SIZE

    def __init__(self, likeness: dict[int, float]) -> None:
        self.likeness = likeness
        self.slots: list[int] = []

    def block_similarity(self, block_ids: Sequence[int], slot: int) -> torch.Tensor:
        self.slots.append(slot)
        return torch.tensor([self.likeness[block_id] for block_id in block_ids])


def test_the_first_the_latest_and_the_likest_blocks_are_read_in_order():
    request = GenerationRequest(request_id="r", prompt_token_ids=tuple(range(30)), sampling=GREEDY_PARAMS)
    kept = Request.of(request, 0.0)
    kept.block_table = [9, 8, 7, 6, 5, 4, 3, 2]
    kept.num_computed_tokens = 29  # the eighth block is not full
    view = ScoredView({8: 0.1, 7: 0.9, 6: 0.8, 5: 0.2, 4: 0.3})
    assert choose_blocks(view, kept, 4) == [9, 7, 4, 3]
    assert choose_blocks(view, kept, 5) == [9, 7, 6, 4, 3]
    assert choose_blocks(view, kept, 2) == [9, 3]
    assert choose_blocks(view, kept, 7) == [9, 8, 7, 6, 5, 4, 3]
    assert set(view.slots) == {2 * BLOCK_SIZE}, "the latest computed token's key is compared"


@pytest.mark.parametrize("stored", [torch.float32, torch.float8_e4m3fn])
def test_blocks_are_as_like_as_their_mean_key_in_a_middle_layer(stored):
    """The latest key may still lie where its tree node was."""
    keys = {layer: torch.zeros(4 * BLOCK_SIZE, 1, 2) for layer in (0, 3, 5)}
    keys[3][0:BLOCK_SIZE, 0] = torch.tensor([1.0, 0.0])
    keys[3][BLOCK_SIZE : BLOCK_SIZE + 2, 0] = torch.tensor([0.0, 8.0])
    keys[3][12, 0], keys[3][13, 0] = torch.tensor([2.0, 1.0]), torch.tensor([0.0, 1.0])
    keys = {layer: own.to(stored) for layer, own in keys.items()}
    pool = SimpleNamespace(keys=keys, num_blocks=4, block_size=BLOCK_SIZE)
    view = TargetView(
        SimpleNamespace(pool=pool, vocab_size=1, max_model_len=1, block_size=4, scratch_blocks=(), num_layers=3)
    )
    moves: list[tuple[int, int]] = []
    view.attach(SimpleNamespace(scheduler=SimpleNamespace(moves=moves)))
    assert view.block_similarity([0, 1, 2], 12).tolist() == [2.0, 4.0, 0.0]
    assert view.block_similarity([1], 13).tolist() == [4.0]
    moves.append((13, 12))
    assert view.block_similarity([0, 1], 12).tolist() == [0.0, 4.0]
