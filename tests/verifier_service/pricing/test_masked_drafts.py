"""The price of drafts by masks: all rows count, what steps with masks take does, and a probe takes two rounds."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from benchmarks.pricing import outcome_of
from fakes.priced_bench import DEAR, FREE, KNEED
from outrider.verifier_service.messages.draft import LOCAL_DRAFTER_ID
from outrider.verifier_service.messages.engine import StepTime
from outrider.verifier_service.messages.request import DisabledReason, Request
from outrider.verifier_service.pricing.cost_model import CostModel, StepShape, StepTimeModel
from outrider.verifier_service.pricing.draft_pricing import DraftPricing
from outrider.verifier_service.pricing.load_levels import LoadLevel, LoadLevels
from outrider.verifier_service.pricing.masked_drafts import TRIAL_STEPS, MaskedDrafts
from outrider.verifier_service.pricing.offer import PricedStep
from outrider.verifier_service.pricing.probes import PROBE_LENGTH, PROBE_ROUNDS
from outrider.verifier_service.scheduling.masks import MaskBlocks, PlacedMasks
from outrider.verifier_service.scheduling.outcome import Outcome, num_mask_rows
from outrider.verifier_service.scheduling.schedule import ScheduledRequest
from support import parts, priced

BLOCKS = MaskBlocks(token_id=9, length=3)
# an embedded model on two cores
TWO_CORES = tuple(
    StepTime(num_tokens=n, seconds=seconds)
    for n, seconds in ((1, 0.0026), (4, 0.0031), (8, 0.0036), (16, 0.0045), (32, 0.0065), (64, 0.0100))
)


def make_request(name: str = "r", **plan: object) -> Request:
    return parts.request(name, [0] * 8, **({"drafter_id": LOCAL_DRAFTER_ID, "draft_length": 3} | plan))


def make_pricing(profile, blocks: MaskBlocks = BLOCKS) -> DraftPricing:
    pricing = DraftPricing(masked=MaskedDrafts(blocks))
    pricing.use_profile(profile)
    return pricing


def all_masks(num_drafted: int) -> PlacedMasks:
    return PlacedMasks(BLOCKS, tuple(range(num_drafted + 1)))


def item_of(request: Request, num_drafted: int, masks: PlacedMasks | None) -> ScheduledRequest:
    draft = parts.draft(request, (0,) * num_drafted) if num_drafted else None
    num_masks = 0 if masks is None else masks.num_tokens
    return ScheduledRequest(
        request=request, num_new_tokens=1 + num_drafted + num_masks, draft=draft, samples=True, masks=masks
    )


@dataclasses.dataclass(slots=True)
class PlayedSteps:
    """Requests that decode together, whose steps take played times."""

    pricing: DraftPricing
    accepted: tuple[float, ...]  # chance of each position where all before it were accepted
    slowdown: float = 0.0  # of steps with masks, beyond the profile
    draft_s: float = 0.0  # waited for a draft
    num_requests: int = 1
    stalls: Mapping[int, float] = dataclasses.field(default_factory=dict)  # seconds besides, by masked step
    elapsed_s: float = 0.0
    num_tokens: int = 0
    num_masked: int = 0  # steps with masks
    asked: list[int] = dataclasses.field(default_factory=list)  # lengths, by step: the longest of its requests
    _guessed: dict[str, int] = dataclasses.field(default_factory=dict)  # tokens that the last step's masks have guessed
    _rng: random.Random = dataclasses.field(default_factory=lambda: random.Random(0))

    def play(self, profile: Sequence[StepTime], num_steps: int) -> None:
        step_s = StepTimeModel.from_points(profile).t
        requests = [make_request(name=str(index)) for index in range(self.num_requests)]
        for _ in range(num_steps):
            lengths = [priced.ask(self.pricing, request, LOCAL_DRAFTER_ID, 3).length for request in requests]
            outcomes = [self._outcome(request, length) for request, length in zip(requests, lengths, strict=True)]
            num_rows = sum(outcome.item.num_new_tokens for outcome in outcomes)
            has_masks = any(outcome.item.masks is not None for outcome in outcomes)
            stall_s = self.stalls.get(self.num_masked, 0.0) * has_masks
            exposed_s = self.draft_s * any(outcome.item.draft is not None for outcome in outcomes)
            own_s = step_s(num_rows) * (1.0 + self.slowdown * has_masks) + stall_s
            shape = StepShape(num_rows, 30 * self.num_requests)
            self.pricing.end_step(PricedStep(outcomes, (), shape, step_s=own_s, exposed_s=exposed_s))
            self.pricing.learn()
            self.num_masked += has_masks
            self.elapsed_s += own_s + exposed_s
            self.num_tokens += sum(1 + len(outcome.path) for outcome in outcomes)
            self.asked.append(max(lengths))

    def _outcome(self, request: Request, length: int) -> Outcome:
        num_drafted = min(length, self._guessed.pop(request.request_id, 0))
        num_accepted = 0
        while num_accepted < num_drafted and self._rng.random() < self.accepted[num_accepted]:
            num_accepted += 1
        masks = None
        if length and self.pricing.masked is not None:
            counts = tuple(range(num_drafted + 1))[: self.pricing.masked.blocks.num_blocks or None]
            masks = PlacedMasks(self.pricing.masked.blocks, counts)
            self._guessed[request.request_id] = BLOCKS.length if num_accepted in counts else 0
        return outcome_of(item_of(request, num_drafted, masks), num_accepted)


def test_a_draft_costs_its_tokens_and_all_blocks_behind_it():
    assert [MaskedDrafts(BLOCKS).num_rows(length) for length in range(4)] == [3, 7, 11, 15]
    one = MaskedDrafts(MaskBlocks(token_id=9, length=3, num_blocks=1))
    assert [one.num_rows(length) for length in range(4)] == [3, 4, 5, 6]


def best_length(masked: MaskedDrafts, level: LoadLevel, survivals: Sequence[float]) -> int:
    (length,) = masked.best_lengths(level, StepShape(1, 0), np.array([survivals]))
    return int(length)


@pytest.mark.parametrize(
    ("profile", "survivals", "length"),
    [
        (FREE, (0.5, 0.2, 0.1), 3),
        (DEAR, (1.0, 1.0, 1.0), 0),  # sixteen times the rows for four tokens
        (KNEED, (0.9, 0.8, 0.7), 3),  # all rows are free up to sixteen
        (KNEED[:1] + KNEED[2:], (0.9, 0.02, 0.01), 1),
    ],
    ids=["free", "dear", "kneed", "sloped"],
)
def test_what_brings_most_per_second_with_its_masks_is_asked_for(profile, survivals, length: int):
    level = LoadLevels(CostModel(StepTimeModel.from_points(profile))).at(1)
    assert best_length(MaskedDrafts(BLOCKS), level, survivals) == length


def test_the_base_of_a_step_has_neither_drafts_nor_masks():
    pricing, request = make_pricing(FREE), make_request()
    for num_drafted in (0, 3, 3):
        asked = priced.ask(pricing, request, LOCAL_DRAFTER_ID, 3)
        assert asked.length == 3
        item = item_of(request, num_drafted, all_masks(num_drafted))
        outcome = outcome_of(item, num_accepted=num_drafted)
        pricing.end_step(PricedStep([outcome], (), StepShape(item.num_new_tokens, 30), step_s=0.02))
        pricing.learn()
        assert pricing._load.base.num_tokens == 1
        assert num_mask_rows(item) == item.num_new_tokens - 1 - num_drafted


def test_a_probe_has_masks_first_and_then_a_draft():
    pricing, request = make_pricing(DEAR), make_request()
    lengths = []
    for _ in range(4 * PROBE_ROUNDS):
        asked = priced.ask(pricing, request, LOCAL_DRAFTER_ID, 3)
        assert (asked.reason is None) == (asked.length > 0)
        assert pricing.drafts_on(request) == (asked.length > 0)
        lengths.append(asked.length)
        num_drafted = asked.length if len(lengths) > 1 and lengths[-2] else 0
        item = item_of(request, num_drafted, all_masks(num_drafted) if asked.length else None)
        shape = StepShape(item.num_new_tokens, 30)
        pricing.end_step(PricedStep([outcome_of(item, num_accepted=0)], (), shape, step_s=0.01 * shape.num_tokens))
    probes = [index for index, length in enumerate(lengths) if length]
    assert probes
    assert {lengths[index] for index in probes} == {PROBE_LENGTH}
    assert probes[1::2] == [index + 1 for index in probes[::2]]
    assert all(late - early >= PROBE_ROUNDS for early, late in zip(probes[1::2], probes[2::2], strict=False))
    assert priced.ask(pricing, request, LOCAL_DRAFTER_ID, 3).reason in (None, DisabledReason.LOAD)


def test_pinned_plans_and_drafters_elsewhere_are_not_decided_by_their_masks():
    pricing = make_pricing(DEAR)
    assert priced.ask(pricing, make_request(is_pinned=True), LOCAL_DRAFTER_ID, 3).length == 3
    assert priced.ask(pricing, make_request(), "in a pool", 3).length > 0, "as new ones are, before there is a price"


@pytest.mark.parametrize(
    ("profile", "steps"),
    [
        (FREE, {"slowdown": 1.0}),
        (FREE, {"draft_s": 0.02}),
        (FREE, {"accepted": (0.2, 0.2, 0.2), "slowdown": 0.25}),
        (TWO_CORES, {"slowdown": 0.5, "draft_s": 0.001}),
        (FREE, {"slowdown": 1.0, "num_requests": 8}),
        (KNEED, {"accepted": (0.8, 0.8, 0.8), "num_requests": 16}),  # one more request's masks would be nearly free
    ],
    ids=["slower", "waited-for", "rejected", "two cores", "batch", "compute-bound"],
)
def test_masks_that_do_not_pay_are_switched_off(profile, steps):
    played = PlayedSteps(make_pricing(profile), **({"accepted": (0.45, 0.4, 0.35)} | steps))
    played.play(profile, 2 * TRIAL_STEPS)
    first = played.num_masked, played.num_tokens, played.elapsed_s
    played.play(profile, 400)
    num_masked, num_tokens = played.num_masked - first[0], played.num_tokens - first[1]
    assert num_masked <= 0.05 * 400, "probes are rare"
    plain_s = StepTimeModel.from_points(profile).t(played.num_requests) * num_tokens / played.num_requests
    assert plain_s >= 0.95 * (played.elapsed_s - first[2])


@pytest.mark.parametrize(
    ("profile", "steps"),
    [
        (FREE, {}),
        (FREE, {"draft_s": 0.002, "num_requests": 8}),
        (FREE, {"slowdown": 0.2}),
        (FREE, {"stalls": {0: 1.0, 1: 0.2, 40: 1.0}}),
        (KNEED, {"slowdown": 0.1}),
        (TWO_CORES, {"accepted": (0.8, 0.8, 0.8)}),
    ],
    ids=["free", "batch", "slower", "first calls", "memory-bound", "two cores"],
)
def test_masks_that_pay_stay_on(profile, steps):
    played = PlayedSteps(make_pricing(profile), **({"accepted": (0.45, 0.4, 0.35)} | steps))
    played.play(profile, 400)
    assert min(played.asked) > 0
    plain_s = StepTimeModel.from_points(profile).t(played.num_requests) * played.num_tokens / played.num_requests
    assert plain_s > 1.2 * (played.elapsed_s - sum(played.stalls.values()))


def test_a_prompts_step_does_not_tell_what_masks_take():
    pricing = make_pricing(FREE)
    item = dataclasses.replace(item_of(make_request(), 0, all_masks(0)), num_new_tokens=8 + BLOCKS.length)
    for _ in range(4):
        pricing.end_step(PricedStep([outcome_of(item, 0)], (), StepShape(item.num_new_tokens, 30), step_s=0.2))
        pricing.learn()
    assert pricing.cost.seconds(StepShape(1, 30, is_drafting=True)) == pricing.cost.seconds(StepShape(1, 30))


def test_a_new_request_begins_with_masks_only_where_they_pay():
    pricing = make_pricing(FREE)
    assert pricing.drafts_on(make_request(name="first"))
    PlayedSteps(pricing, accepted=(0.2, 0.2, 0.2), slowdown=1.0).play(FREE, 4 * TRIAL_STEPS)
    assert not pricing.drafts_on(make_request(name="new"))
    assert pricing.drafts_on(make_request(name="pinned", is_pinned=True))


def test_outcomes_without_masks_make_drafts_rarer():
    level = LoadLevels(CostModel(StepTimeModel.from_points(TWO_CORES))).at(1)
    masked = MaskedDrafts(MaskBlocks(token_id=9, length=3, num_blocks=1))
    survivals = (0.5, 0.2, 0.1)
    assert best_length(masked, level, survivals) == 3
    masked.observe_step([True] * 100)
    assert best_length(masked, level, survivals) == 3
    masked.observe_step([False] * 100)
    assert best_length(masked, level, survivals) == 0


def test_the_first_round_with_masks_does_not_tell_what_a_draft_is_waited_for():
    pricing = make_pricing(FREE)
    PlayedSteps(pricing, accepted=(0.9, 0.9, 0.9), draft_s=0.005).play(FREE, 8)
    assert pricing._load.level.exposure.seconds(3) == pytest.approx(0.005)
