"""Where a request's response is filed: in rollouts by its prompt or its key, elsewhere by its salt alone."""

from __future__ import annotations

from typing import Any

import pytest

from fakes.engine_bench import MemoryDrafts
from outrider.verifier_service.messages.draft import Close, DrafterEvent, DraftNeeds, Open, Seed
from outrider.verifier_service.messages.history import PastResponse
from outrider.verifier_service.messages.request import (
    AcceptanceRule,
    GenerationRequest,
    Request,
    SamplingParams,
    SpeculationPlan,
)
from support import parts

RESPONSES = (PastResponse(token_ids=(7, 8), age=1), PastResponse(token_ids=(7, 9)))


class Bench:
    """A coordinator with a drafter that keeps histories, and one that does not."""

    def __init__(self, *, rollouts: bool = True) -> None:
        self.client = MemoryDrafts()
        self.coordinator = parts.coordinator(self.client, rollouts=rollouts)
        self.client.events = [
            DrafterEvent(drafter_id="keeps", vocab_size=100, needs=DraftNeeds(history=True)),
            DrafterEvent(drafter_id="other", vocab_size=100),
        ]
        self.coordinator.receive({}, 0.0)

    def request(self, *, prompt: tuple[int, ...] = (1, 2, 3), draft_length: int = 3, **fields: Any) -> Request:
        message = GenerationRequest(
            request_id="r",
            prompt_token_ids=prompt,
            plan=SpeculationPlan(drafter_id="keeps" if draft_length else None, draft_length=draft_length),
            **{"sampling": SamplingParams(temperature=0.0, max_tokens=32), **fields},
        )
        return Request.of(message, 0.0)

    def opening(self, **fields: object) -> Open:
        self.coordinator.ask([self.request(**fields)], 0.0)
        (opening,) = [message for _, message in self.client.take() if isinstance(message, Open)]
        self.coordinator.close(self.request())
        self.client.take()
        return opening

    def ending(self, request: Request, *output: int) -> list[tuple[str, object]]:
        request.token_ids += output
        self.client.take()
        self.coordinator.close(request)
        return self.client.take()

    def seeding(self, **fields: object) -> list[tuple[str, object]]:
        self.coordinator.filing.seed(self.request(**fields), RESPONSES)
        self.coordinator.receive({}, 0.0)
        return self.client.take()


def key_of(opening: Open) -> str:
    assert opening.history is not None
    return opening.history.key


def test_in_rollouts_samples_of_one_prompt_have_one_key_whatever_their_salt():
    bench = Bench()
    key = key_of(bench.opening(cache_salt="policy 1"))
    assert key == key_of(bench.opening(cache_salt="policy 2"))
    assert key == key_of(Bench().opening(output_token_ids=(8, 9))), "moved to another verifier"
    assert key != key_of(bench.opening(prompt=(1, 2)))
    assert key != key_of(bench.opening(prompt=(1, 2, 3, 8))), "not a prefix of the prompt either"


def test_a_key_is_never_that_of_a_prompt():
    bench = Bench()
    by_prompt = key_of(bench.opening())
    assert key_of(bench.opening(history_key="mine")) == key_of(bench.opening(prompt=(7,), history_key="mine"))
    assert by_prompt not in (key_of(bench.opening(history_key=name)) for name in (by_prompt, by_prompt.split()[-1]))
    assert key_of(bench.opening(history_key="")) == ""


def test_outside_rollouts_there_is_no_history():
    bench = Bench(rollouts=False)
    assert bench.opening(cache_salt="mine", history_key="k").history is None
    request = bench.request(history_key="k")
    bench.coordinator.ask([request], 0.0)
    assert bench.ending(request, 7, 8) == [("keeps", Close(request_id="r"))]


def test_what_must_not_be_kept_is_filed_nowhere_outside_rollouts_either():
    bench = Bench(rollouts=False)
    assert key_of(bench.opening(cache_salt="mine", history_key="")) == ""
    request = bench.request(history_key="")
    bench.coordinator.ask([request], 0.0)
    assert bench.ending(request, 7, 8) == [("keeps", Close(request_id="r"))]


@pytest.mark.parametrize("rollouts", [False, True])
@pytest.mark.parametrize("may_learn", [False, True])
def test_a_drafter_is_told_whether_it_may_learn(rollouts: bool, may_learn: bool):
    assert Bench(rollouts=rollouts).opening(may_learn=may_learn).may_learn is may_learn
    assert Bench(rollouts=rollouts).opening().may_learn is False


@pytest.mark.parametrize("rollouts", [False, True])
def test_a_request_of_a_lossy_rule_sees_nothing_of_others_and_leaves_nothing_behind(rollouts: bool):
    lossy = SamplingParams(max_tokens=32, acceptance=AcceptanceRule.TYPICAL)
    history = Bench(rollouts=rollouts).opening(sampling=lossy).history
    assert history is not None
    assert history.key == ""


def test_in_rollouts_each_partition_has_keys_of_its_own():
    keys = set()
    for partition in ("", "a", "b"):
        for fields in ({}, {"history_key": "k"}):
            history = Bench().opening(partition=partition, **fields).history
            assert history is not None
            keys.add(history.key)
    assert len(keys) == 6


def test_the_version_of_the_weights_is_told():
    bench = Bench()
    bench.coordinator.filing.weight_version = "12"
    history = bench.opening().history
    assert history is not None
    assert (history.weight_version, history.num_prompt_tokens) == ("12", 3)


@pytest.mark.parametrize("draft_length", [0, 3])
def test_an_ended_response_goes_whole_to_every_drafter_that_keeps_it_drafted_or_not(draft_length: int):
    bench = Bench()
    request = bench.request(draft_length=draft_length)
    bench.coordinator.ask([request], 0.0)
    sent = bench.ending(request, 7, 8, 9)
    assert {drafter_id for drafter_id, _ in sent} == {"keeps"}
    (_, opening), (_, closing), *_ = sent
    assert isinstance(opening, Open)
    assert opening.token_ids == (1, 2, 3, 7, 8, 9)
    assert closing == Close(request_id="r")


def test_what_was_declined_or_never_began_is_not_sent():
    bench = Bench()
    assert bench.ending(bench.request(history_key=""), 7, 8) == []
    assert bench.ending(bench.request()) == []


def test_what_ended_elsewhere_goes_to_every_drafter_that_keeps_it_under_the_requests_key():
    bench = Bench()
    bench.coordinator.filing.weight_version = "12"
    history = bench.opening().history
    assert bench.seeding() == [("keeps", Seed(request_id="r", history=history, responses=RESPONSES))]
    bench.coordinator.receive({}, 0.0)
    assert bench.client.take() == [], "once"


def test_a_drafter_that_comes_up_with_the_request_has_it_too():
    bench = Bench()
    bench.client.events = [DrafterEvent(drafter_id="new", vocab_size=100, needs=DraftNeeds(history=True))]
    assert [drafter_id for drafter_id, _ in bench.seeding()] == ["keeps", "new"]


def test_a_request_that_declined_or_is_none_of_a_rollout_brings_nothing():
    for bench, fields in ((Bench(), {"history_key": ""}), (Bench(rollouts=False), {})):
        assert bench.seeding(**fields) == []
