"""Sessions that open in the background: the first round of each is answered when it is, and nothing waits for it."""

from __future__ import annotations

import pytest

from fakes.engine_bench import MemoryDrafts
from outrider.verifier_service.messages.draft import Close, Commit, DrafterEvent, Open, Resync, VerifierMessage
from outrider.verifier_service.messages.engine import BreakerState
from outrider.verifier_service.messages.request import DisabledReason, SpeculationPlan
from support import parts

OPENING_S = 5.0


class Bench:
    """A coordinator whose sessions open in the background, one request and a drafter."""

    def __init__(self, *drafter_ids: str) -> None:
        self.client = MemoryDrafts()
        self.coordinator = parts.coordinator(self.client, background_opening_s=OPENING_S)
        self.request = parts.request(draft_length=3, temperature=0.0, max_tokens=32)
        self.now_s = 0.0
        self.receive(*(DrafterEvent(drafter_id=drafter_id) for drafter_id in drafter_ids or ("d",)))

    def receive(self, *events: DrafterEvent) -> None:
        self.client.events.extend(events)
        self.coordinator.receive({"a": self.request}, self.now_s)

    def ask(self) -> list[VerifierMessage]:
        self.coordinator.ask([self.request], self.now_s)
        return [message for _, message in self.client.take()]

    def commit(self, *token_ids: int, seconds: float = 0.1) -> None:
        self.now_s += seconds
        self.request.token_ids += token_ids

    def answer(self, commit: VerifierMessage, *token_ids: int) -> None:
        assert isinstance(commit, Commit)
        self.receive(DrafterEvent(drafter_id="d", message=parts.draft(commit, token_ids)))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_request_is_not_held_while_its_session_opens_and_is_asked_for_once(bench: Bench):
    opening, commit = bench.ask()
    assert isinstance(opening, Open)
    assert isinstance(commit, Commit)
    assert bench.request.hold_until_s is None
    bench.commit(4)
    bench.receive()
    assert bench.ask() == []
    assert bench.request.hold_until_s is None
    assert bench.coordinator.due(bench.request) is None


def test_once_the_prompt_is_read_the_drafter_is_told_the_rest_and_waited_for(bench: Bench):
    commit = bench.ask()[-1]
    bench.commit(4, 5, seconds=1.0)
    bench.answer(commit, 7, 8, 9)
    assert bench.request.draft is None, "the request has gone on"
    assert bench.coordinator.num_stale_drafts == 0
    (second,) = bench.ask()
    assert isinstance(second, Commit)
    assert (second.position, second.token_ids) == (3, (4, 5))
    assert bench.request.hold_until_s is not None
    bench.answer(second, 7)
    assert bench.request.draft is not None


def test_an_opening_that_is_answered_before_the_request_went_on_is_a_draft_like_any(bench: Bench):
    commit = bench.ask()[-1]
    bench.now_s = 0.01
    bench.answer(commit, 7, 8)
    assert bench.request.draft is not None
    assert bench.request.draft.token_ids == (7, 8)
    assert bench.coordinator.round_trip_s.counts().total == pytest.approx(0.01)


def test_an_opening_that_takes_too_long_is_a_failure_and_is_asked_for_again_in_the_background(bench: Bench):
    commit = bench.ask()[-1]
    bench.commit(4, seconds=OPENING_S - 0.1)
    bench.receive()
    assert bench.ask() == []
    bench.commit(5, seconds=0.2)
    bench.receive()
    assert bench.coordinator.fallbacks == {"timeout": 1}
    (second,) = bench.ask()
    assert isinstance(second, Commit)
    assert second.token_ids == (4, 5), "its session is there, if it reads at all"
    assert bench.request.hold_until_s is None
    bench.answer(commit, 7)
    assert bench.coordinator.num_stale_drafts == 1


def test_an_opening_that_is_answered_too_late_is_open_all_the_same(bench: Bench):
    commit = bench.ask()[-1]
    bench.commit(4, seconds=OPENING_S + 0.1)
    bench.receive()
    bench.answer(commit, 7)
    bench.ask()
    assert bench.request.hold_until_s is not None


def test_a_drafter_that_never_opens_a_session_is_not_asked_for_ever(bench: Bench):
    for _ in range(5):
        bench.ask()
        bench.commit(4, seconds=OPENING_S + 0.1)
        bench.receive()
    assert bench.coordinator.circuits(bench.now_s) == {"d": BreakerState.OPEN}
    assert bench.ask() == []
    assert bench.request.metrics.disabled_reason is DisabledReason.DRAFTER_TIMEOUT


def test_an_opening_that_is_answered_closes_the_circuit_of_a_drafter_that_was_probed(bench: Bench):
    for _ in range(5):
        bench.ask()
        bench.commit(4, seconds=OPENING_S + 0.1)
        bench.receive()
    bench.now_s += 10.0
    commit = bench.ask()[-1]
    bench.commit(5)
    bench.answer(commit, 7)
    assert bench.coordinator.circuits(bench.now_s) == {"d": BreakerState.CLOSED}


def test_a_resync_reads_the_prefix_again_in_the_background_of_an_opening(bench: Bench):
    bench.ask()
    bench.commit(4)
    bench.receive(DrafterEvent(drafter_id="d", message=Resync(request_id="a")))
    (_, opening), (_, commit) = bench.client.take()
    assert isinstance(opening, Open)
    assert opening.token_ids == (1, 2, 3, 4)
    assert bench.request.hold_until_s is None
    bench.answer(commit, 7)
    assert bench.request.draft is not None


def test_a_session_that_must_open_again_does_so_in_the_background(bench: Bench):
    bench.answer(bench.ask()[-1], 7)
    bench.commit(7, 8)
    bench.ask()
    deadline_s = bench.request.hold_until_s
    bench.receive(DrafterEvent(drafter_id="d", message=Resync(request_id="a")))
    assert bench.request.hold_until_s == deadline_s, "nothing waits longer for it"
    bench.client.take()
    bench.commit(seconds=2.0)
    bench.receive()
    bench.commit(9)
    assert len(bench.ask()) == 1
    assert bench.request.hold_until_s is None


def test_a_drafter_that_is_lost_while_it_opens_a_session_is_replaced():
    bench = Bench("d", "e")
    bench.ask()
    bench.receive(DrafterEvent(drafter_id="d", is_up=False))
    assert bench.coordinator.fallbacks == {"drafter_lost": 1}
    opening, _ = bench.ask()
    assert isinstance(opening, Open)


def test_a_plan_that_switches_a_request_off_ends_its_opening(bench: Bench):
    bench.ask()
    bench.request.plan = SpeculationPlan(disabled_reason=DisabledReason.LOAD)
    assert bench.ask() == [Close(request_id="a")]
    assert bench.coordinator.request_ids == set()


def test_a_request_that_ends_while_its_session_opens_is_closed(bench: Bench):
    commit = bench.ask()[-1]
    bench.coordinator.close(bench.request)
    assert bench.client.take() == [("d", Close(request_id="a"))]
    bench.answer(commit, 7)
    assert bench.coordinator.num_stale_drafts == 1
    assert bench.coordinator.request_ids == set()
