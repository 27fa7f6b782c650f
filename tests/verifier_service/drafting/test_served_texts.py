"""What drafters are told of ended requests, so that their pool learns also of those that were not drafted for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from fakes.engine_bench import MemoryDrafts
from outrider.verifier_service.drafting.asking import CoordinatorConfig
from outrider.verifier_service.drafting.coordinator import DraftCoordinator
from outrider.verifier_service.drafting.served_texts import MAX_TOKENS_AT_ONCE, TOKENS_PER_S
from outrider.verifier_service.messages.draft import (
    MAX_SAMPLE_TOKENS,
    Close,
    Commit,
    Draft,
    DrafterEvent,
    DraftNeeds,
    Open,
    SparseRow,
    States,
    VerifierMessage,
)
from outrider.verifier_service.messages.request import (
    AcceptanceRule,
    DisabledReason,
    GenerationRequest,
    Request,
    SamplingParams,
    SpeculationPlan,
)
from outrider.verifier_service.pricing.offer import Ask, AskLength

LEARNS = DraftNeeds(taps=(0,), num_top=1, learns=True)
OFF = SpeculationPlan(draft_length=0, disabled_reason=DisabledReason.LOAD)
ON = SpeculationPlan(draft_length=3)


class SpanStates:
    """A `StateSource` whose states say nothing but where they are."""

    def messages(self, request: Request, start: int, stop: int) -> Iterator[States]:
        if start < stop:
            yield States(
                request_id=request.request_id, position=start, dtype="float32", width=1, data=bytes(4 * (stop - start))
            )


class Price:
    """A price that lets drafts through, or none."""

    price = None
    is_open = True

    def ask_all(self, asks: Sequence[Ask]) -> list[AskLength]:
        return [AskLength(ask.bound) if self.is_open else AskLength(0, DisabledReason.LOAD) for ask in asks]


class Bench:
    """A coordinator with drafters that learn, and requests that say what the test says."""

    def __init__(self, *drafter_ids: str, needs: DraftNeeds = LEARNS, **config: Any) -> None:
        self.client, self.now_s = MemoryDrafts(), 0.0
        settings = CoordinatorConfig(
            **{"vocab_size": 100, "max_model_len": 10_000, "tells_texts": True, "min_deadline_s": 1.0, **config}
        )
        self.price = Price()
        self.coordinator = DraftCoordinator(self.client, settings, SpanStates(), self.price)  # type: ignore[arg-type]
        self.requests: dict[str, Request] = {}
        self.receive(*(DrafterEvent(drafter_id=drafter_id, needs=needs) for drafter_id in drafter_ids or ("d",)))

    def receive(self, *events: DrafterEvent) -> None:
        self.client.events.extend(events)
        self.coordinator.receive(self.requests, self.now_s)

    def request(
        self, request_id: str = "r", *, plan: SpeculationPlan = OFF, may_learn: bool = True, **sampling: Any
    ) -> Request:
        message = GenerationRequest(
            request_id=request_id,
            prompt_token_ids=(1, 2, 3),
            sampling=SamplingParams(**{"max_tokens": 9_000, **sampling}),
            plan=plan,
            may_learn=may_learn,
        )
        request = self.requests[request_id] = Request.of(message, 0.0)
        return request

    def say(self, request: Request, *token_ids: int) -> None:
        """Commit tokens as the engine does, with rows of the law for whoever is to have them, and ask for a draft."""
        request.token_ids += token_ids
        if self.coordinator.num_top_of(request, is_unasked=True):
            request.target_rows += [SparseRow(token_ids=(each,), weights=(1,)) for each in token_ids]
        request.num_computed_tokens = request.num_tokens - 1
        self.coordinator.ask([request], self.now_s)

    def end(self, request: Request) -> list[tuple[str, VerifierMessage]]:
        """End a request; return what is said then."""
        self.client.take()
        self.coordinator.close(self.requests.pop(request.request_id))
        assert not self.coordinator.request_ids
        return self.client.take()

    def told(self, request: Request) -> list[VerifierMessage]:
        return [message for _, message in self.end(request)]


def spans(messages: list[VerifierMessage]) -> list[tuple[int, int]]:
    states = (message for message in messages if isinstance(message, States))
    return [(message.position, message.position + len(message.data) // 4) for message in states]


def test_a_request_without_any_draft_is_told_whole_once_it_has_ended():
    bench = Bench()
    request = bench.request()
    for token_id in (10, 11, 12, 13):
        bench.say(request, token_id)
    assert bench.client.take() == [], "no draft pays: nothing is asked"
    opening, states, commit, closing = bench.told(request)
    assert isinstance(opening, Open)
    assert opening.token_ids == (1, 2, 3)
    assert opening.may_learn
    assert spans([states]) == [(0, 6)], "the last token has no state"
    assert isinstance(commit, Commit)
    assert (commit.position, commit.token_ids, commit.max_length) == (3, (10, 11, 12, 13), 0)
    assert [row.token_ids for row in commit.target_rows] == [(10,), (11,), (12,), (13,)]
    assert closing == Close(request_id="r")


def test_a_drafter_that_was_asked_is_told_what_it_has_not_heard():
    bench = Bench()
    request = bench.request(plan=ON)
    bench.say(request, 10)
    bench.price.is_open = False
    bench.say(request, 11, 12)
    states, commit, closing = bench.told(request)
    assert spans([states]) == [(3, 5)]
    assert isinstance(commit, Commit)
    assert (commit.position, commit.token_ids, commit.max_length) == (4, (11, 12), 0)
    assert len(commit.target_rows) == 2
    assert closing == Close(request_id="r")


def test_a_drafter_of_the_last_state_is_told_those_of_the_response_one_by_one():
    bench = Bench(needs=DraftNeeds(taps=(-1,), last_state_only=True, learns=True))
    request = bench.request()
    bench.say(request, 10, 11, 12)
    assert spans(bench.told(request)) == [(2, 3), (3, 4), (4, 5)], "the prompt's last state draws the first token"


@pytest.mark.parametrize("why", ["forbidden", "opted_out", "no_learner", "hosted", "no_text", "failing", "moving"])
def test_nobody_is_told(why: str):
    needs = DraftNeeds(taps=(0,), learns=why != "no_learner")
    bench = Bench(needs=needs, tells_texts=why != "hosted")
    opt_out = {"num_speculative_tokens": 0} if why == "opted_out" else {}
    request = bench.request(may_learn=why != "forbidden", **opt_out)
    request.stands_until_s = math.inf if why == "moving" else None
    if why == "failing":
        for _ in range(20):
            bench.coordinator._drafters["d"].breaker.record_failure(bench.now_s)
    if why != "no_text":
        bench.say(request, 10, 11, 12, 13)
    assert bench.end(request) == []


def test_a_sample_that_was_made_while_drafts_paid_is_not_made_again():
    bench = Bench()
    request = bench.request(plan=ON)
    bench.say(request, 10)
    request.plan = OFF
    bench.say(request, 11, 12)
    assert bench.client.take()[-1] == ("d", Close(request_id="r")), "here the drafter makes a sample"
    assert bench.end(request) == []


def test_each_of_several_pools_hears_of_some():
    bench = Bench("a", "b")
    heard = set()
    for index in range(16):
        request = bench.request(f"r{index}")
        bench.say(request, 10, 11)
        (drafter_id,) = {to for to, _ in bench.end(request)}
        heard.add(drafter_id)
    assert heard == {"a", "b"}


def test_a_long_text_is_told_as_far_as_a_sample_goes_and_so_many_tokens_a_second():
    bench = Bench()
    num_told = 0
    while True:
        request = bench.request()
        bench.say(request, *[7] * MAX_SAMPLE_TOKENS)
        told = bench.told(request)
        if not told:
            break
        num_told += 1
        _, states, commit, _ = told
        assert spans([states]) == [(0, MAX_SAMPLE_TOKENS)]
        assert isinstance(commit, Commit)
        assert 3 + len(commit.token_ids) == MAX_SAMPLE_TOKENS == 3 + len(commit.target_rows)
    assert num_told == MAX_TOKENS_AT_ONCE // MAX_SAMPLE_TOKENS
    bench.now_s += MAX_SAMPLE_TOKENS / TOKENS_PER_S
    bench.receive()
    request = bench.request()
    bench.say(request, *[7] * MAX_SAMPLE_TOKENS)
    assert bench.told(request)


@pytest.mark.parametrize("keeps_histories", [False, True])
def test_in_rollouts_a_drafter_that_keeps_histories_is_given_the_response_once(keeps_histories: bool):
    bench = Bench(needs=DraftNeeds(history=keeps_histories, learns=True), rollouts=True)
    request = bench.request()
    bench.say(request, 10, 11, 12, 13)
    told = bench.told(request)
    if keeps_histories:
        assert [type(message) for message in told] == [Open, Close], "its history, as without a learner"
    else:
        assert [type(message) for message in told] == [Open, Commit, Close]


def test_a_lossy_request_leaves_no_more_behind_than_it_would_with_drafts():
    bench = Bench(needs=DraftNeeds(history=True, learns=True))
    request = bench.request(acceptance=AcceptanceRule.TYPICAL)
    bench.say(request, 10, 11, 12, 13)
    assert bench.end(request) == []


def test_a_draft_that_comes_after_the_end_is_stale():
    bench = Bench()
    request = bench.request(plan=ON)
    bench.say(request, 10)
    told = bench.told(request)
    assert isinstance(told[-1], Close)
    bench.receive(DrafterEvent(drafter_id="d", message=Draft(request_id="r", round_id=1, position=4, token_ids=(11,))))
    assert bench.coordinator.num_stale_drafts == 1
