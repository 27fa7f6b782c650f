"""Requests that change their verifier: tokens, drafts, and what is refused, over the embedded target and its head."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from outrider.verifier_service.handover import giver as giver_module
from outrider.verifier_service.messages.handover import GIVER_MESSAGES, KVPart, KVSource
from outrider.verifier_service.messages.request import FinishReason
from outrider.verifier_service.messages.wire import decode, encode
from tiny.handing import Ferry, HandingEngine, ask, per_position, prompts, was_refused

SAMPLINGS = {"greedy": {}, "seeded": {"temperature": 0.8, "seed": 5}}


@pytest.fixture(scope="module")
def engines() -> tuple[HandingEngine, HandingEngine, HandingEngine]:
    """One that does all by itself, a giver and a taker."""
    return HandingEngine(), HandingEngine(), HandingEngine()


@pytest.fixture
def single(engines: tuple[HandingEngine, ...]) -> HandingEngine:
    return emptied(engines[0])


@pytest.fixture
def giver(engines: tuple[HandingEngine, ...]) -> HandingEngine:
    return emptied(engines[1])


@pytest.fixture
def taker(engines: tuple[HandingEngine, ...]) -> HandingEngine:
    return emptied(engines[2])


def emptied(engine: HandingEngine) -> HandingEngine:
    """An engine that nothing is left in of the test before."""
    for name in list(engine.engine.requests):
        engine.engine.cancel(name)
    engine.handovers.close()
    engine.handovers.pump()
    engine.handovers.taker.take_calls()
    engine.engine.scheduler.flush_cache()
    engine.outputs.clear()
    return engine


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_tokens_and_drafts_are_those_of_one_verifier(single, giver, taker, sampling):
    for index, prompt in enumerate(prompts()):
        (expected,) = single.run(ask(f"alone {index}", prompt, sampling=sampling))
        tokens = Ferry(giver, taker).hand_over(ask(f"given {index}", prompt, sampling=sampling), f"taken {index}")
        assert tokens == expected
        rounds, wanted = per_position(taker, f"taken {index}"), per_position(single, f"alone {index}")
        assert rounds == wanted, "the head drafts as if nothing had been, from the first round on"
        assert sum(accepted for _, accepted in rounds) > 0
    assert giver.engine.scheduler.kv_usage == taker.engine.scheduler.kv_usage == 0.0


def test_kv_leaves_while_the_prompt_is_computed(giver, taker):
    ferry = Ferry(giver, taker)
    message = ask("a", prompts()[0])
    giver.add(replace(message, hands_over=True))
    taker.add(replace(message, request_id="b", kv_source=KVSource(endpoint="", request_id="a")))
    giver.step()
    ferry.round()
    assert ferry.num_frames == 1
    assert not giver.outputs, "the prompt has chunks left"


def test_a_taker_may_come_before_the_request_and_long_after(single, giver, taker):
    (expected,) = single.run(ask("alone", prompts()[0]))
    message = ask("a", prompts()[0])
    ferry = Ferry(giver, taker)
    taker.add(replace(message, request_id="b", kv_source=KVSource(endpoint="", request_id="a")))
    ferry.round()
    giver.add(replace(message, hands_over=True))
    for _ in range(8):
        giver.step()
    assert [output.is_held for output in giver.outputs] == [True]
    while not taker.has_ended("b"):
        ferry.round()
        taker.step()
    assert giver.tokens("a") + taker.tokens("b") == expected


def test_a_request_that_runs_moves_on_with_its_kv(single, giver, taker):
    (expected,) = single.run(ask("alone", prompts()[1]))
    giver.add(ask("a", prompts()[1]))
    while len(giver.tokens("a")) < 9:
        giver.step()
    held = giver.engine.hold()
    assert [(output.request_id, output.token_ids, output.is_held) for output in held] == [("a", (), True)]
    assert giver.engine.hold() == [], "it is held already"
    giver.step()
    published = tuple(giver.tokens("a"))
    source = KVSource(endpoint="", request_id="a")
    taker.add(replace(ask("b", prompts()[1]), output_token_ids=published, kv_source=source))
    num_before = taker.engine.stats.num_scheduled_tokens
    ferry = Ferry(giver, taker)
    while not taker.has_ended("b"):
        ferry.round()
        taker.step()
    assert [*published, *taker.tokens("b")] == expected
    num_drafted = sum(num for num, _ in per_position(taker, "b"))
    num_rounds = len(taker.outputs_of("b"))
    num_scheduled = taker.engine.stats.num_scheduled_tokens - num_before
    assert num_scheduled == num_rounds + num_drafted, "nothing was computed again"


def test_kv_of_other_tokens_than_were_published_is_refused(giver, taker):
    giver.add(ask("a", prompts()[1]))
    while len(giver.tokens("a")) < 9:
        giver.step()
    giver.engine.hold()
    giver.step()
    *published, last = giver.tokens("a")
    others = (*published, last ^ 1)
    source = KVSource(endpoint="", request_id="a")
    taker.add(replace(ask("b", prompts()[1]), output_token_ids=others, kv_source=source))
    ferry = Ferry(giver, taker)
    while not taker.outputs_of("b"):
        ferry.round()
        taker.step()
    assert was_refused(taker.outputs_of("b"))
    assert taker.outputs_of("b")[0].error == "the giver has other tokens than were published"


def test_a_full_verifier_gives_its_least_senior_request_and_no_other_while_that_stands(giver):
    for name in "abc":
        giver.add(ask(name, prompts()[0], sampling={"max_tokens": 64}))
    while not all(giver.tokens(name) for name in "abc"):
        giver.step()
    assert [output.request_id for output in giver.engine.hold(1)] == ["c"]
    assert giver.engine.hold(1) == []
    assert [output.request_id for output in giver.engine.hold(2)] == ["b"]
    giver.engine.cancel("c")
    giver.step()
    assert [output.request_id for output in giver.engine.hold()] == ["a"]


def test_a_taker_that_draws_anew_says_the_whole_answer(single, giver, taker):
    (expected,) = single.run(ask("alone", prompts()[0]))
    message = ask("a", prompts()[0])
    assert Ferry(giver, taker).hand_over(message, draws_anew=True) == expected


def test_a_request_that_nobody_takes_goes_on_by_itself(single, giver, monkeypatch):
    monkeypatch.setattr("outrider.verifier_service.engine.engine.HOLD_S", 0.0)
    (expected,) = single.run(ask("alone", prompts()[0]))
    assert giver.run(replace(ask("a", prompts()[0]), hands_over=True)) == [expected]
    assert [output.is_held for output in giver.outputs].count(True) == 1


def test_a_first_token_that_ends_the_request_ends_it_at_the_giver(giver):
    (tokens,) = giver.run(replace(ask("a", prompts()[0], sampling={"max_tokens": 1}), hands_over=True))
    assert len(tokens) == 1
    assert giver.outputs[-1].finish_reason is FinishReason.LENGTH
    assert not giver.outputs[-1].is_held


def test_a_giver_that_is_lost_leaves_nothing_behind(giver, taker):
    ferry = Ferry(giver, taker)
    message = ask("a", prompts()[0])
    giver.add(replace(message, hands_over=True))
    taker.add(replace(message, request_id="b", kv_source=KVSource(endpoint="", request_id="a")))
    giver.step()
    ferry.round()
    ferry.cut()
    assert was_refused(taker.outputs_of("b"))
    assert len(taker.handovers.taker) == 0


def after_a_preemption(giver: HandingEngine) -> None:
    giver.step()
    giver.engine.scheduler.preempt_all()


def after_it_went_on(giver: HandingEngine) -> None:
    while not giver.outputs:
        giver.step()
    giver.engine.requests["a"].stands_until_s = 0.0
    giver.step()


def with_newer_weights(giver: HandingEngine) -> None:
    giver.step()
    giver.engine.take_version("newer")


def after_its_end(giver: HandingEngine) -> None:
    giver.step()
    giver.engine.cancel("a")


REFUSALS: dict[str, Callable[[HandingEngine], None]] = {
    "preempted": after_a_preemption,
    "went_on": after_it_went_on,
    "other_weights": with_newer_weights,
    "ended": after_its_end,
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_what_has_changed_is_not_given(giver, taker, reason):
    message = ask("a", prompts()[0])
    giver.add(replace(message, hands_over=True))
    source = KVSource(endpoint="", request_id="a")
    ferry = Ferry(giver, taker)
    if reason != "went_on":
        taker.add(replace(message, request_id="b", kv_source=source))
        giver.step()
        ferry.round()
    REFUSALS[reason](giver)
    if reason == "went_on":
        taker.add(replace(message, request_id="b", kv_source=source))
    ferry.round()
    assert was_refused(taker.outputs_of("b"))
    assert taker.outputs_of("b")[0].error == reason
    giver.engine.take_version("default")


@pytest.mark.parametrize("field", ["fingerprint", "weight_version"])
def test_other_models_and_weights_are_refused(giver, taker, monkeypatch, field):
    if field == "fingerprint":
        monkeypatch.setattr(taker.kv, "fingerprint", "another model")
    else:
        monkeypatch.setattr(taker.handovers.taker, "_weight_version", lambda: "newer")
    message = ask("a", prompts()[0])
    giver.add(replace(message, hands_over=True))
    taker.add(replace(message, request_id="b", kv_source=KVSource(endpoint="", request_id="a")))
    Ferry(giver, taker).round()
    assert was_refused(taker.outputs_of("b"))


def test_a_taker_that_reads_slowly_fills_no_memory(single, giver, taker, monkeypatch):
    (expected,) = single.run(ask("alone", prompts()[0]))
    room = 8 * giver.kv.num_bytes_per_token
    monkeypatch.setattr(giver_module, "MAX_PART_BYTES", 2 * giver.kv.num_bytes_per_token)
    monkeypatch.setattr(giver_module, "MAX_UNREAD_BYTES", room)
    message, ferry = ask("a", prompts()[0]), Ferry(giver, taker)
    giver.add(replace(message, hands_over=True))
    taker.add(replace(message, request_id="b", kv_source=KVSource(endpoint="", request_id="a")))
    ferry.is_slow = True
    for _ in range(10):
        giver.step()
        ferry.round()
        assert ferry.num_unread_bytes < 1.5 * room
    assert ferry.num_unread_bytes > 0.5 * room
    assert not giver.handovers.is_busy, "it waits for the taker's word"
    ferry.is_slow = False
    while not taker.has_ended("b"):
        giver.step()
        ferry.round()
        taker.step()
    assert giver.tokens("a") + taker.tokens("b") == expected


def test_kv_beyond_the_requests_own_length_is_refused_as_it_comes(giver, taker):
    def longer(payload: bytes) -> bytes:
        part = decode(payload, GIVER_MESSAGES)
        if not isinstance(part, KVPart):
            return payload
        num = 4 * len(prompts()[0])
        return encode(replace(part, start=0, stop=num, data=bytes(num * giver.kv.num_bytes_per_token)))

    message = ask("a", prompts()[0], sampling={"max_tokens": 2})
    ferry = Ferry(giver, taker, longer)
    giver.add(replace(message, hands_over=True))
    taker.add(replace(message, request_id="b", kv_source=KVSource(endpoint="", request_id="a")))
    while not taker.outputs_of("b"):
        giver.step()
        ferry.round()
    assert was_refused(taker.outputs_of("b"))
    assert "tokens at most" in str(taker.outputs_of("b")[0].error)


def test_an_unknown_request_is_refused_after_a_while(giver, taker, monkeypatch):
    monkeypatch.setattr(giver_module, "EARLY_S", 0.0)
    taker.add(replace(ask("b", prompts()[0]), kv_source=KVSource(endpoint="", request_id="nobody")))
    ferry = Ferry(giver, taker)
    while not taker.outputs:
        ferry.round()
    assert taker.outputs[0].error == "unknown_request"


def test_kv_waits_until_blocks_are_free(single, giver, taker):
    (expected,) = single.run(ask("alone", prompts()[0]))
    pool = taker.engine.scheduler._pool
    kept = pool.allocate(pool.num_free_blocks)
    message = ask("a", prompts()[0])
    ferry = Ferry(giver, taker)
    giver.add(replace(message, hands_over=True))
    taker.add(replace(message, request_id="b", kv_source=KVSource(endpoint="", request_id="a")))
    for _ in range(8):
        giver.step()
        ferry.round()
        assert taker.engine.step() is None
    assert taker.engine.scheduler.num_waiting == 1
    pool.release(kept)
    while not taker.has_ended("b"):
        taker.step()
    assert giver.tokens("a") + taker.tokens("b") == expected


def test_the_takers_own_prefix_is_not_written_again(single, giver, taker):
    (expected,) = single.run(ask("alone", prompts()[0]))
    taker.run(ask("before", prompts()[0], sampling={"max_tokens": 1}))
    written = []
    write = taker.kv.write
    taker.kv.write = lambda table, start, stop, data: (written.append(start), write(table, start, stop, data))
    assert Ferry(giver, taker).hand_over(ask("a", prompts()[0])) == expected
    taker.kv.write = write
    assert min(written) == (len(prompts()[0]) - 1) // 16 * 16


def test_kv_on_its_way_is_bounded(giver, taker, monkeypatch):
    """A second request is not taken while the first one's KV fills the host's share; what is written counts no more."""
    monkeypatch.setattr("outrider.verifier_service.handover.taker.MAX_HOST_BYTES", 1)
    first, second = (ask(name, prompts()[0]) for name in ("a", "b"))
    ferry = Ferry(giver, taker)
    for message in (first, second):
        giver.add(replace(message, hands_over=True))
        source = KVSource(endpoint="", request_id=message.request_id)
        taker.add(replace(message, request_id=f"{message.request_id} on", kv_source=source))
    ferry.round()
    assert was_refused(taker.outputs_of("b on"))
    assert taker.outputs_of("b on")[0].error == "no_room"
    while not taker.has_ended("a on"):
        giver.step()
        ferry.round()
        taker.step()
    third = ask("c", prompts()[1])
    assert Ferry(giver, taker).hand_over(third, "c on"), "there is room again"
    assert not was_refused(taker.outputs_of("c on"))


# --- planted defects: what the tests above would miss if they could not see it ---


def bent(change: Callable[[bytearray, int], None]) -> Callable[[bytes], bytes]:
    """Change the data of every part; `change` gets it with the bytes of a position."""

    def bend(payload: bytes) -> bytes:
        message = decode(payload, GIVER_MESSAGES)
        if not isinstance(message, KVPart):
            return payload
        data = bytearray(message.data)
        change(data, len(data) // (message.stop - message.start))
        return encode(replace(message, data=bytes(data)))

    return bend


def test_kv_of_the_wrong_positions_is_seen(single, giver, taker):
    def repeat(data: bytearray, width: int) -> None:
        data[:] = data[:width] * (len(data) // width)

    (expected,) = single.run(ask("alone", prompts()[0]))
    assert Ferry(giver, taker, bent(repeat)).hand_over(ask("a", prompts()[0])) != expected


def test_states_of_the_wrong_positions_cost_acceptance_and_no_token(single, giver, taker):
    num_kv_bytes = giver.kv._num_kv_bytes

    def shift(data: bytearray, width: int) -> None:
        for place in range(0, len(data) - width, width):
            states = slice(place + num_kv_bytes, place + width)
            data[states] = data[states.start + width : states.stop + width]

    (expected,) = single.run(ask("alone", prompts()[0]))
    assert Ferry(giver, taker, bent(shift)).hand_over(ask("a", prompts()[0])) == expected
    rounds, wanted = per_position(taker, "taken"), per_position(single, "alone")
    assert rounds != wanted
    assert sum(accepted for _, accepted in rounds) <= sum(accepted for _, accepted in wanted)


def test_a_gap_between_parts_is_refused(giver, taker):
    first: list[bytes] = []

    def drop_the_second(payload: bytes) -> bytes:
        first.append(payload)
        return first[0] if len(first) == 2 else payload

    message = ask("a", prompts()[0])
    Ferry(giver, taker, drop_the_second).hand_over(message)
    assert was_refused(taker.outputs_of("taken"))


def test_a_hold_that_is_being_taken_has_no_end(giver, taker):
    message = ask("a", prompts()[0])
    ferry = Ferry(giver, taker)
    giver.add(replace(message, hands_over=True))
    while not giver.outputs:
        giver.step()
    assert giver.engine.requests["a"].stands_until_s < math.inf
    taker.add(replace(message, request_id="b", kv_source=KVSource(endpoint="", request_id="a")))
    ferry.round()
    assert giver.engine.requests["a"].stands_until_s == math.inf
    taker.handovers.taker.drop("b")
    ferry.round()
    assert giver.engine.requests["a"].stands_until_s < math.inf, "nobody took it: it will go on by itself"
