"""Pauses, updates and their answers, over the loop's pipe: at every pace, with requests that wait for a draft."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from fakes.engine_bench import PROMPT, Pace, greedy_tokens, make_request
from outrider.verifier_service.formats.checkpoint import WeightError
from outrider.verifier_service.messages.engine import (
    Cancel,
    ContinueGeneration,
    ControlResult,
    DestroyWeightsGroup,
    FlushCache,
    InitWeightsGroup,
    PauseGeneration,
    PauseMode,
    PeerState,
    PeerWeights,
    UpdateDraftWeights,
    UpdateWeights,
    WeightChange,
)
from outrider.verifier_service.messages.request import FinishReason
from tiny.loop_thread import PATIENCE_S
from tiny.looping import Loop, draft_for, looping, wait_for_drafts

GROUP = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 2, "group_name": "g"}
LONG = tuple(range(3, 23))  # a prompt of several whole blocks


@pytest.fixture(params=Pace, ids=lambda pace: pace.name.lower(), autouse=True)
def pace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "pace", request.param)


class Played:
    """Weights whose changes are ready once they may be, and then made by `change`."""

    def __init__(self, change: Callable[[WeightChange], int], *, is_ready: bool = True) -> None:
        self.digest, self.missing = "d", ("w",)
        self.is_ready = is_ready
        self.begun: list[WeightChange] = []
        self.abandoned: list[WeightChange] = []
        self._change = change

    def begin(self, message: WeightChange) -> None:
        self.begun.append(message)

    def finish(self, *, is_abandoned: bool = False) -> int:
        message = self.begun[-1]
        if is_abandoned:
            self.abandoned.append(message)
            self.is_ready = True
            raise WeightError("the group was left")
        return self._change(message)


def answer(loop: Loop, call_id: str) -> ControlResult:
    """Wait for the only answer to a call."""
    loop.hear_until(lambda: call_id in {result.call_id for result in loop.results})
    (result,) = [result for result in loop.results if result.call_id == call_id]
    return result


def call(loop: Loop, message: Any) -> ControlResult:
    loop.say(message)
    return answer(loop, message.call_id)


def begin_and_wait_for_a_draft(loop: Loop, request_id: str = "a") -> None:
    """Bring a request to where it has some tokens and waits for a draft."""
    loop.say(PeerState(peer="d", is_up=True, vocab_size=97), make_request(request_id, **wait_for_drafts(2)))
    loop.hear_until(loop.asks)
    loop.hear_until(lambda: loop.tokens(request_id))


def deliver(loop: Loop) -> None:
    ask = loop.asks()[-1]
    after = ask.position + len(ask.token_ids) - len(PROMPT)
    loop.say(draft_for(ask, greedy_tokens(after + 2)[after:]))


def test_keep_runs_no_step_and_goes_on_afterwards():
    with looping() as loop:
        begin_and_wait_for_a_draft(loop)
        assert call(loop, PauseGeneration(call_id="p", mode=PauseMode.KEEP)).num_requests == 1
        num_batches = len(loop.runner.batches)
        deliver(loop)
        loop.say(make_request("b"))
        loop.hear_until(lambda: loop.loads and loop.loads[-1].num_waiting == 1)
        assert loop.loads[-1].is_paused
        assert len(loop.runner.batches) == num_batches
        assert call(loop, PauseGeneration(call_id="p2", mode=PauseMode.KEEP)).error is None
        assert call(loop, ContinueGeneration(call_id="c")).error is None
        loop.say(PeerState(peer="d", is_up=False))
        loop.hear_until(lambda: loop.finished() == {"a", "b"})
        assert loop.tokens("a") == loop.tokens("b") == greedy_tokens(32)
        assert any(output.num_accepted_tokens for output in loop.outputs), "the draft that came meanwhile is used"


def test_a_lease_that_nobody_renews_ends_the_pause():
    with looping() as loop:
        begin_and_wait_for_a_draft(loop)
        assert call(loop, PauseGeneration(call_id="p", mode=PauseMode.KEEP, lease_s=600.0, asked_s=7.0)).is_paused
        loop.hear_until(lambda: loop.loads and loop.loads[-1].pause_asked_s == 7.0)
        assert 500.0 < loop.loads[-1].pause_left_s <= 600.0
        assert call(loop, PauseGeneration(call_id="p2", mode=PauseMode.KEEP, lease_s=0.05, asked_s=8.0)).is_paused
        loop.hear_until(lambda: not loop.loads[-1].is_paused)
        assert (loop.loads[-1].pause_asked_s, loop.loads[-1].pause_left_s) == (8.0, None)
        loop.say(PeerState(peer="d", is_up=False))
        loop.hear_until(lambda: loop.finished() == {"a"})
        assert loop.tokens("a") == greedy_tokens(32)
        assert call(loop, PauseGeneration(call_id="p3", mode=PauseMode.KEEP)).is_paused
        loop.hear_until(lambda: loop.loads[-1].is_paused)
        assert loop.loads[-1].pause_left_s is None, "a pause without a lease stays"


def test_the_newest_order_holds_in_whichever_order_they_come():
    with looping() as loop:
        begin_and_wait_for_a_draft(loop)
        assert not call(loop, ContinueGeneration(call_id="c", asked_s=9.0)).is_paused
        for old_s in (8.0, 9.0):
            late = call(loop, PauseGeneration(call_id=f"late {old_s}", asked_s=old_s))
            assert (late.error, late.is_paused) == (None, False)
        assert not loop.finished(), "nothing was aborted"
        assert call(loop, PauseGeneration(call_id="p", mode=PauseMode.KEEP, asked_s=10.0)).is_paused
        assert call(loop, ContinueGeneration(call_id="old", asked_s=9.5)).is_paused
        assert not call(loop, ContinueGeneration(call_id="new", asked_s=11.0)).is_paused
        loop.say(PeerState(peer="d", is_up=False))
        loop.hear_until(lambda: loop.finished() == {"a"})


def test_an_engine_without_a_trainer_takes_no_orders():
    with looping(takes_orders=False) as loop:
        begin_and_wait_for_a_draft(loop)
        for message in (
            PauseGeneration(call_id="pause"),
            ContinueGeneration(call_id="go on"),
            FlushCache(call_id="flush"),
            UpdateWeights(call_id="update", folder="/w"),
            UpdateDraftWeights(call_id="draft", folder="/w"),
            DestroyWeightsGroup(call_id="leave", group_name="g"),
        ):
            assert "not for rollouts" in str(call(loop, message).error)
        loop.say(PeerState(peer="d", is_up=False))
        loop.hear_until(lambda: loop.finished() == {"a"})
        assert loop.tokens("a") == greedy_tokens(32), "it ran on"


def test_abort_ends_all_requests_and_new_ones_queue():
    with looping() as loop:
        begin_and_wait_for_a_draft(loop)
        assert call(loop, PauseGeneration(call_id="p")).num_requests == 1
        ended = [output for output in loop.outputs if output.finish_reason is not None]
        assert [(output.request_id, output.finish_reason, output.token_ids) for output in ended] == [
            ("a", FinishReason.ABORT, ())
        ]
        loop.hear_until(lambda: loop.loads and loop.loads[-1].is_paused and not loop.loads[-1].num_running)
        loop.say(make_request("b"))
        loop.hear_until(lambda: loop.loads[-1].num_waiting == 1)
        assert call(loop, ContinueGeneration(call_id="c")).error is None
        loop.hear_until(lambda: loop.finished() == {"a", "b"})
        assert loop.tokens("b") == greedy_tokens(32)


def test_wait_is_answered_when_requests_have_finished_and_new_ones_queue():
    with looping() as loop:
        begin_and_wait_for_a_draft(loop)
        loop.say(PauseGeneration(call_id="p", mode=PauseMode.WAIT), make_request("b"), make_request("gone"))
        loop.hear_until(lambda: loop.loads and loop.loads[-1].num_waiting == 2)
        loop.say(Cancel(request_id="gone"))
        loop.hear_until(lambda: loop.loads[-1].num_waiting == 1)
        assert not loop.results
        loop.say(PeerState(peer="d", is_up=False))  # "a" goes on without drafts
        assert answer(loop, "p").error is None
        assert (loop.tokens("a"), loop.tokens("b")) == (greedy_tokens(32), ())
        assert call(loop, ContinueGeneration(call_id="c")).error is None
        loop.hear_until(lambda: loop.finished() == {"a", "b"})
        assert loop.tokens("b") == greedy_tokens(32)


def test_a_wait_that_is_overtaken_is_answered():
    with looping() as loop:
        begin_and_wait_for_a_draft(loop)
        loop.say(PauseGeneration(call_id="p", mode=PauseMode.WAIT), make_request("b"))
        assert call(loop, ContinueGeneration(call_id="c")).error is None
        assert "generation was continued" in str(answer(loop, "p").error)
        loop.hear_until(lambda: "b" in loop.finished())
        loop.say(PauseGeneration(call_id="p2", mode=PauseMode.WAIT))
        assert call(loop, PauseGeneration(call_id="p3", mode=PauseMode.ABORT)).error is None
        assert "newer call" in str(answer(loop, "p2").error)
        assert loop.finished() == {"a", "b"}


def test_a_wait_of_an_idle_engine_is_answered_at_once():
    with looping() as loop:
        assert call(loop, PauseGeneration(call_id="p", mode=PauseMode.WAIT)).error is None
        loop.say(make_request("a"))
        loop.hear_until(lambda: loop.loads and loop.loads[-1].num_waiting == 1)
        call(loop, ContinueGeneration(call_id="c"))
        loop.hear_until(lambda: loop.finished() == {"a"})


def test_an_update_between_two_steps_names_the_tokens_that_follow():
    updates: list[tuple[Any, bool]] = []
    with looping(weights=Played(lambda message: updates.append((message, is_in_flight())) or 0)) as loop:

        def is_in_flight() -> bool:
            return getattr(loop.engine, "_next", None) is not None

        begin_and_wait_for_a_draft(loop)
        loop.say(make_request("beside", max_tokens=40))
        loop.hear_until(lambda: loop.tokens("beside"))
        result = call(loop, UpdateWeights(call_id="u", folder="f", weight_version="v7"))
        assert (result.error, result.weight_version) == (None, "v7")
        num_before = len([output for output in loop.outputs if output.request_id == "a"])
        loop.say(PeerState(peer="d", is_up=False))
        loop.hear_until(lambda: loop.finished() == {"a", "beside"})
        outputs = [output for output in loop.outputs if output.request_id == "a"]
        versions = [output.weight_version for output in outputs]
        assert versions == ["default"] * num_before + ["v7"] * (len(outputs) - num_before)
        assert updates == [(UpdateWeights(call_id="u", folder="f", weight_version="v7"), False)]
        loop.loads.clear()
        loop.hear_until(lambda: loop.loads)
        assert (loop.loads[-1].weight_version, loop.loads[-1].weights_error) == ("v7", None)
        assert loop.engine.drafting.filing.weight_version == "v7", "histories are filed under it"
        assert call(loop, UpdateWeights(call_id="unnamed", folder="f")).weight_version == "2"


def test_a_half_streamed_update_is_not_gone_on_with():
    missing = [7, 3, 0, 5, 0]
    with looping(weights=Played(lambda message: missing.pop(0))) as loop:
        call(loop, PauseGeneration(call_id="p", mode=PauseMode.KEEP))
        results = [call(loop, UpdateWeights(call_id=name, group_name="g", weight_version="v1")) for name in "xy"]
        assert [result.num_missing_tensors for result in results] == [7, 3]
        assert {result.weight_version for result in results} == {"default"}
        assert "3 tensors are missing, 'w' among them" in str(call(loop, ContinueGeneration(call_id="no")).error)
        loop.say(make_request("a"))
        result = call(loop, UpdateWeights(call_id="z", group_name="g", weight_version="v1"))
        assert (result.num_missing_tensors, result.weight_version) == (0, "v1")
        assert not loop.outputs
        assert call(loop, ContinueGeneration(call_id="yes")).error is None
        loop.hear_until(lambda: loop.finished() == {"a"})
        call(loop, UpdateWeights(call_id="half", group_name="g"))
        assert call(loop, DestroyWeightsGroup(call_id="end", group_name="g")).error is None
        assert call(loop, ContinueGeneration(call_id="anew")).error is None


def test_an_update_that_is_refused_changes_nothing():
    def refuse(message: Any) -> int:
        raise WeightError("'lm_head' does not fit")

    with looping(weights=Played(refuse)) as loop:
        begin_and_wait_for_a_draft(loop)
        result = call(loop, UpdateWeights(call_id="u", folder="f", weight_version="v7"))
        assert (result.error, result.weight_version) == ("'lm_head' does not fit", "default")
        loop.say(PeerState(peer="d", is_up=False))
        loop.hear_until(lambda: loop.finished() == {"a"})
        assert loop.tokens("a") == greedy_tokens(32)


def test_an_engine_is_not_silent_while_its_weights_change():
    """Its shell gives up a silent one."""
    may_end = threading.Event()
    with looping(weights=Played(lambda message: 0 if may_end.wait(PATIENCE_S) else 1)) as loop:
        loop.say(UpdateWeights(call_id="u", folder="f"))
        loop.hear_until(lambda: len(loop.loads) >= 4)
        assert not loop.results
        may_end.set()
        assert answer(loop, "u").error is None


def test_steps_go_on_while_a_change_is_not_ready_and_the_end_of_its_group_breaks_it_off():
    weights = Played(lambda message: 0, is_ready=False)
    with looping(weights=weights) as loop:
        loop.say(InitWeightsGroup(call_id="join", **GROUP))
        for number in range(2):
            name = str(number)
            loop.say(make_request(name))
            loop.hear_until(lambda name=name: name in loop.finished())
        assert not loop.results, "nobody has joined"
        second = call(loop, UpdateWeights(call_id="second", folder="f"))
        assert "another change" in str(second.error)
        assert call(loop, DestroyWeightsGroup(call_id="end", group_name="g")).error is None
        assert answer(loop, "join").error == "the group was left"
        assert [message.call_id for message in weights.begun] == ["join", "end"]
        assert [message.call_id for message in weights.abandoned] == ["join"]
        weights.is_ready = False
        loop.say(UpdateWeights(call_id="folder", folder="f", weight_version="v7"))
        assert "another change" in str(call(loop, DestroyWeightsGroup(call_id="no", group_name="g")).error)
        weights.is_ready = True  # no message wakes the loop
        result = answer(loop, "folder")
        assert (result.error, result.weight_version, result.weight_digest) == (None, "v7", "d")
        loop.loads.clear()
        loop.hear_until(lambda: loop.loads)
        assert loop.loads[-1].weights_digest == "d"


def test_an_engine_whose_weights_cannot_change_says_so():
    with looping() as loop:
        assert "cannot change" in str(call(loop, UpdateWeights(call_id="u", folder="f")).error)


def test_the_drafter_in_the_engines_process_gets_its_weights_between_two_steps():
    may_end = threading.Event()

    def change_draft(message: UpdateDraftWeights) -> ControlResult:
        assert may_end.wait(PATIENCE_S)
        return ControlResult(call_id=message.call_id, weight_version=str(message.weight_version))

    with looping(change_draft=change_draft) as loop:
        loop.say(make_request("a"), UpdateDraftWeights(call_id="u", folder="f", weight_version="v7"))
        loop.hear_until(lambda: len(loop.loads) >= 4)
        assert not loop.results, "an engine is not silent meanwhile"
        may_end.set()
        assert answer(loop, "u") == ControlResult(call_id="u", weight_version="v7")
        loop.hear_until(lambda: loop.finished() == {"a"})
        assert {output.weight_version for output in loop.outputs} == {"default"}, "the target's"


def test_an_engine_without_a_drafter_in_its_process_says_so():
    with looping() as loop:
        result = call(loop, UpdateDraftWeights(call_id="u", folder="f"))
        assert result.error == "no drafter runs in this verifier's process"


def test_a_linked_drafter_is_behind_until_it_tells_of_an_update():
    with looping(weights=Played(lambda message: 0)) as loop:

        def num_behind() -> int | None:
            loop.loads.clear()
            loop.hear_until(lambda: loop.loads and loop.loads[-1].drafters)
            return loop.loads[-1].drafters[0].num_updates_behind

        loop.say(PeerState(peer="d", is_up=True, vocab_size=97), PeerWeights(peer="d", weight_version=""))
        loop.say(make_request("a", **wait_for_drafts(2)))
        loop.hear_until(loop.asks)
        loop.hear_until(lambda: loop.tokens("a"))
        for _ in range(2):  # the first round is not timed
            num_asks = len(loop.asks())
            deliver(loop)
            loop.hear_until(lambda num_asks=num_asks: len(loop.asks()) > num_asks)
        assert num_behind() == 0
        call(loop, UpdateWeights(call_id="1", folder="f", weight_version="v1"))
        call(loop, UpdateWeights(call_id="2", folder="f", weight_version="v2"))
        assert num_behind() == 2
        loop.say(PeerWeights(peer="d", weight_version="v2"))
        loop.hear_until(lambda: num_behind() == 0)


def test_a_flush_empties_the_cache_and_waits_for_nobody():
    with looping() as loop:
        for name in ("a", "b"):
            loop.say(make_request(name, prompt=LONG, max_tokens=4))
            loop.hear_until(lambda name=name: name in loop.finished())
        begin_and_wait_for_a_draft(loop, "busy")
        assert call(loop, FlushCache(call_id="f")).error == "1 requests hold KV"
        loop.say(Cancel(request_id="busy"))
        assert call(loop, FlushCache(call_id="g")).error is None
        loop.say(make_request("c", prompt=LONG, max_tokens=4))
        loop.hear_until(lambda: "c" in loop.finished())
        cached = {output.request_id: output.num_cached_tokens for output in loop.outputs}
        assert (cached["a"], cached["b"] > 0, cached["c"]) == (0, True, 0)
