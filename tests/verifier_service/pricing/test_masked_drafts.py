"""The price of drafts by masks: all rows count, and a probe takes two rounds."""

from __future__ import annotations

import pytest

from benchmarks.pricing import outcome_of
from fakes.priced_bench import DEAR, FREE, KNEED
from outrider.verifier_service.messages.draft import LOCAL_DRAFTER_ID, Draft
from outrider.verifier_service.messages.request import DisabledReason, Request, SamplingParams, SpeculationPlan
from outrider.verifier_service.pricing.cost_model import CostModel, StepShape, StepTimeModel
from outrider.verifier_service.pricing.draft_pricing import DraftPricing
from outrider.verifier_service.pricing.masked_drafts import MaskedDrafts
from outrider.verifier_service.pricing.offer import PricedStep
from outrider.verifier_service.pricing.probes import PROBE_LENGTH, PROBE_ROUNDS
from outrider.verifier_service.scheduling.masks import MaskBlocks, PlacedMasks
from outrider.verifier_service.scheduling.outcome import num_mask_rows
from outrider.verifier_service.scheduling.schedule import ScheduledRequest

BLOCKS = MaskBlocks(token_id=9, length=3)


def make_request(**plan: object) -> Request:
    return Request(
        request_id="r",
        sampling=SamplingParams(temperature=0.0),
        token_ids=[0] * 8,
        num_prompt_tokens=8,
        plan=SpeculationPlan(**({"drafter_id": LOCAL_DRAFTER_ID, "draft_length": 3} | plan)),
        arrival_s=0.0,
    )


def make_pricing(profile) -> DraftPricing:
    pricing = DraftPricing(masked=MaskedDrafts(BLOCKS))
    pricing.use_profile(profile)
    return pricing


def item_of(request: Request, num_drafted: int, has_masks: bool) -> ScheduledRequest:
    masks = PlacedMasks(BLOCKS, tuple(range(num_drafted + 1))) if has_masks else None
    draft = Draft(request_id="r", round_id=1, position=8, token_ids=(0,) * num_drafted) if num_drafted else None
    num_masks = 0 if masks is None else masks.num_tokens
    return ScheduledRequest(
        request=request, num_new_tokens=1 + num_drafted + num_masks, draft=draft, samples=True, masks=masks
    )


def test_a_draft_costs_its_tokens_and_all_blocks_behind_it():
    assert [MaskedDrafts(BLOCKS).num_rows(length) for length in range(4)] == [3, 7, 11, 15]
    one = MaskedDrafts(MaskBlocks(token_id=9, length=3, num_blocks=1))
    assert [one.num_rows(length) for length in range(4)] == [3, 4, 5, 6]


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
    cost = CostModel(StepTimeModel.from_points(profile))
    assert MaskedDrafts(BLOCKS).best_length(cost, StepShape(1, 0), survivals) == length


def test_the_base_of_a_step_has_neither_drafts_nor_masks():
    pricing, request = make_pricing(FREE), make_request()
    for num_drafted in (0, 3, 3):
        asked = pricing.ask(request, LOCAL_DRAFTER_ID, 3)
        assert asked.length == 3
        item = item_of(request, num_drafted, has_masks=True)
        outcome = outcome_of(item, num_accepted=num_drafted)
        pricing.end_step(PricedStep([outcome], (), StepShape(item.num_new_tokens, 30), step_s=0.02))
        pricing.learn()
        assert pricing._base.num_tokens == 1
        assert num_mask_rows(item) == item.num_new_tokens - 1 - num_drafted


def test_a_probe_has_masks_first_and_then_a_draft():
    pricing, request = make_pricing(DEAR), make_request()
    lengths = []
    for _ in range(4 * PROBE_ROUNDS):
        asked = pricing.ask(request, LOCAL_DRAFTER_ID, 3)
        assert (asked.reason is None) == (asked.length > 0)
        assert pricing.drafts_on(request) == (asked.length > 0)
        lengths.append(asked.length)
        had_masks = len(lengths) > 1 and lengths[-2] > 0
        item = item_of(request, asked.length if had_masks else 0, has_masks=asked.length > 0)
        shape = StepShape(item.num_new_tokens, 30)
        pricing.end_step(PricedStep([outcome_of(item, num_accepted=0)], (), shape, step_s=0.01 * shape.num_tokens))
    probes = [index for index, length in enumerate(lengths) if length]
    assert probes
    assert {lengths[index] for index in probes} == {PROBE_LENGTH}
    assert probes[1::2] == [index + 1 for index in probes[::2]]
    assert all(late - early >= PROBE_ROUNDS for early, late in zip(probes[1::2], probes[2::2], strict=False))
    assert pricing.ask(request, LOCAL_DRAFTER_ID, 3).reason in (None, DisabledReason.LOAD)


def test_pinned_plans_and_drafters_elsewhere_are_not_decided_by_their_masks():
    pricing = make_pricing(DEAR)
    assert pricing.ask(make_request(is_pinned=True), LOCAL_DRAFTER_ID, 3).length == 3
    assert pricing.ask(make_request(), "in a pool", 3).length > 0, "as new ones are, before there is a price"
