"""The price at work in an engine over the fake runner: what is asked for, what is verified, and why not."""

from __future__ import annotations

from typing import Any

import pytest

from fakes.engine_bench import PROMPT, make_request
from fakes.priced_bench import DEAR, FREE, KNEED, ONE_CORE, Bench, FarBench, FarDrafts, GuessingDrafts
from outrider.verifier_service.engine.loop import engine_load
from outrider.verifier_service.engine.step_stats import RecentRates
from outrider.verifier_service.messages.draft import (
    DRAFT_PROB_SCALE,
    Draft,
    DrafterEvent,
    DraftNeeds,
    SparseRow,
)
from outrider.verifier_service.messages.engine import StepTime
from outrider.verifier_service.messages.request import DisabledReason, Request, SpeculationPlan
from outrider.verifier_service.pricing.draft_pricing import DraftPricing
from outrider.verifier_service.pricing.offer import AskLength
from outrider.verifier_service.pricing.probes import PROBE_ROUNDS
from support import priced


def test_what_is_free_is_asked_for_to_the_bound():
    bench = Bench(GuessingDrafts(), FREE)
    (outputs,) = bench.run().values()
    assert bench.drafts.asked[:3] == [2, 2, 2], "steps are priced after the next ask, and the first has no drafts"
    assert set(bench.drafts.asked[3:-2]) == {4}
    assert outputs[-1].speculation.mean_acceptance_length > 4
    assert bench.pricing.price < 0.1
    assert bench.pricing.knee is None


def test_nothing_is_asked_for_where_every_token_costs_as_much():
    bench = Bench(GuessingDrafts(share_wrong=0.1), DEAR)
    (outputs,) = bench.run().values()
    metrics = outputs[-1].speculation
    assert bench.pricing.price == 1.0
    assert bench.pricing.knee == 1
    assert metrics.disabled_reason == "load"
    assert metrics.num_draft_tokens < 10


@pytest.mark.parametrize(("profiled", "is_beyond"), [(20, False), (2, True)])
def test_steps_far_beyond_the_profile_are_counted(profiled: int, is_beyond: bool):
    """Contexts grow past 20 tokens little by little, which does not count."""
    bench = Bench(GuessingDrafts(), [StepTime(num_tokens=n, seconds=0.02) for n in (1, profiled)])
    bench.run()
    num_steps = engine_load(bench.engine, RecentRates(), now_s=0.0).counters.num_extrapolated_steps
    assert (num_steps > 0) == is_beyond


def test_a_pinned_plan_is_asked_for_whatever_it_costs():
    bench = Bench(GuessingDrafts(share_wrong=0.35), DEAR)
    (outputs,) = bench.run(is_pinned=True).values()
    assert set(bench.drafts.asked[:-2]) == {4}
    assert outputs[-1].speculation.num_cut_tokens == 0


def test_without_a_profile_the_plan_stands():
    bench = Bench(GuessingDrafts(share_wrong=0.35), ())
    bench.run()
    assert (bench.pricing.price, bench.pricing.knee) == (None, None)
    assert set(bench.drafts.asked[:-2]) == {4}


def test_one_request_off_for_its_own_acceptance_says_so():
    bench = Bench(GuessingDrafts(share_wrong=1.0, draft_s=0.004), FREE)
    (outputs,) = bench.run().values()
    assert outputs[-1].speculation.disabled_reason == "low_acceptance"
    assert outputs[-1].speculation.num_drafts < len(outputs) / 4


@pytest.mark.parametrize("num_requests", [1, 8, 24])
@pytest.mark.parametrize("draft_s", [0.0, 0.004, 0.012])
def test_it_keeps_up_with_the_best_fixed_length_and_with_none(num_requests: int, draft_s: float):
    """Knee at 16 tokens, right two times out of three, a drafter in the verifier's own thread; what it learns first."""

    def seconds(**plan: object) -> float:
        bench = Bench(GuessingDrafts(share_wrong=0.35, draft_s=draft_s), KNEED)
        bench.run(num_requests=num_requests, max_tokens=120, **plan)
        return bench.now_s

    off = seconds(draft_length=0)
    fixed = min(seconds(draft_length=length, is_pinned=True) for length in (1, 2, 4))
    priced = seconds()
    assert priced < 1.08 * off
    assert priced < 1.25 * fixed, "the unluckiest of eight requests is the last to end"


def test_what_drafting_slows_down_is_not_held_for_the_time_of_plain_steps():
    """A draft brings 0.6 tokens more and its step takes twice as long: plain decoding is faster, though seldom seen."""

    def seconds(**plan: object) -> float:
        bench = Bench(GuessingDrafts(share_wrong=0.6), FREE, slowdown=1.0)
        bench.run(max_tokens=300, **plan)
        return bench.now_s

    assert seconds() < 1.15 * seconds(draft_length=0)


@pytest.mark.parametrize("num_requests", [1, 4])
def test_drafts_that_come_empty_are_not_waited_for_on_and_on(num_requests: int):
    """Five of six asks bring nothing, and each holds its step up as long as it takes: plain decoding is faster."""

    def seconds(**plan: object) -> float:
        bench = Bench(GuessingDrafts(share_wrong=0.2, share_empty=5 / 6, empty_s=0.02), FREE)
        bench.run(num_requests=num_requests, max_tokens=400, **plan)
        return bench.now_s

    assert seconds() < 1.1 * seconds(draft_length=0)


def test_drafts_that_come_empty_at_no_cost_are_asked_for_all_the_same():
    """As prompt lookup's do: where one of six is there, it gains."""

    def seconds(**plan: object) -> float:
        bench = Bench(GuessingDrafts(share_wrong=0.2, share_empty=5 / 6), FREE)
        bench.run(max_tokens=400, **plan)
        return bench.now_s

    assert seconds() < 1.05 * seconds(is_pinned=True) < 0.9 * seconds(draft_length=0)


def test_probes_keep_coming_and_are_few():
    bench = Bench(GuessingDrafts(share_wrong=0.35), DEAR)
    outputs = bench.run(num_requests=8, max_tokens=480)
    num_rounds = sum(len(found) for found in outputs.values())
    num_probes = len(bench.drafts.asked)
    assert 3 < num_probes < num_rounds / PROBE_ROUNDS
    drafts_in_step = [
        sum(length > 1 for length in batch.query_lengths) for batch in bench.runner.batches[20:] if batch.num_tokens
    ]
    assert max(drafts_in_step) <= 3, "never on all at once"


class PausingBench(Bench):
    """The machine stands still for a minute in the first step after the hundredth that verifies a draft."""

    paused_s = 0.0

    def _timed_execute(self, batch, chosen=None):
        is_verifying = batch.num_tokens > len(batch.query_lengths)
        if len(self.runner.batches) > 100 and is_verifying and not self.paused_s:
            self.paused_s = 60.0
            self.now_s += self.paused_s
        return super()._timed_execute(batch, chosen)


def test_a_pause_of_the_machine_does_not_end_probing():
    bench = PausingBench(GuessingDrafts(share_wrong=0.35), DEAR)
    bench.run(max_tokens=480)
    num_before = len(bench.drafts.asked)
    assert bench.paused_s, "a probe met it"
    bench.run(max_tokens=480)
    assert len(bench.drafts.asked) > num_before


def test_a_round_that_nobody_could_be_asked_for_says_nothing_of_drafts():
    bench = Bench(GuessingDrafts(draft_s=0.005), FREE)
    bench.run()
    wait_s = bench.pricing._load.level.exposure.seconds(4)
    bench.drafts.events.append(DrafterEvent(drafter_id="d", is_up=False))
    bench.run()
    assert 0.8 * wait_s < bench.pricing._load.level.exposure.seconds(4) <= wait_s, "it only grows old"


def test_a_round_counts_for_the_drafter_that_drafted_whoever_was_planned():
    bench = Bench(GuessingDrafts(), FREE)
    bench.run(drafter_id="gone")
    survival = bench.pricing.survival
    assert {*survival._pools} == {survival.number_of("d")}


def test_drafts_come_back_when_the_load_is_gone():
    bench = Bench(GuessingDrafts(share_wrong=0.35), KNEED)
    bench.run(num_requests=32, max_tokens=40)
    assert bench.pricing.price > 0.8
    num_before = len(bench.drafts.asked)
    bench.run(max_tokens=100)
    assert sum(bench.drafts.asked[num_before:]) > 60


def test_one_stream_waits_for_drafts_as_long_as_pays():
    """A round trip that is as long as a step, whatever the length: the best fixed one makes 1.13 times as much."""

    def bench() -> FarBench:
        return FarBench(FarDrafts(level_s=0.0, fixed_s=0.020, opening_s=0.005, share_wrong=0.3), ONE_CORE)

    off = bench().speed(1, num_requests=16, draft_length=0, is_pinned=True)
    longest = bench()
    longest.speed(1, num_requests=24, draft_length=4)
    num_before = len(longest.drafts.asked)
    found = [longest.speed(1, num_requests=24, draft_length=4) / off for _ in range(4)]
    asked = [length for length in longest.drafts.asked[num_before:] if length]
    assert sum(found) / len(found) > 1.08
    assert sum(asked) / len(asked) > 3.5


def make_draft(**parts: object) -> Draft:
    return Draft(request_id="0", round_id=1, position=len(PROMPT), token_ids=(1, 2, 3, 4), **parts)


def priced_at(price: float, *, has_predictions: bool = False) -> tuple[DraftPricing, object]:
    """Return pricing that has asked for four tokens of one request, and now stands at `price`."""
    bench = Bench(GuessingDrafts(), FREE)
    bench.engine.add(make_request("0", draft_length=4, max_tokens=50, drafter_id="d"))
    request = bench.engine.requests["0"]
    assert bench.pricing._load is not None
    bench.pricing._load.level.exposure.observe(4, 0.0)  # drafts may be long
    assert priced.ask(bench.pricing, request, "d", 4, DraftNeeds(predictions=has_predictions)).length == 4
    bench.pricing._load.level.price.value = price
    return bench.pricing, request


@pytest.mark.parametrize(("price", "num_kept"), [(0.0, 4), (0.3, 3), (0.7, 1), (0.95, 0)])
def test_a_chain_is_cut_where_its_survival_falls_to_the_price(price: float, num_kept: int):
    pricing, request = priced_at(price)
    draft = make_draft(confidences=(0.9, 0.7, 0.9, 0.3))  # survivals about 0.9, 0.63, 0.57, 0.17
    assert priced.admit(pricing, request, draft).token_ids == (1, 2, 3, 4)[:num_kept]


def test_of_drawn_tokens_the_rows_count_and_no_claim():
    """Whatever the drafter says of it and however unlikely it was: the rows are sharp, flat, sharp, sharp."""
    sharp = SparseRow(token_ids=(9, 1, 2, 3, 4), weights=(DRAFT_PROB_SCALE - 4, 1, 1, 1, 1))
    flat = SparseRow(token_ids=(1, 2, 3, 4), weights=(DRAFT_PROB_SCALE // 4,) * 4)
    pricing, request = priced_at(0.5)
    for claims in (None, (1.0,) * 4, (0.0,) * 4, (0.1, 0.9, 0.1, 0.9)):
        draft = make_draft(draft_probs=(sharp, flat, sharp, sharp), confidences=claims)
        kept = priced.admit(pricing, request, draft)
        assert kept.token_ids == (1,)
        assert len(kept.draft_probs) == 1


def test_a_tree_of_point_masses_loses_the_nodes_that_do_not_pay():
    pricing, request = priced_at(0.3)
    draft = make_draft(parents=(-1, -1, 0, 1), confidences=(0.6, 0.35, 0.2, 0.99))
    kept = priced.admit(pricing, request, draft)
    assert (kept.token_ids, kept.parents) == ((1, 2, 4), (-1, -1, 1))
    assert kept.confidences == (0.6, 0.35, 0.99)


@pytest.mark.parametrize(("price", "num_kept"), [(0.25, 4), (0.33, 2), (0.5, 1), (0.7, 0)])
def test_a_tree_of_a_drafter_that_learns_from_predictions_is_cut_at_its_end_if_it_does_not_pay_on_the_whole(
    price: float, num_kept: int
):
    pricing, request = priced_at(price, has_predictions=True)
    draft = make_draft(parents=(-1, -1, 0, 1), confidences=(0.6, 0.35, 0.1, 0.2))
    assert priced.admit(pricing, request, draft).token_ids == (1, 2, 3, 4)[:num_kept]


def test_a_drawn_tree_is_cut_by_depth_alone():
    row = SparseRow(token_ids=(1, 2, 3, 4), weights=(DRAFT_PROB_SCALE - 3, 1, 1, 1))
    pricing, request = priced_at(0.4)  # a new drafter's survivals: 0.6, 0.36
    for claims in ((0.9,) * 4, (0.1,) * 4):
        draft = make_draft(parents=(-1, -1, 0, 1), draft_probs=(row, row, row), confidences=claims)
        assert priced.admit(pricing, request, draft).token_ids == (1, 2)


@pytest.mark.parametrize("fields", [{}, {"parents": (-1, -1, 0, 1)}, {"parents": (-1, 0, 1, 2), "is_told": True}])
def test_in_a_trial_a_token_is_verified_whatever_drafts_claim(fields: dict[str, Any]):
    """Drafts that are waited for and thrown away would use it up, and teach nothing."""
    is_told = fields.pop("is_told", False)
    draft = make_draft(confidences=(0.3, 0.35, 0.1, 0.2), **fields)
    best = (1,) if is_told or not fields else (2,)
    for is_trying, kept in ((False, ()), (True, best)):
        pricing, request = priced_at(0.95, has_predictions=is_told)
        pricing._load.level.trial._num_left = int(is_trying)
        assert priced.admit(pricing, request, draft).token_ids == kept


def test_a_plan_of_nothing_keeps_its_reason():
    bench = Bench(GuessingDrafts(), FREE)
    (outputs,) = bench.run(draft_length=0, disabled_reason=DisabledReason.DRAFT_QUEUE).values()
    assert outputs[-1].speculation.disabled_reason == "draft_queue"
    assert not bench.drafts.asked


def test_the_load_report_shows_it():
    bench = Bench(GuessingDrafts(), FREE)
    before = engine_load(bench.engine, RecentRates(), 0.0)
    assert (before.price, before.knee, before.draft_length_mean, before.verify_idle_share) == (0.0, None, 0.0, 0.0)
    bench.run(max_tokens=400)
    counters = engine_load(bench.engine, RecentRates(), 0.0).counters
    assert counters.num_asked_tokens / counters.num_asks == pytest.approx(4, rel=0.3)
    dear = Bench(GuessingDrafts(), DEAR)
    assert engine_load(dear.engine, RecentRates(), 0.0).knee == pytest.approx(1)


def test_of_a_pinned_plan_nothing_is_cut():
    pricing, request = priced_at(0.99)
    request.plan = SpeculationPlan(drafter_id="d", draft_length=4, is_pinned=True)
    assert priced.ask(pricing, request, "d", 4).length == 4
    for draft in (make_draft(), make_draft(parents=(-1, -1, 0, 1), confidences=(0.6, 0.35, 0.2, 0.99))):
        assert priced.admit(pricing, request, draft) is draft


def test_who_is_switched_off_is_priced_on():
    """So the price falls when the load is gone, and whoever switched them off can see it."""
    bench = Bench(GuessingDrafts(share_wrong=0.35), KNEED)
    bench.run(num_requests=32, max_tokens=40)
    assert bench.pricing.price > 0.8
    num_before = len(bench.drafts.asked)
    bench.run(max_tokens=100, draft_length=0, disabled_reason=DisabledReason.LOAD)
    assert len(bench.drafts.asked) == num_before
    assert bench.pricing.price < 0.5


def test_what_a_load_did_to_waits_is_not_held_against_one_request():
    bench = Bench(GuessingDrafts(share_wrong=0.2, draft_s=0.002), KNEED)
    bench.run(max_tokens=100)
    alone = bench.pricing.price
    bench.drafts.draft_s = 0.200
    bench.run(num_requests=16, max_tokens=40)
    assert bench.pricing.price == 1.0
    bench.drafts.draft_s = 0.002
    bench.run(max_tokens=6)
    assert bench.pricing.price == pytest.approx(alone, abs=0.2), "within a few steps"


# --- drafts that are there already ---


def profile(each_s: float) -> list[StepTime]:
    """A step takes 10 ms, and `each_s` more for every token beyond the first."""
    return [StepTime(num_tokens=count, seconds=0.010 + each_s * (count - 1)) for count in (1, 2, 4, 8, 16, 32)]


@pytest.mark.parametrize(("each_s", "length"), [(0.0, 4), (0.0001, 4), (0.004, 2), (0.020, 0)])
def test_a_draft_that_is_there_already_is_as_long_as_its_chances_pay(each_s: float, length: int):
    pricing = DraftPricing()
    pricing.use_profile(profile(each_s))
    request = Request.of(make_request("0"), 0.0)
    reason = None if length else DisabledReason.LOAD
    assert pricing.cut_prediction(request, "prediction", [0.8, 0.64, 0.5, 0.4]) == AskLength(length, reason)
    assert pricing.request_ids == {request.request_id}


def test_without_a_profile_all_of_it_is_verified():
    assert DraftPricing().cut_prediction(Request.of(make_request("0"), 0.0), "prediction", [0.1] * 4).length == 4
