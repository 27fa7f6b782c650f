"""The coordinator against a client in memory and a clock that the test advances."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from fakes.engine_bench import MemoryDrafts
from outrider.verifier_service.drafting.draft_yield import RETRY_STEPS
from outrider.verifier_service.drafting.state_source import StateSource
from outrider.verifier_service.links.circuit_breaker import BreakerConfig
from outrider.verifier_service.messages.draft import (
    DRAFT_PROB_SCALE,
    Close,
    Commit,
    Draft,
    DrafterEvent,
    DraftNeeds,
    Open,
    Resync,
    SparseRow,
    States,
    VerifierMessage,
)
from outrider.verifier_service.messages.engine import NEVER, BreakerState
from outrider.verifier_service.messages.request import (
    AcceptanceRule,
    DisabledReason,
    Request,
    SpeculationPlan,
)
from outrider.verifier_service.pricing.offer import Ask, AskLength
from support import parts
from support.parts import VOCAB_SIZE


class Bench:
    """One coordinator, one client, one clock, some requests."""

    def __init__(self, states: StateSource | None = None, **config: float) -> None:
        self.client = MemoryDrafts()
        self.coordinator = parts.coordinator(self.client, states, **{"first_deadline_s": 0.5, **config})
        self.requests: dict[str, Request] = {}
        self.now_s = 0.0

    def request(self, request_id: str = "a", **named: Any) -> Request:
        named = {"draft_length": 3, "temperature": 0.0, "max_tokens": 32, "arrival_s": self.now_s, **named}
        self.requests[request_id] = parts.request(request_id, **named)
        return self.requests[request_id]

    def receive(self, *events: DrafterEvent) -> None:
        self.client.events.extend(events)
        self.coordinator.receive(self.requests, self.now_s)

    def ask(self, *requests: Request) -> list[tuple[str, VerifierMessage]]:
        self.coordinator.ask(requests or self.requests.values(), self.now_s)
        return self.client.take()


class SpanStates:
    """A `StateSource` whose states say nothing but where they are."""

    def messages(self, request: Request, start: int, stop: int) -> Iterator[States]:
        if start < stop:
            yield States(
                request_id=request.request_id, position=start, dtype="float32", width=1, data=bytes(4 * (stop - start))
            )


def span(message: VerifierMessage) -> tuple[int, int]:
    assert isinstance(message, States)
    return message.position, message.position + len(message.data) // 4


def up(drafter_id: str = "d", **fields: object) -> DrafterEvent:
    return DrafterEvent(drafter_id=drafter_id, **fields)


def down(drafter_id: str = "d") -> DrafterEvent:
    return DrafterEvent(drafter_id=drafter_id, is_up=False)


def said(message: Draft | Resync, drafter_id: str = "d") -> DrafterEvent:
    return DrafterEvent(drafter_id=drafter_id, message=message)


def answer(commit: VerifierMessage, *token_ids: int, **changes: Any) -> Draft:
    """The draft that fits a commit, unless changed."""
    assert isinstance(commit, Commit)
    return parts.draft(commit, token_ids, **changes)


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.receive(up())
    return bench


def test_first_ask_opens_with_the_whole_prefix_and_later_ones_send_deltas(bench: Bench):
    request = bench.request()
    (_, opening), (_, first) = bench.ask()
    assert isinstance(opening, Open)
    assert opening.token_ids == (1, 2, 3)
    assert first == Commit(request_id="a", round_id=1, position=3, token_ids=(), max_length=3)
    bench.receive(said(answer(first, 7)))
    request.token_ids += [7, 8]
    ((_, second),) = bench.ask()
    assert second == Commit(request_id="a", round_id=2, position=3, token_ids=(7, 8), max_length=3)


def test_draft_reaches_its_request_and_ends_the_hold(bench: Bench):
    request = bench.request()
    commit = bench.ask()[-1][1]
    assert request.hold_until_s == 0.5
    bench.now_s = 0.25
    bench.receive(said(answer(commit, 7, 8)))
    assert request.draft is not None
    assert request.draft.token_ids == (7, 8)
    assert request.hold_until_s is None
    assert bench.coordinator.round_trip_s.counts().total == 0.25


@pytest.mark.parametrize("change", [{"round_id": 99}, {"request_id": "unknown"}])
def test_stale_drafts_are_dropped_and_counted(bench: Bench, change: dict):
    request = bench.request()
    commit = bench.ask()[-1][1]
    bench.receive(said(answer(commit, 7, **change)))
    assert request.draft is None
    assert request.hold_until_s is not None
    assert bench.coordinator.num_stale_drafts == 1


def test_draft_of_another_drafter_is_stale(bench: Bench):
    request = bench.request(drafter_id="d")
    bench.receive(up("other"))
    commit = bench.ask()[-1][1]
    bench.receive(said(answer(commit, 7), "other"))
    assert request.draft is None
    assert bench.coordinator.num_stale_drafts == 1


@pytest.mark.parametrize(
    ("token_ids", "changes"),
    [
        ((7, 8, 9, 10), {}),  # longer than asked for
        ((VOCAB_SIZE,), {}),
        ((7,), {"position": 2}),
        ((7,), {"draft_probs": (SparseRow(token_ids=(8,), weights=(DRAFT_PROB_SCALE,)),)}),
        ((7,), {"draft_probs": (SparseRow(token_ids=(7,), weights=(1,)),)}),
    ],
)
def test_bad_drafts_end_their_round_without_a_draft(bench: Bench, token_ids: tuple[int, ...], changes: dict):
    request = bench.request()
    commit = bench.ask()[-1][1]
    bench.receive(said(answer(commit, *token_ids, **changes)))
    assert request.draft is None
    assert request.hold_until_s is None, "the request must not wait for a second answer"
    assert bench.coordinator.fallbacks == {"bad_draft": 1}


def test_padded_drafter_vocabulary_is_no_fault():
    bench = Bench()
    bench.receive(DrafterEvent(drafter_id="d", vocab_size=VOCAB_SIZE + 28))
    request = bench.request()
    commit = bench.ask()[-1][1]
    bench.receive(said(answer(commit, VOCAB_SIZE + 27)))
    assert request.draft is not None, "a drawn token beyond the target's vocabulary is verified, never cut"


def test_missed_deadline_lets_the_request_run_and_the_late_draft_is_stale(bench: Bench):
    request = bench.request()
    commit = bench.ask()[-1][1]
    bench.now_s = 0.6
    bench.receive()
    assert request.hold_until_s is None
    assert request.draft is None
    assert bench.coordinator.fallbacks == {"timeout": 1}
    bench.now_s = 0.75
    bench.receive(said(answer(commit, 7)))
    assert request.draft is None
    assert bench.coordinator.num_stale_drafts == 1
    lateness = bench.coordinator.lateness_s.counts()
    assert (sum(lateness.counts), lateness.total) == (1, 0.25), "late by 0.25 s after the deadline at 0.5 s"
    assert sum(bench.coordinator.round_trip_s.counts().counts) == 0


class Unwalked(dict[str, Request]):
    """Requests that may be looked up, but not gone through: most of them wait in the queue."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("every request was looked at")

    keys = values = items = __iter__


def test_a_missed_deadline_is_found_without_looking_at_the_queue(bench: Bench):
    request = bench.request()
    bench.receive(up())
    bench.ask()
    bench.now_s = 1.0
    bench.coordinator.receive(Unwalked(bench.requests), bench.now_s)
    assert (request.hold_until_s, dict(bench.coordinator.fallbacks)) == (None, {"timeout": 1})


def test_lost_drafter_lets_its_requests_go_on_and_another_takes_over(bench: Bench):
    request = bench.request(drafter_id="d")
    bench.receive(up("spare"))
    bench.ask()
    bench.receive(down())
    assert request.hold_until_s is None
    request.token_ids.append(9)
    (to, opening), _ = bench.ask()
    assert to == "spare"
    assert isinstance(opening, Open)
    assert opening.token_ids == (1, 2, 3, 9), "a new drafter gets everything"


def test_resync_reopens_within_the_same_deadline(bench: Bench):
    request = bench.request()
    bench.ask()
    bench.now_s = 0.1
    bench.receive(said(Resync(request_id="a")))
    (_, opening), (_, commit) = bench.client.take()
    assert isinstance(opening, Open)
    assert bench.coordinator.num_resyncs == 1
    assert request.hold_until_s == 0.5
    bench.receive(said(answer(commit, 7)))
    assert request.draft is not None


def test_nobody_to_ask_is_said_and_costs_nothing():
    bench = Bench()
    request = bench.request()
    assert bench.ask() == []
    assert request.hold_until_s is None
    assert request.metrics.disabled_reason == "drafter_unavailable"


def test_every_decision_how_much_to_draft_is_counted_and_every_token_that_is_asked_for(bench: Bench):
    bench.request("a", draft_length=3)
    bench.request("b", num_speculative_tokens=0)
    bench.ask()
    drafting = bench.coordinator
    assert (drafting.num_asks, drafting.num_asked_tokens) == (2, 3)
    bench.receive(down())
    bench.ask()
    assert (drafting.num_asks, drafting.num_asked_tokens) == (4, 3), "nobody was there to be asked"


class HeardPricing:
    """A pricing that asks for all that it may, and notes by whose record."""

    price = 0.0

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, bool]] = []

    def ask_all(self, asks: Sequence[Ask]) -> list[AskLength]:
        self.heard += [(ask.drafter_id, ask.bound, ask.needs.predictions) for ask in asks]
        return [AskLength(ask.bound) for ask in asks]


@pytest.fixture
def priced() -> Bench:
    """A coordinator with a pricing that listens."""
    bench = Bench()
    bench.coordinator = parts.coordinator(bench.client, pricing=HeardPricing())
    return bench


def test_a_draft_is_as_long_as_the_record_of_the_drafter_that_will_make_it_says(priced: Bench):
    priced.receive(up("d"), up("e"))
    request = priced.request(drafter_id="d")
    priced.ask()
    request.plan = dataclasses.replace(request.plan, drafter_id="e")
    priced.ask()
    priced.receive(down("e"))
    priced.ask()
    priced.receive(down("d"))
    priced.ask()
    heard = [("d", 3, False), ("e", 3, False), ("d", 3, False), ("", 0, False)]
    assert priced.coordinator._pricing.heard == heard, "with nobody left, nothing is asked of anybody"
    assert request.metrics.disabled_reason is DisabledReason.DRAFTER_UNAVAILABLE


def test_a_request_stays_where_its_session_is_while_its_planned_drafter_is_away(bench: Bench):
    """Its own session must not make a drafter look busier than one that would begin with a prefill."""
    bench.receive(down("d"), up("e"), up("f"))
    request = bench.request(drafter_id="d")
    asked = []
    for token_id in (7, 8, 9):
        asked.append([(drafter_id, type(message).__name__) for drafter_id, message in bench.ask()])
        request.token_ids.append(token_id)
    assert asked == [[("e", "Open"), ("e", "Commit")], [("e", "Commit")], [("e", "Commit")]]


def test_one_request_probes_a_drafter_that_failed_and_the_others_go_elsewhere(bench: Bench):
    """Choosing takes no place: only what is asked does, also not a request that asks for nothing."""
    bench.receive(up("e"))
    breaker = bench.coordinator._drafters["d"].breaker
    for _ in range(BreakerConfig().failure_threshold):
        breaker.record_failure(bench.now_s)
    bench.request("nothing", drafter_id="d", num_speculative_tokens=0)
    for name in ("r0", "r1", "r2"):
        bench.request(name, drafter_id="d")
    asked = {message.request_id: drafter_id for drafter_id, message in bench.ask()}
    assert asked == {"r0": "e", "r1": "e", "r2": "e"}, "it is open"
    bench.now_s += BreakerConfig().open_s
    for request in bench.requests.values():
        request.token_ids.append(9)
    commits = [(drafter_id, message) for drafter_id, message in bench.ask() if isinstance(message, Commit)]
    assert {message.request_id: drafter_id for drafter_id, message in commits} == {"r0": "d", "r1": "e", "r2": "e"}


def test_opt_out_sends_nothing_at_all(bench: Bench):
    request = bench.request(num_speculative_tokens=0)
    assert bench.ask() == []
    assert request.hold_until_s is None
    assert request.metrics.disabled_reason == "request_opt_out"


def test_speculation_that_comes_back_catches_up_with_one_delta(bench: Bench):
    """A request that drafts nothing for a while keeps its session as long as it has a drafter."""
    request = bench.request(drafter_id="d")
    commit = bench.ask()[-1][1]
    bench.receive(said(answer(commit)))
    request.plan = SpeculationPlan(drafter_id="d", draft_length=0, disabled_reason=DisabledReason.LOAD)
    request.token_ids += [4, 5]
    assert bench.ask() == []
    assert request.metrics.disabled_reason == "load"
    request.plan = SpeculationPlan(drafter_id="d", draft_length=2)
    request.token_ids += [6]
    ((_, again),) = bench.ask()
    assert again == Commit(request_id="a", round_id=2, position=3, token_ids=(4, 5, 6), max_length=2)
    assert request.metrics.disabled_reason is None


@pytest.mark.parametrize(
    ("max_tokens", "num_speculative_tokens", "expected"), [(32, None, 3), (32, 2, 2), (3, None, 2), (2, None, 1)]
)
def test_draft_length_leaves_room_for_the_bonus_token(bench: Bench, max_tokens, num_speculative_tokens, expected):
    bench.request(max_tokens=max_tokens, num_speculative_tokens=num_speculative_tokens)
    assert bench.ask()[-1][1].max_length == expected


def test_last_token_needs_no_draft(bench: Bench):
    bench.request(max_tokens=1)
    assert bench.ask() == []


def test_finished_request_is_closed_at_its_drafter(bench: Bench):
    request = bench.request()
    bench.ask()
    bench.coordinator.close(bench.requests.pop("a"))
    assert bench.client.take() == [("d", Close(request_id="a"))]
    bench.coordinator.close(request)
    assert bench.client.take() == []


def test_who_is_switched_off_is_released_by_its_drafter_and_opened_anew_when_on_again(bench: Bench):
    request = bench.request()
    bench.receive(said(answer(bench.ask()[-1][1])))
    plan = request.plan
    request.plan = SpeculationPlan(disabled_reason=DisabledReason.LOAD)
    assert bench.ask() == [("d", Close(request_id="a"))]
    assert bench.ask() == []
    request.plan = plan
    request.token_ids.append(4)
    (_, opening), (_, commit) = bench.ask()
    assert isinstance(opening, Open)
    assert (opening.token_ids, commit.position) == ((1, 2, 3, 4), 4)


def test_a_draft_that_is_late_says_how_long_the_next_one_may_take():
    bench = Bench(first_deadline_s=0.1, max_deadline_s=2.0)
    bench.receive(up())
    request = bench.request()
    *_, (_, commit) = bench.ask()
    bench.now_s = 0.2
    bench.receive()
    assert request.hold_until_s is None
    bench.now_s = 0.7
    bench.receive(said(answer(commit, 7)))
    assert request.draft is None, "its round is over"
    bench.ask()
    assert bench.coordinator.drafters(bench.now_s) == (), "a round with a prefill says nothing of the others"
    (_, commit), *_ = bench.ask()
    bench.now_s = request.hold_until_s + 1.5
    bench.receive()
    bench.receive(said(answer(commit, 7)))
    (of_d,) = bench.coordinator.drafters(bench.now_s)
    assert of_d.round_trip_s > 1.5
    assert of_d.late_share == pytest.approx(1 / 3)
    bench.ask()
    assert request.hold_until_s - bench.now_s > 1.5


def test_what_a_drafter_brings_per_round_is_known_after_some(bench: Bench):
    request = bench.request(max_tokens=100, drafter_id="d")
    for _ in range(18):  # those before fade a little
        (of_d,) = bench.coordinator.drafters(bench.now_s) or (None,)
        assert of_d is None or of_d.accepted_per_round is None
        *_, (_, commit) = bench.ask()
        bench.receive(said(answer(commit, 7, 8)))
        bench.coordinator.observe_verified([(request.request_id, 2, 2)])
        request.token_ids += [7, 8, 9]
        request.draft = None
    (of_d,) = bench.coordinator.drafters(bench.now_s)
    assert of_d.accepted_per_round == pytest.approx(2.0, rel=0.01)
    request.plan = SpeculationPlan(disabled_reason=DisabledReason.LOAD)
    bench.ask()
    assert bench.coordinator.drafters(bench.now_s) == (of_d,), "a round without a drafter is nobody's"


def test_a_drafter_with_weights_of_its_own_is_behind_the_targets_updates(bench: Bench):
    request = bench.request(max_tokens=100, drafter_id="d")
    bench.receive(DrafterEvent(drafter_id="d", weight_version=""))
    for _ in range(2):  # the first round is not timed
        *_, (_, commit) = bench.ask()
        bench.receive(said(answer(commit, 7, 8)))
        request.token_ids += [7, 8, 9]
        request.draft = None
    (of_d,) = bench.coordinator.drafters(bench.now_s)
    assert of_d.num_updates_behind == 0
    bench.coordinator.updates.take_version("v1")
    bench.coordinator.observe_verified([(request.request_id, 200, 20)])
    (of_d,) = bench.coordinator.drafters(bench.now_s)
    assert of_d.num_updates_behind == 1
    bench.receive(DrafterEvent(drafter_id="d", weight_version="v1"))
    (of_d,) = bench.coordinator.drafters(bench.now_s)
    assert of_d.num_updates_behind == 0


class ClosedPricing:
    """A price that nothing exceeds; `probe_length` is asked for all the same."""

    price = NEVER

    def __init__(self) -> None:
        self.probe_length = 0

    def ask_all(self, asks: Sequence[Ask]) -> list[AskLength]:
        return [AskLength(self.probe_length)] * len(asks)


def test_while_no_draft_pays_only_rounds_with_one_are_counted_and_nothing_is_forgotten(bench: Bench):
    pricing = ClosedPricing()
    bench.coordinator._pricing = pricing
    request = bench.request(max_tokens=100, drafter_id="d")
    for _ in range(RETRY_STEPS + 1):
        bench.ask()
    assert bench.coordinator._num_steps == 0
    pricing.probe_length = 2
    for _ in range(18):
        *_, (_, commit) = bench.ask()
        bench.receive(said(answer(commit, 7, 8)))
        request.token_ids.append(9)
        request.draft = None
    (of_d,) = bench.coordinator.drafters(bench.now_s)
    assert of_d.accepted_per_round == 0.0


@pytest.mark.parametrize("slow_s", [0.0, 10.0])
def test_a_drafter_that_is_slow_when_it_joins_is_heard_once_it_is_fast(slow_s: float):
    """It says nothing for so long, then answers within 30 ms: its breaker has long been open."""
    bench = Bench(first_deadline_s=1.0, max_deadline_s=1.0, min_deadline_s=0.02)
    bench.receive(up())
    request = bench.request()
    num_drafts, coming = 0, []
    while bench.now_s < slow_s + 10.0:
        coming += [(max(bench.now_s, slow_s) + 0.03, said(answer(ask, 7))) for _, ask in bench.ask() if is_commit(ask)]
        waits = True
        while waits:
            bench.now_s += 0.005
            bench.receive(*(event for at_s, event in coming if at_s <= bench.now_s))
            coming = [(at_s, event) for at_s, event in coming if at_s > bench.now_s]
            waits = request.hold_until_s is not None
        num_drafts += request.draft is not None
        request.draft = None
    assert num_drafts > 50


def is_commit(message: VerifierMessage) -> bool:
    return isinstance(message, Commit)


def test_failing_drafter_is_left_alone_until_a_probe_succeeds(bench: Bench):
    """Rounds that miss their deadlines open the breaker; then one probe at a time is asked."""
    config = BreakerConfig()
    requests = [bench.request(f"r{index}") for index in range(2)]
    for _ in range(config.failure_threshold):
        assert bench.ask(requests[0])
        bench.now_s = requests[0].hold_until_s + 1e-6
        bench.receive()
    assert bench.ask() == []
    assert requests[0].metrics.disabled_reason == "drafter_timeout"
    assert bench.coordinator.circuits(bench.now_s) == {"d": BreakerState.OPEN}
    bench.now_s += config.open_s
    assert bench.coordinator.circuits(bench.now_s) == {"d": BreakerState.HALF_OPEN}, "the router may send it a probe"
    probe = bench.ask()
    assert {message.request_id for _, message in probe} == {"r0"}, "one probe, not everybody"
    bench.receive(said(answer(probe[-1][1], 7)))
    assert {message.request_id for _, message in bench.ask()} == {"r0", "r1"}


def test_the_round_of_an_attached_draft_is_known_until_the_request_ends():
    bench = Bench()
    request = bench.request()
    bench.receive(up())
    bench.now_s = 1.0
    commit = bench.ask()[-1][1]
    assert bench.coordinator.answered_round(request) is None
    bench.now_s = 1.25
    bench.receive(said(answer(commit, 7)), down())
    answered = bench.coordinator.answered_round(request)
    assert (answered.drafter_id, answered.asked_s, answered.received_s) == ("d", 1.0, 1.25)
    bench.coordinator.close(request)
    assert bench.coordinator.answered_round(request) is None


# --- trees ---


def test_a_tree_is_asked_for_where_more_than_one_token_may_be_deep():
    bench = Bench(max_tree_nodes=7)
    bench.receive(up())
    bench.request("deep")
    bench.request("flat", draft_length=1)
    bench.request("blocks", acceptance=AcceptanceRule.BLOCK)
    asks = {message.request_id: message for _, message in bench.ask() if isinstance(message, Commit)}
    assert {name: (ask.max_length, ask.max_nodes) for name, ask in asks.items()} == {
        "deep": (3, 7),
        "flat": (1, 0),
        "blocks": (3, 0),
    }


@pytest.mark.parametrize(
    ("parents", "is_good"),
    [((-1, -1, 0, 2, 0), True), ((-1, 0, 1, 2), False), ((-1,) * 6, False), ((-1, 1), False), (None, True)],
)
def test_a_tree_is_judged_by_what_was_asked_for(parents, is_good: bool):
    """Up to 3 deep, 5 nodes; a chain is always welcome."""
    bench = Bench(max_tree_nodes=5)
    bench.receive(up())
    request = bench.request()
    commit = bench.ask()[-1][1]
    tokens = range(10, 10 + len(parents or (1, 2, 3)))
    bench.receive(said(answer(commit, *tokens, parents=parents)))
    assert (request.draft is not None) == is_good
    assert bench.coordinator.fallbacks == ({} if is_good else {"bad_draft": 1})


# --- what drafters are told ---


@pytest.mark.parametrize(("states", "needs"), [(None, DraftNeeds(taps=(0,))), (SpanStates(), DraftNeeds())])
def test_nobody_is_told_states_that_it_does_not_need_or_that_are_not_kept(states, needs: DraftNeeds):
    bench = Bench(states)
    bench.receive(up(needs=needs))
    bench.request().num_computed_tokens = 2
    assert [type(message) for _, message in bench.ask()] == [Open, Commit]


def test_another_drafter_gets_all_states():
    bench = Bench(SpanStates())
    bench.receive(up("d", needs=DraftNeeds(taps=(0,))), up("e", needs=DraftNeeds(taps=(0,))))
    request = bench.request(drafter_id="d")
    request.num_computed_tokens = 2
    bench.ask()
    request.plan = SpeculationPlan(drafter_id="e", draft_length=3)
    request.token_ids.append(9)
    request.num_computed_tokens = 3
    assert [span(message) for to, message in bench.ask() if isinstance(message, States)] == [(0, 3)]


class FoundPricing:
    """A pricing that asks for all that may be found, and lets so much of it be computed."""

    price = 0.0

    def __init__(self) -> None:
        self.max_computed = 0

    def ask_all(self, asks: Sequence[Ask]) -> list[AskLength]:
        return [AskLength(ask.bound, None, self.max_computed) for ask in asks]


def test_states_wait_for_an_ask_that_reads_them():
    bench = Bench(SpanStates())
    bench.receive(up(needs=DraftNeeds(taps=(0,), finds_some=True)))
    bench.coordinator._pricing = pricing = FoundPricing()
    request = bench.request()
    request.num_computed_tokens = 2
    (_, opening), (_, commit) = bench.ask()
    assert isinstance(opening, Open)
    assert (commit.max_length, commit.max_computed) == (3, 0), "what is looked up reads none"
    request.token_ids.append(9)
    request.num_computed_tokens, pricing.max_computed = 3, 2
    (_, states), (_, commit) = bench.ask()
    assert (span(states), commit.max_computed) == ((0, 3), 2)


def test_what_may_be_computed_is_told_to_each_of_many():
    bench = Bench()
    bench.receive(up(needs=DraftNeeds(finds_some=True)))
    bench.coordinator._pricing = FoundPricing()
    for name in "abcdef":
        bench.request(name)
    for _ in range(2):  # the first opens their sessions
        commits = [message for _, message in bench.ask() if not isinstance(message, Open)]
        assert [commit.max_computed for commit in commits] == [0] * 6
        bench.receive(*(said(answer(commit)) for commit in commits))


def test_an_ask_carries_predictions_and_forced_tokens_and_a_session_its_salt(bench: Bench):
    request = bench.request()
    request.cache_salt, request.predicted_ids, request.forced_ids = "mine", (4, 5), (6,)
    (_, opening), (_, commit) = bench.ask()
    assert isinstance(opening, Open)
    assert isinstance(commit, Commit)
    assert (opening.cache_salt, commit.predicted_ids, commit.forced_ids) == ("mine", (4, 5), (6,))


def test_needs_are_those_of_the_requests_own_drafter():
    bench = Bench()
    needs = DraftNeeds(predictions=True)
    bench.receive(up("d"), up("e", needs=needs))
    first, second = bench.request("a", drafter_id="d"), bench.request("b", drafter_id="e")
    assert bench.coordinator.needs_of(second) == DraftNeeds(), "it has none yet"
    bench.ask()
    assert bench.coordinator.needs_of(first) == DraftNeeds()
    assert bench.coordinator.needs_of(second) == needs


# --- predictions ---


def predicting(bench: Bench, token_ids: tuple[int, ...], **options) -> Request:
    request = bench.request(**options)
    request.prediction_token_ids = token_ids
    return request


def test_a_prediction_drafts_in_the_place_of_a_drafter():
    bench = Bench()
    bench.receive(DrafterEvent(drafter_id="d"))
    request = predicting(bench, (7, 8, 9, 10, 11))
    assert bench.ask() == []
    assert request.draft is not None
    assert (request.draft.position, request.draft.token_ids, request.draft.draft_probs) == (3, (7, 8, 9), None)
    assert request.hold_until_s is None
    assert request.metrics.enabled


def test_where_the_answer_has_left_its_prediction_a_drafter_is_asked():
    bench = Bench()
    bench.receive(DrafterEvent(drafter_id="d"))
    request = predicting(bench, (7, 8, 9, 10, 11))
    bench.ask()
    request.draft = None
    request.token_ids += [50, 51]
    kinds = [type(message) for _, message in bench.ask()]
    assert kinds == [Open, Commit]
    assert request.hold_until_s is not None


@pytest.mark.parametrize("options", [{"draft_length": 0}, {"num_speculative_tokens": 0}])
def test_where_drafts_are_off_so_is_the_prediction(options: dict):
    bench = Bench()
    bench.receive(DrafterEvent(drafter_id="d"))
    request = predicting(bench, (7, 8, 9), **options)
    bench.ask()
    assert request.draft is None
