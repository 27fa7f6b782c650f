"""Experts in host memory: the tokens and logits of all experts on the device, whatever the cache holds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from exactness.small_engines import BLOCK_SIZE, NUM_BLOCKS, Hints, Limits, generate, make_engine
from outrider.verifier_service.engine.loop import engine_load
from outrider.verifier_service.engine.step_stats import RecentRates
from outrider.verifier_service.experts.cache import ExpertCache, Pair, ThreadCopier, Wait
from outrider.verifier_service.formats.checkpoint import WeightError
from outrider.verifier_service.messages.counts import FetchCounts
from outrider.verifier_service.messages.engine import FROM_ENGINE, EngineUpdate, UpdateWeights
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan
from outrider.verifier_service.messages.wire import decode, encode
from outrider.verifier_service.model.architectures import UnsupportedModelError
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.decoder import OffloadedExperts
from outrider.verifier_service.model.runner import ModelRunner, ParallelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from outrider.verifier_service.refit.rank_weights import RankWeights
from tiny.mixtures import skewed_mixture
from tiny.models import make_checkpoint, random_sequences, scattered_batches, without_kernels

NUM_EXPERTS, NUM_ACTIVE = 16, 2
HELD = (1, 3, 12, 99)  # fewer than one token takes, than a step takes, than there are; all
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def as_on_a_device() -> Iterator[None]:
    """One thread, and torch's operators: experts lie in host memory for an accelerator, whose products are grouped."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with without_kernels():
        yield
    torch.set_num_threads(threads)


@dataclass(frozen=True, slots=True)
class Served:
    folder: Path
    resident: ModelRunner


@pytest.fixture(scope="module", params=["olmoe", "qwen2_moe"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Three layers of mixtures; four, every second of them dense and with an expert of all tokens."""
    folder = tmp_path_factory.mktemp(request.param)
    sizes = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_ACTIVE}
    if request.param == "olmoe":
        skewed_mixture(skews=(2.0, 0.0, 1.0), **sizes).save_pretrained(folder)
    else:
        make_checkpoint(folder, request.param, num_hidden_layers=4, decoder_sparse_step=2, **sizes)
    return Served(folder, load(folder))


def load(folder: Path, num_cached: int | None = None, **fields: object) -> ModelRunner:
    options = {"num_kv_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "device": "cpu", "check_logits": False, **fields}
    return ModelRunner(
        ModelConfig(path=str(folder), num_cached_experts=num_cached, **options),  # type: ignore[arg-type]
        TensorParallelGroup.single(),
    )


def mixtures_of(runner: ModelRunner) -> list[OffloadedExperts]:
    return [layer.mlp for layer in runner.model.layers if isinstance(layer.mlp, OffloadedExperts)]


def step_logits(runner: ModelRunner) -> list[torch.Tensor]:
    """Return logits of chunks and single tokens of three sequences."""
    sequences = random_sequences((41, 9, 26))
    batches = scattered_batches(sequences, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    return [runner.execute(batch) for batch, _ in batches]


@pytest.mark.parametrize("num_cached", HELD)
def test_logits_are_equal_to_the_bit(served, num_cached):
    offloaded = load(served.folder, num_cached)
    mixtures = mixtures_of(offloaded)
    assert mixtures
    expected, got = step_logits(served.resident), step_logits(offloaded)
    assert all(torch.equal(*pair) for pair in zip(expected, got, strict=True))
    assert all(mixture.cache.gate_up.shape[0] == min(num_cached, NUM_EXPERTS) for mixture in mixtures)
    counts = offloaded.model.fetches
    assert 0 <= counts.num_hits <= counts.num_taken
    assert counts.num_taken >= len(mixtures) * len(expected) * NUM_ACTIVE, "of each layer and step"
    assert served.resident.model.fetches is None
    assert offloaded.model.not_captured == "offloaded_experts"


def test_drafted_tokens_are_equal(served):
    prompts = [tuple(each) for each in random_sequences((7, 12, 9), seed=4)]
    tokens = []
    expected: dict[tuple[int, ...], list[int]] = {}
    for runner in (served.resident, load(served.folder, 4)):
        hints = Hints(expected)
        plan = SpeculationPlan(drafter_id="random", draft_length=4 if expected else 0)
        requests = [
            GenerationRequest(
                request_id=str(index),
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
                plan=plan,
            )
            for index, prompt in enumerate(prompts)
        ]
        generated = generate(make_engine(runner, hints, Limits()), hints, requests)
        tokens.append(generated.token_ids)
        expected |= {prompt: generated.token_ids[str(index)] for index, prompt in enumerate(prompts)}
    assert generated.num_accepted_tokens > 10
    assert tokens[0] == tokens[1]


def wrong_expert(pairs: Sequence[Pair]) -> Sequence[Pair]:
    return [(target, torch.roll(source, 1, 0)) for target, source in pairs]


def down_is_forgotten(pairs: Sequence[Pair]) -> Sequence[Pair]:
    return pairs[:1]


class SpoiltCopier:
    """Copies at once, and with a mistake."""

    def __init__(self, spoil: Callable[[Sequence[Pair]], Sequence[Pair]]) -> None:
        self._spoil = spoil

    def copy(self, pairs: Sequence[Pair]) -> Wait:
        for target, source in self._spoil(pairs):
            target.copy_(source)
        return lambda: None


@pytest.mark.parametrize("spoil", [wrong_expert, down_is_forgotten])
def test_planted_mistakes_are_detected(served, spoil):
    offloaded = load(served.folder, 4)
    for mixture in mixtures_of(offloaded):
        mixture.cache._copier = SpoiltCopier(spoil)
    pairs = zip(step_logits(served.resident), step_logits(offloaded), strict=True)
    assert not all(torch.equal(*pair) for pair in pairs)


class LateCopier:
    """Copies only once somebody waits, in the order of the calls: a reader that does not wait finds old weights."""

    def __init__(self) -> None:
        self._waiting: list[Sequence[Pair]] = []

    def copy(self, pairs: Sequence[Pair]) -> Wait:
        self._waiting.append(pairs)
        return self._catch_up

    def _catch_up(self) -> None:
        for target, source in [pair for pairs in self._waiting for pair in pairs]:
            target.copy_(source)
        self._waiting.clear()


def make_cache(num_slots: int, copier: object) -> tuple[ExpertCache, torch.Tensor]:
    gate_up = torch.arange(8.0)[:, None, None].expand(8, 4, 3).clone()
    down = gate_up[:, :3, :2].clone()
    return ExpertCache(gate_up, down, num_slots, CPU, copier, FetchCounts()), gate_up  # type: ignore[arg-type]


@pytest.mark.parametrize("copier", [LateCopier, ThreadCopier])
@pytest.mark.parametrize("num_slots", [1, 3, 8])
def test_slots_hold_what_they_are_said_to_hold(num_slots, copier):
    """Any order of fetches ahead and of need: a slot has its expert's weights when it has arrived."""
    rng = random.Random(num_slots)
    cache, gate_up = make_cache(num_slots, copier())
    for _ in range(200):
        cache.fetch(rng.sample(range(8), rng.randint(0, num_slots)))
        for experts in cache.rounds(rng.sample(range(8), rng.randint(1, 8))):
            cache.fetch(experts)
            slots = cache.arrived(experts)
            assert [expert for expert in range(8) if slots[expert] < num_slots] == sorted(experts)
            for expert in experts:
                assert torch.equal(cache.gate_up[slots[expert]], gate_up[expert].T)
    counts = cache.counts
    assert counts.num_hits < counts.num_taken if num_slots < 8 else counts.num_fetched == 8


def test_what_was_fetched_ahead_is_a_hit_and_the_oldest_makes_room():
    cache, _ = make_cache(3, LateCopier())
    cache.fetch([0, 1, 2])
    cache.fetch([0])
    cache.fetch([5])  # in place of 1
    assert cache.rounds([0, 2, 5]) == [[0, 2, 5]]
    assert cache.rounds([1, 0]) == [[0, 1]]
    assert (cache.counts.num_taken, cache.counts.num_hits, cache.counts.num_fetched) == (5, 4, 4)


def test_gates_foresee_the_next_layer(served):
    """Fetched ahead, fewer experts are missing than on demand."""
    hits = []
    for is_ahead in (True, False):
        offloaded = load(served.folder, 6)
        if not is_ahead:
            for mixture in mixtures_of(offloaded):
                mixture.following = None
        step_logits(offloaded)
        hits.append(offloaded.model.fetches.num_hits)
    assert hits[0] > hits[1], hits


def test_a_load_report_has_the_counts(served):
    runners = served.resident, load(served.folder, 4)
    reports = []
    for runner in runners:
        engine = make_engine(runner, Hints({}), Limits())
        engine.stats.fetches = ParallelRunner(runner).fetches
        step_logits(runner)
        update = EngineUpdate(load=engine_load(engine, RecentRates(), 0.0))
        reports.append(decode(encode(update), FROM_ENGINE).load.counters.fetches)
    assert reports == [None, runners[1].model.fetches]
    assert reports[1].num_taken > reports[1].num_hits > 0


def test_what_cannot_be_is_refused_by_name(served, tmp_path):
    make_checkpoint(tmp_path, "llama")
    with pytest.raises(UnsupportedModelError, match="num_cached_experts is for mixtures"):
        load(tmp_path, 4)
    with pytest.raises(ValueError, match=r"^num_cached_experts must be a positive integer"):
        load(tmp_path, 0)
    offloaded = load(served.folder, 4)
    with pytest.raises(WeightError, match="num_cached_experts: experts in host memory take no new weights"):
        RankWeights(offloaded).change(UpdateWeights(call_id="u", folder=served.folder))


def test_the_check_of_logits_is_of_a_tiny_model(served):
    """The library's whole model need not fit where its experts do not."""
    assert step_logits(load(served.folder, 4, check_logits=True, check_anew=True))
