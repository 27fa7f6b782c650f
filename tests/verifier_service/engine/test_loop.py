"""The loop on a thread of its own, at the end of a real pipe."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import NoReturn

import pytest

from fakes.engine_bench import PROMPT, EngineBench, Pace, greedy_tokens, make_request
from outrider.verifier_service.drafting.drafter_record import DraftSession
from outrider.verifier_service.engine.loop import engine_load, update_frames
from outrider.verifier_service.engine.step_stats import RecentRates
from outrider.verifier_service.links.relay_client import RelayDraftClient
from outrider.verifier_service.messages.draft import Close
from outrider.verifier_service.messages.engine import (
    FROM_ENGINE,
    Cancel,
    EngineLoad,
    EngineUpdate,
    PeerState,
    Published,
    Relay,
    SetPlans,
)
from outrider.verifier_service.messages.request import (
    DisabledReason,
    FinishReason,
    RequestOutput,
    SpeculationPlan,
    StructuredKind,
    StructuredOutput,
)
from outrider.verifier_service.messages.wire import decode, encode
from outrider.verifier_service.pricing.draft_pricing import DraftPricing
from outrider.verifier_service.pricing.offer import PricedStep
from outrider.verifier_service.sampling.grammar import GrammarCompiler
from tiny.loop_thread import PATIENCE_S
from tiny.looping import NEVER_S, Loop, draft_for, looping, wait_for_drafts


@pytest.fixture(params=Pace, ids=lambda pace: pace.name.lower(), autouse=True)
def pace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every loop of this module is one whose logits are there at once, one whose are late, one that runs ahead."""
    monkeypatch.setattr(Loop, "pace", request.param)


class LearningLast(DraftPricing):
    """Demands that nothing is left to be sent when a step is learnt from."""

    def __init__(self, drafts: RelayDraftClient) -> None:
        super().__init__()
        self.num_learnt = 0
        self._drafts, self._is_due = drafts, False

    def end_step(self, step: PricedStep) -> None:
        super().end_step(step)
        self._is_due = True

    def learn(self) -> None:
        if self._is_due:
            assert self._drafts.take_outbox() == ()
            self.num_learnt += 1
        self._is_due = False
        super().learn()


def test_asks_and_tokens_are_on_their_way_when_a_step_is_learnt_from():
    with looping(make_pricing=LearningLast) as loop:
        loop.say(PeerState(peer="d", is_up=True), make_request("a", max_tokens=4, **wait_for_drafts(2)))
        loop.hear_until(lambda: len(loop.asks()) == 1)
        loop.say(draft_for(loop.asks()[0], ()))
        loop.hear_until(lambda: len(loop.asks()) == 2)
        loop.say(draft_for(loop.asks()[1], ()))
        loop.hear_until(lambda: loop.finished() == {"a"})
        assert loop.engine.pricing.num_learnt >= 2


def test_a_request_that_cannot_run_is_answered_though_no_step_runs():
    with looping() as loop:
        loop.say(make_request("bad", prompt=(97,)))
        loop.hear_until(lambda: loop.outputs)
        (output,) = loop.outputs
        assert (output.request_id, output.finish_reason) == ("bad", FinishReason.ERROR)
        assert "prompt_token_ids" in output.error
        loop.say(make_request("good", max_tokens=1))
        loop.hear_until(lambda: "good" in loop.finished())
        assert sum(output.request_id == "bad" for output in loop.outputs) == 1, "told once"


def test_asks_are_relayed_and_drafts_taken_in():
    expected = greedy_tokens(10)
    with looping() as loop:
        loop.say(PeerState(peer="d", is_up=True, vocab_size=97), make_request("a", max_tokens=5, **wait_for_drafts(3)))
        loop.hear_until(loop.asks)
        assert {relay.peer for relay in loop.relays} == {"d"}
        opened, ask = loop.heard_by_drafter()
        assert (opened.token_ids, ask.max_length) == ((*PROMPT, expected[0]), 3)
        loop.say(draft_for(ask, expected[1:4]))
        loop.hear_until(lambda: "a" in loop.finished())
        assert [output.token_ids for output in loop.outputs] == [expected[:1], expected[1:5]]
        loop.hear_until(lambda: loop.heard_by_drafter()[-1] == Close(request_id="a"))


def test_a_bad_relay_is_counted_and_the_round_still_open():
    expected = greedy_tokens(10)
    with looping() as loop:
        loop.say(PeerState(peer="d", is_up=True), make_request("a", max_tokens=5, **wait_for_drafts(3)))
        loop.hear_until(loop.asks)
        loop.say(Relay(peer="d", payload=b"\xc1 garbage"), draft_for(loop.asks()[0], expected[1:4]))
        loop.hear_until(lambda: "a" in loop.finished())
        assert loop.drafts.num_bad_frames == 1
        loop.hear_until(lambda: loop.loads and loop.loads[-1].counters.num_bad_frames == 1)
        assert loop.outputs[-1].speculation.num_accepted_tokens == 3


def test_a_request_that_is_cancelled_while_its_grammar_is_compiled_is_heard_of_no_more():
    is_loaded = threading.Event()

    def load_tokenizer() -> NoReturn:
        assert is_loaded.wait(PATIENCE_S)
        raise ValueError("structured: there is no tokenizer")

    form = StructuredOutput(kind=StructuredKind.JSON_OBJECT)
    with looping(grammars=GrammarCompiler(load_tokenizer)) as loop:
        loop.say(make_request("a", structured=form), Cancel(request_id="a"), make_request("b", max_tokens=1))
        loop.hear_until(lambda: "b" in loop.finished())
        is_loaded.set()
        loop.say(make_request("c", structured=form))
        loop.hear_until(lambda: "c" in loop.finished())
        assert loop.outputs[-1].error == "structured: there is no tokenizer"
        assert "a" not in loop.finished()


def test_a_loop_that_checks_ends_when_something_is_kept_of_a_request_that_is_gone():
    loop = Loop(NEVER_S)
    loop.engine.drafting._sessions["gone"] = DraftSession("d")
    with pytest.raises((EOFError, ConnectionError)):
        loop.hear_until(lambda: False)
    loop.thread.join(PATIENCE_S)
    assert "gone" in str(loop.error)


def test_plans_reach_the_engine():
    expected = greedy_tokens(10)
    with looping() as loop:
        loop.say(PeerState(peer="d", is_up=True), make_request("a", max_tokens=6, **wait_for_drafts(3)))
        loop.hear_until(loop.asks)
        plan = SpeculationPlan(disabled_reason=DisabledReason.LOAD)
        loop.say(SetPlans(plans={"a": plan}), draft_for(loop.asks()[0], expected[1:2]))
        loop.hear_until(lambda: "a" in loop.finished())
        assert len(loop.asks()) == 1, "off: no ask after the plan"
        assert loop.outputs[-1].speculation.disabled_reason == "load"


def test_a_load_that_halves_is_reported_at_once():
    now_s = 0.0
    with looping(clock=lambda: now_s) as loop:
        loop.hear_until(lambda: loop.loads)
        requests = [make_request(name, num_speculative_tokens=2, **wait_for_drafts(3)) for name in "abc"]
        loop.say(PeerState(peer="d", is_up=True), *requests)
        loop.hear_until(lambda: len(loop.asks()) == 3)
        assert len(loop.loads) == 1, "a load that grows can wait"
        now_s = 1.0
        loop.hear_until(lambda: len(loop.loads) == 2)
        loop.say(Cancel(request_id="a"), Cancel(request_id="b"))
        loop.hear_until(lambda: len(loop.loads) == 3)
        assert [load.num_running for load in loop.loads] == [0, 3, 1]


def test_loads_are_reported_while_every_request_waits_for_its_draft():
    with looping() as loop:
        loop.say(PeerState(peer="d", is_up=True), make_request("a", num_speculative_tokens=2, **wait_for_drafts(3)))
        loop.hear_until(loop.asks)
        num_before = len(loop.loads)
        loop.hear_until(lambda: len(loop.loads) >= num_before + 2)
        load = loop.loads[-1]
        assert (load.num_running, load.num_waiting, load.num_decoding) == (1, 0, 1)
        assert load.kv_usage > 0
        counters = load.counters
        assert (counters.num_steps, counters.num_scheduled_tokens, counters.num_committed_tokens) == (1, len(PROMPT), 1)
        assert (counters.num_prefix_queried_tokens, counters.num_preemptions) == (len(PROMPT), 0)
        assert 0.0 < counters.idle_s < PATIENCE_S
        assert sum(counters.step_s.counts) == sum(counters.queue_s.counts) == 1
        assert (load.circuits[0].drafter_id, load.circuits[0].state) == ("d", "closed")
        (request,) = load.requests
        assert (request.request_id, request.drafter_id) == ("a", "d")
        assert (request.draft_length, request.num_speculative_tokens) == (3, 2)
        assert load.drafters == ()


def test_loads_count_what_drafters_did():
    expected = greedy_tokens(30)
    with looping() as loop:
        loop.say(PeerState(peer="d", is_up=True), make_request("a", **wait_for_drafts(3)))
        loop.hear_until(loop.asks)
        loop.say(draft_for(loop.asks()[0], expected[1:4]))
        loop.hear_until(lambda: len(loop.asks()) == 2)
        loop.say(draft_for(loop.asks()[0], expected[1:4]))  # the old round's: stale
        loop.say(draft_for(loop.asks()[1], expected[5:7]))
        loop.hear_until(lambda: len(loop.asks()) == 3)
        num_before = len(loop.loads)
        loop.hear_until(lambda: len(loop.loads) > num_before)
        load = loop.loads[-1]
        (request,) = load.requests
        assert request.drafter_id == "d"
        counters = load.counters
        assert (counters.num_drafts, counters.num_draft_tokens, counters.num_accepted_tokens) == (2, 5, 5)
        assert load.counters.num_stale_drafts == 1
        assert sum(load.counters.round_trip_s.counts) == 2
        assert load.tokens_per_s > 0.0
        assert load.mean_step_s is not None
        (of_d,) = load.drafters
        assert of_d.drafter_id == "d"
        assert 0 < of_d.round_trip_s < PATIENCE_S


def test_while_a_step_runs_the_one_before_is_told_and_what_arrives_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "pace", Pace.LATE)
    with looping() as loop:
        loop.engine.gate = threading.Semaphore(1)
        loop.say(make_request("a", max_tokens=3))
        loop.hear_until(lambda: loop.outputs)  # of the first step: the second one's gate is closed
        assert loop.runner.is_running
        assert loop.tokens("a") == greedy_tokens(1)
        loop.say(Cancel(request_id="a"), make_request("b", prompt=(1,), max_tokens=3))
        loop.engine.gate.release(20)
        loop.hear_until(lambda: "b" in loop.finished())
        assert loop.tokens("b") == greedy_tokens(3, (1,))
        assert "a" not in loop.finished()
        assert loop.tokens("a") == greedy_tokens(len(loop.tokens("a")))


def test_asks_are_told_before_the_next_step_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "pace", Pace.LATE)
    with looping() as loop:
        loop.engine.gate = threading.Semaphore(1)
        loop.say(PeerState(peer="d", is_up=True), make_request("a", max_tokens=4, **wait_for_drafts(2)))
        loop.say(make_request("b", prompt=(1,), max_tokens=3))
        loop.hear_until(loop.asks)
        assert not loop.outputs, "the step's tokens wait for the next to run, its asks do not"
        loop.engine.gate.release(20)
        loop.hear_until(lambda: "b" in loop.finished())


def test_a_load_says_which_requests_run():
    bench = EngineBench(num_blocks=9)
    for request_id, priority in (("a", 0), ("b", -1)):  # the later one is served first, the other does not fit
        assert (
            bench.engine.add(replace(make_request(request_id, prompt=range(20), max_tokens=8), priority=priority))
            is None
        )
    bench.engine.add(make_request("c", max_tokens=1))
    bench.step()
    load = engine_load(bench.engine, RecentRates(), now_s=0.0)
    assert (load.num_running, load.num_waiting) == (1, 2)
    assert {request.request_id: request.is_running for request in load.requests} == {"b": True, "a": False, "c": False}


def test_a_load_says_how_fast_tokens_came_for_those_with_a_target():
    bench = EngineBench()
    bench.engine.add(replace(make_request("aims"), target_inter_token_ms=30.0))
    bench.add("plain")
    seen = []
    for step_s in (9.0, 0.04, 0.04):  # what comes before the first token is no time between tokens
        bench.now_s += step_s
        bench.step()
        aims, plain = engine_load(bench.engine, RecentRates(), now_s=0.0).requests
        seen.append((aims.target_inter_token_ms, aims.inter_token_ms))
        assert (plain.target_inter_token_ms, plain.inter_token_ms) == (None, None)
    assert seen == [(30.0, None), (30.0, pytest.approx(40.0)), (30.0, pytest.approx(40.0))]


@pytest.mark.parametrize(("num_outputs", "num_relays"), [(0, 9), (9, 0), (1, 1), (5, 4)])
def test_an_update_that_is_too_large_comes_in_several_frames_in_order(num_outputs: int, num_relays: int):
    update = EngineUpdate(
        outputs=tuple(Published.of(RequestOutput(request_id=str(i), token_ids=(1,) * 50)) for i in range(num_outputs)),
        relays=tuple(Relay(peer="d", payload=bytes([i]) * 50) for i in range(num_relays)),
        load=EngineLoad(num_running=1, num_waiting=0, num_decoding=0, kv_usage=0.0),
    )
    max_bytes = len(encode(update)) - 1
    frames = list(update_frames(update, max_bytes))
    assert len(frames) > 1
    assert max(map(len, frames)) <= max_bytes
    parts = [decode(frame, FROM_ENGINE) for frame in frames]
    assert [output.opened() for part in parts for output in part.outputs] == [each.opened() for each in update.outputs]
    assert tuple(relay for part in parts for relay in part.relays) == update.relays
    assert [part.load for part in parts if part.load is not None] == [update.load]
    assert list(update_frames(update)) == [encode(update)]


def test_the_loop_ends_quietly_when_the_pipe_closes_between_steps():
    loop = Loop(NEVER_S)
    execute, entered, release = loop.runner.execute, threading.Event(), threading.Event()

    def slow(batch, chosen):
        entered.set()
        release.wait(PATIENCE_S)
        return execute(batch, chosen)

    loop.runner.execute = slow
    loop.say(make_request("a"))
    assert entered.wait(PATIENCE_S)
    loop.pipe.close()
    release.set()
    loop.end()
