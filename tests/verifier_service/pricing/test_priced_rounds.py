"""The rounds of single requests as pricing is told of them: what a step ends, what it leaves alone, what is learnt."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.pricing import outcome_of, schedule_of
from fakes.priced_bench import DEAR, FREE, KNEED
from outrider.verifier_service.messages.draft import Draft
from outrider.verifier_service.messages.engine import StepTime
from outrider.verifier_service.messages.request import DisabledReason, Request, SpeculationPlan
from outrider.verifier_service.pricing.cost_model import StepShape, StepTimeModel
from outrider.verifier_service.pricing.draft_pricing import DraftPricing
from outrider.verifier_service.pricing.offer import Ask, PricedStep
from outrider.verifier_service.pricing.probes import PROBE_LENGTH
from outrider.verifier_service.pricing.survival import POOL_FADE
from outrider.verifier_service.scheduling.outcome import num_draft_tokens
from outrider.verifier_service.scheduling.schedule import ScheduledRequest
from support import parts, priced

LENGTH = 4


def make_requests(number: int) -> list[Request]:
    return [parts.request(str(index), [0] * 8, drafter_id="d", draft_length=LENGTH) for index in range(number)]


def make_draft(request: Request, length: int = LENGTH) -> Draft:
    return parts.draft(request, (0,) * length)


def plain(request: Request) -> ScheduledRequest:
    return ScheduledRequest(request=request, num_new_tokens=1, draft=None, samples=True)


def drafted(request: Request, draft: Draft) -> ScheduledRequest:
    return ScheduledRequest(request=request, num_new_tokens=1 + len(draft.token_ids), draft=draft, samples=True)


def chunk(request: Request) -> ScheduledRequest:
    """A part of a prompt."""
    return ScheduledRequest(request=request, num_new_tokens=4, draft=None, samples=False)


class Pricing:
    """A pricing whose requests ask, and end steps in which drafts are accepted to a given place."""

    def __init__(self, profile: Sequence[StepTime]) -> None:
        self.pricing = DraftPricing()
        self.pricing.use_profile(profile)
        self._step_s = StepTimeModel.from_points(profile).t

    def ask(self, request: Request) -> int:
        return priced.ask(self.pricing, request, "d", LENGTH).length

    def cut(self, request: Request) -> Draft:
        return priced.admit(self.pricing, request, make_draft(request))

    def end(self, *items: ScheduledRequest, num_accepted: int = 0, held: Sequence[Request] = ()) -> None:
        batch = schedule_of(items).batch
        self.pricing.end_step(
            PricedStep(
                [outcome_of(item, min(num_accepted, num_draft_tokens(item))) for item in items],
                held,
                StepShape(batch.num_tokens, sum(batch.context_lengths)),
                step_s=self._step_s(batch.num_tokens),
                exposed_s=0.0,
            )
        )

    def decode(self, requests: Sequence[Request], num_accepted: int, *others: ScheduledRequest) -> None:
        """Run a step of requests whose drafts are accepted so far, if as much of them is verified."""
        asked = [(request, self.ask(request)) for request in requests]
        drafts = [(request, self.cut(request) if length else make_draft(request, 0)) for request, length in asked]
        items = [drafted(*pair) if pair[1].token_ids else plain(pair[0]) for pair in drafts]
        self.end(*items, *others, num_accepted=num_accepted)
        self.pricing.learn()

    @property
    def num_judged(self) -> float:
        """The fading number of draft tokens that were learnt from."""
        return self.pricing.survival.num_judged


def test_who_reads_its_prompt_again_keeps_its_round_and_its_draft_is_priced_and_learnt_from():
    """Preempted while its draft was on its way: it comes when the prompt has been read."""
    bench, (first, second) = Pricing(DEAR), make_requests(2)
    assert bench.ask(first) > 0, "nothing is known yet"
    for _ in range(80):
        bench.decode([second], 0, chunk(first))
    assert bench.pricing.price == 1.0
    assert bench.cut(first).token_ids == (), "no draft pays"
    before = bench.num_judged
    bench.end(drafted(first, make_draft(first)), plain(second))
    bench.pricing.learn()
    assert bench.num_judged > before


def test_after_a_change_of_load_requests_ask_at_the_price_of_that_load():
    bench, requests = Pricing(KNEED), make_requests(32)
    for _ in range(80):
        bench.decode(requests, 0)
    assert bench.pricing.price == 1.0
    for _ in range(80):
        bench.decode(requests[:1], LENGTH)
    assert bench.pricing.price < 0.2
    bench.end(*map(plain, requests))
    assert sum(map(bench.ask, requests[1:])) <= PROBE_LENGTH


@pytest.mark.parametrize(
    ("profile", "before", "after"), [(KNEED, 16, 32), (KNEED, 31, 32), (DEAR, 8, 16), (DEAR, 32, 8)]
)
def test_a_load_that_was_never_seen_is_priced_before_anybody_asks(profile: Sequence[StepTime], before: int, after: int):
    bench, requests = Pricing(profile), make_requests(32)
    for _ in range(120):
        bench.decode(requests[:before], 0)
    assert bench.pricing.price == 1.0
    bench.end(*map(plain, requests[:after]))
    assert sum(map(bench.ask, requests[:after])) <= PROBE_LENGTH + 1


def test_what_a_step_says_is_learnt_at_the_next_one_at_the_latest_and_once():
    bench, (request,) = Pricing(FREE), make_requests(1)
    bench.decode([request], LENGTH)
    bench.ask(request)
    bench.end(drafted(request, make_draft(request)))
    before = bench.num_judged
    bench.ask(request)
    bench.end(plain(request))
    after = bench.num_judged
    assert after == pytest.approx(before * POOL_FADE + 1)
    bench.pricing.learn()
    bench.pricing.learn()
    assert bench.num_judged == after


def test_the_last_step_of_a_request_teaches_as_much_as_any_other_and_then_nothing_is_kept():
    bench, (request,) = Pricing(FREE), make_requests(1)
    for _ in range(2):  # the first step is learnt from at once
        bench.ask(request)
        bench.end(drafted(request, bench.cut(request)), num_accepted=1)
    bench.pricing.forget(request.request_id)
    before = bench.num_judged
    assert bench.pricing.request_ids == set()
    bench.pricing.learn()
    assert bench.num_judged == pytest.approx(before * POOL_FADE**2 + 1 + POOL_FADE)
    assert bench.pricing.request_ids == set()


def test_a_request_that_waits_on_keeps_its_round():
    bench, (first, second) = Pricing(FREE), make_requests(2)
    for request in (first, second):
        bench.ask(request)
    bench.end(plain(second), held=[first])
    bench.pricing.learn()
    before = bench.num_judged
    bench.end(drafted(first, bench.cut(first)))
    bench.pricing.learn()
    assert bench.num_judged > before


@pytest.mark.parametrize(("profile", "least", "most"), [(DEAR, 0.9, 1.0), (FREE, 0.0, 0.2)])
def test_without_a_drafter_drafts_have_a_price_all_the_same(profile: Sequence[StepTime], least: float, most: float):
    """What a verifier says of itself brings drafters or verifiers (autoscaling.py): nobody drafts so far."""
    bench, requests = Pricing(profile), make_requests(16)
    for request in requests:
        request.plan = SpeculationPlan(disabled_reason=DisabledReason.DRAFTER_UNAVAILABLE)
    for _ in range(40):
        for request in requests:
            assert priced.ask(bench.pricing, request, "", 0).length == 0
        bench.end(*map(plain, requests))
        bench.pricing.learn()
    assert least <= bench.pricing.price <= most


def test_while_no_draft_pays_a_request_gets_the_answer_it_had_and_no_round_of_before():
    bench, requests = Pricing(DEAR), make_requests(4)
    for _ in range(80):
        bench.decode(requests, 0)
    answers = [priced.ask(bench.pricing, request, "d", LENGTH) for request in requests]
    assert {answer.reason for answer in answers} <= {DisabledReason.LOAD, DisabledReason.LOW_ACCEPTANCE}
    assert not any(answer.length for answer in answers)
    for _ in range(4):
        assert not bench.pricing.books.probes.is_left, "or one of them might probe"
        bench.end(*map(plain, requests))
        bench.pricing.learn()
        assert [priced.ask(bench.pricing, request, "d", LENGTH) for request in requests] == answers
    assert bench.pricing._num_off > 0
    assert bench.pricing.cut_prediction(requests[0], "prediction", [1.0] * LENGTH).length > 0
    requests[1].plan = SpeculationPlan(drafter_id="d", draft_length=LENGTH, is_pinned=True)
    assert bench.ask(requests[1]) == LENGTH
    assert all(map(bench.pricing.drafts_on, requests[:2]))
    requests[1].plan = SpeculationPlan(drafter_id="d", draft_length=LENGTH)
    assert [bench.ask(request) for request in requests[:2]] == [0, 0]
    assert not any(map(bench.pricing.drafts_on, requests[:2]))


def test_requests_of_two_drafters_and_one_that_cannot_draft_ask_in_one_step():
    bench, (first, second, third) = Pricing(FREE), make_requests(3)
    asks = [Ask(first, "d", 2), Ask(second, "e", 4), Ask(third, "", 0)]
    for _ in range(3):
        lengths = [answer.length for answer in bench.pricing.ask_all(asks)]
        drafted_ = [(one.request, make_draft(one.request, n)) for one, n in zip(asks, lengths, strict=True) if n]
        kept = bench.pricing.admit_all(drafted_)
        bench.end(*(drafted(*pair) for pair in zip((first, second), kept, strict=True)), plain(third), num_accepted=1)
        bench.pricing.learn()
    assert lengths[0] == 2 <= lengths[1]
    assert lengths[2] == 0
    assert {*bench.pricing.survival._pools} == {bench.pricing.survival.number_of(name) for name in "de"}
