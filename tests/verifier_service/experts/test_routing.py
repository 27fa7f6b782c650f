"""What a step reads of a mixture: predicted by committed tokens' routing, and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import mean

import numpy as np
import pytest
import torch

from exactness.small_engines import Hints, Limits, generate, load, make_engine
from outrider.verifier_service.experts import routing
from outrider.verifier_service.experts.routing import POINTS, ExpertRouting
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.engine import StepTime
from outrider.verifier_service.messages.expert_shape import ExpertShape
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan
from outrider.verifier_service.model.runner import ModelRunner
from outrider.verifier_service.pricing.cost_model import CostModel, StepShape, StepTimeModel
from outrider.verifier_service.pricing.draft_pricing import DraftPricing
from tiny.mixtures import skewed_mixture
from tiny.models import random_sequences

SHAPE = ExpertShape(num_experts=16, num_active=2)
COUNTS = range(1, 17)  # tokens in a step
CHUNK, NUM_LEARNT = 16, 640  # tokens
CLOSE, WRONG = 0.25, 0.5  # experts of 16, mean absolute error


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    """One layer with few favourites, one with nearly none."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = skewed_mixture(skews=(6.0, 0.5), num_experts=SHAPE.num_experts, num_experts_per_tok=SHAPE.num_active)
    yield load(model, tmp_path_factory.mktemp("mixture"))
    torch.set_num_threads(threads)


def chunks(num_tokens: int, seed: int) -> Iterator[ScheduledBatch]:
    """Yield steps of one sequence, `CHUNK` tokens each, from new text whenever 160 tokens are full."""
    for sequence in random_sequences((160,) * (num_tokens // 160), seed=seed):
        for start in range(0, 160, CHUNK):
            places = range(start, start + CHUNK)
            yield ScheduledBatch(
                token_ids=[sequence[place] for place in places],
                positions=[*places],
                slot_mapping=[*places],
                query_lengths=[CHUNK],
                context_lengths=[start + CHUNK],
                block_tables=[[*range(-(-(start + CHUNK) // 4))]],
                logits_indices=[CHUNK - 1],
            )


def learnt(runner: ModelRunner, spoil: Callable[[ExpertRouting], None] = lambda routing: None) -> list[float]:
    """Return shares by the routing of committed tokens; `spoil` plants a mistake after each step."""
    routing = runner.model.record_routing()
    assert routing is not None
    for batch in chunks(NUM_LEARNT, seed=1):
        runner.execute(batch)
        spoil(routing)
        routing.count(range(CHUNK), CHUNK)
    return routing.shares().tolist()


@pytest.fixture(scope="module")
def counted(runner: ModelRunner) -> list[float]:
    """The mean number of experts that 1, 2 … 16 further tokens took."""
    routing = runner.model.record_routing()
    assert routing is not None
    taken: dict[int, list[float]] = {count: [] for count in COUNTS}
    for batch in chunks(1600, seed=2):
        runner.execute(batch)
        for count in COUNTS:
            taken[count] += [len(layer[:count].unique()) for layer in routing.chosen]
    return [sum(counts) / len(counts) for counts in taken.values()]


def error(shares: list[float], counted: list[float]) -> float:
    """Return the mean absolute error in experts; the first 17 points are 0 to 16 tokens."""
    assert POINTS[: 1 + len(COUNTS)] == (0, *COUNTS)
    pairs = zip(shares[1 : 1 + len(COUNTS)], counted, strict=True)
    return mean(abs(SHAPE.num_experts * share - taken) for share, taken in pairs)


def test_frequencies_predict_what_a_step_reads(runner, counted):
    uniform = [SHAPE.uniform_share(count) for count in (0, *COUNTS)]
    assert error(learnt(runner), counted) < CLOSE < WRONG < error(uniform, counted)


def first_layer_for_all(routing: ExpertRouting) -> None:
    routing.chosen.copy_(routing.chosen[:1].expand_as(routing.chosen))


def likeliest_alone(routing: ExpertRouting) -> None:
    routing.chosen[..., 1:] = routing.chosen[..., :1]


@pytest.mark.parametrize("spoil", [first_layer_for_all, likeliest_alone])
def test_planted_mistakes_are_detected(runner, counted, spoil):
    assert error(learnt(runner, spoil), counted) > WRONG


def test_routing_is_uniform_before_the_first_count(runner):
    routing = runner.model.record_routing()
    assert routing is not None
    expected = [SHAPE.uniform_share(count) for count in POINTS]
    assert routing.shares().tolist() == pytest.approx(expected, abs=1e-5)


def test_old_tokens_fade(runner):
    routing = runner.model.record_routing()
    assert routing is not None
    for expert in (3, 5):
        routing.chosen.fill_(expert)
        for _ in range(200):
            routing.count(range(CHUNK), CHUNK)
    read = routing.shares()[1].item() * SHAPE.num_experts
    assert 0.95 < read < 1.3  # of a token: expert 5, and what is left of the prior


def test_a_step_beyond_the_record_is_left_out(runner, monkeypatch):
    probs = torch.rand(5, SHAPE.num_experts)
    monkeypatch.setattr(routing, "MAX_TOKENS", 4)
    small = ExpertRouting(1, SHAPE.num_experts, SHAPE.num_active, torch.device("cpu"))
    weights, chosen = small.topk(0, probs)
    assert torch.equal(chosen, probs.topk(SHAPE.num_active).indices)
    assert torch.equal(weights, probs.topk(SHAPE.num_active).values)
    assert small.count([0], 5) is None
    assert not small.chosen.any()


def test_a_record_changes_no_logits(runner):
    for layer in runner.model.layers:
        layer.mlp.topk = lambda probs: torch.topk(probs, SHAPE.num_active, dim=-1)
    batches = [*chunks(160, seed=3)]
    plain = [runner.execute(batch) for batch in batches]
    runner.model.record_routing()
    assert all(torch.equal(runner.execute(batch), logits) for batch, logits in zip(batches, plain, strict=True))


# --- the engine ---

PROMPTS = [tuple(each) for each in random_sequences((7, 12, 9), seed=4)]
SAMPLING = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def requests(length: int) -> list[GenerationRequest]:
    plan = SpeculationPlan(drafter_id="random", draft_length=length)
    return [
        GenerationRequest(request_id=str(index), prompt_token_ids=prompt, sampling=SAMPLING, plan=plan)
        for index, prompt in enumerate(PROMPTS)
    ]


def test_the_engine_counts_committed_tokens_alone(runner):
    """Each output token but the last was computed, and so was the prompt's last; rejected draft tokens are left out."""
    hints = Hints({})
    plain = generate(make_engine(runner, hints, Limits()), hints, requests(0)).token_ids
    hints = Hints({prompt: plain[str(index)] for index, prompt in enumerate(PROMPTS)})
    engine = make_engine(runner, hints, Limits())
    engine.routing = recorded = runner.model.record_routing()
    generated = generate(engine, hints, requests(4))
    assert generated.token_ids == plain
    assert 0 < generated.num_accepted_tokens < generated.num_draft_tokens
    assert recorded is not None
    counts = recorded._counts.clone()
    expected = torch.zeros_like(counts)
    for index, prompt in enumerate(PROMPTS):
        sequence = [*prompt, *plain[str(index)]]
        again = runner.model.record_routing()
        assert again is not None
        runner.execute(whole(sequence))
        taken = again.chosen[:, len(prompt) - 1 : len(sequence) - 1].flatten(1)
        expected.scatter_add_(1, taken, torch.ones_like(taken, dtype=torch.float32))
    assert torch.equal(counts, expected)


def whole(sequence: list[int]) -> ScheduledBatch:
    length = len(sequence)
    return ScheduledBatch(
        token_ids=sequence,
        positions=[*range(length)],
        slot_mapping=[*range(length)],
        query_lengths=[length],
        context_lengths=[length],
        block_tables=[[*range(-(-length // 4))]],
        logits_indices=[length - 1],
    )


def test_all_levels_of_load_learn_what_steps_read():
    """Levels of load that are there already hear of it, and later ones begin with it."""
    pricing = DraftPricing()
    pricing.use_profile([StepTime(num_tokens=n, seconds=0.01) for n in (1, 64)], SHAPE)
    assert pricing._levels is not None
    first, second = pricing._levels.at(1).cost, pricing._levels.at(9).cost
    assert first.experts is not None
    assert second.experts is not None
    first.experts.shares = np.array([0.0, *[0.5] * 64])
    assert second.experts.share(3) == pricing._levels.at(40).cost.experts.share(99) == 0.5


def test_times_of_longer_drafts_are_foretold_closer(runner, counted):
    """Steps take as long as the experts that were counted say; both models have seen short ones and tell of others."""
    profile = StepTimeModel.from_points([StepTime(num_tokens=n, seconds=0.01) for n in (1, 64)])
    by_routing, uniform = (CostModel(profile, SHAPE) for _ in range(2))
    assert by_routing.experts is not None
    by_routing.experts.shares = np.array(learnt(runner))
    times = {count: 0.01 + 0.004 * taken for count, taken in zip(COUNTS, counted, strict=True)}
    errors = []
    for cost in (by_routing, uniform):
        for count in [*range(1, 6)] * 20:
            cost.observe(StepShape(count, 0), times[count])
        errors.append(mean(abs(cost.seconds(StepShape(count, 0)) / times[count] - 1.0) for count in range(8, 17)))
    assert errors[0] < 0.025 < 0.035 < errors[1], errors
