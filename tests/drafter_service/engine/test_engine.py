from __future__ import annotations

import math
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafter_service.engine.drafter import Ask, SessionKey
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.engine.payloads import handle_payload
from outrider.drafter_service.service.local_client import LocalDraftClient
from outrider.verifier_service.messages.draft import (
    LOCAL_DRAFTER_ID,
    Close,
    Commit,
    Draft,
    DraftNeeds,
    Open,
    Resync,
    States,
)
from outrider.verifier_service.messages.link import MAX_REQUEST_ID_CHARS
from outrider.verifier_service.messages.wire import decode, encode
from support.clock import Clock
from tiny.scripted_drafter import VOCAB_SIZE, ScriptedDrafter, say, scripted_engine
from tiny.scripted_drafter import commit as committing
from tiny.scripted_drafter import open_ as opening


def make_engine(drafter: ScriptedDrafter | None = None, clock: Clock | None = None, **limits: float) -> DraftEngine:
    limits = {"max_sessions": 4, "max_draft_length": 5, **limits}
    return scripted_engine(drafter or ScriptedDrafter(max_model_len=20), clock, **limits)


def slow(num_steps: int) -> ScriptedDrafter:
    return ScriptedDrafter(num_steps=num_steps, max_model_len=20)


def open_(request_id: str = "r", *tokens: int) -> Open:
    return opening(request_id, tokens or (1, 2, 3))


def commit(round_id: int, position: int, *tokens: int, length: int = 3, request_id: str = "r") -> Commit:
    return committing(request_id, position, tokens, round_id=round_id, max_length=length)


def draft(round_id: int, position: int, *tokens: int, request_id: str = "r") -> Draft:
    return Draft(request_id=request_id, round_id=round_id, position=position, token_ids=tokens)


def test_commits_extend_the_session_and_are_answered_after_them():
    engine = make_engine()
    assert say(engine, open_(), commit(7, 3)) == [draft(7, 3, 4, 5, 6)]
    assert say(engine, commit(8, 3, 4, 9, length=2)) == [draft(8, 5, 10, 11)]
    assert not engine.has_work()


def test_unknown_and_gapped_sessions_ask_for_a_resync():
    engine = make_engine()
    assert say(engine, commit(1, 3)) == [Resync(request_id="r")]
    assert say(engine, open_(), commit(2, 5, 9)) == [Resync(request_id="r")]
    assert say(engine, open_("r", 1, 2, 3, 4, 5), commit(3, 5)) == [draft(3, 5, 6, 7, 8)]
    assert engine.counters.num_resyncs == 2


def test_a_newer_round_replaces_an_unanswered_one():
    engine = make_engine(slow(2))
    assert say(engine, open_(), commit(1, 3)) == []
    assert say(engine, commit(2, 3, 8)) == []
    assert say(engine) == [draft(2, 4, 9, 10, 11)]
    assert engine.counters.num_superseded_rounds == 1
    assert engine.load().queue_depth == 0


def test_lengths_are_bounded_by_the_config_and_by_the_models_context():
    engine = make_engine(ScriptedDrafter(max_model_len=6))
    assert say(engine, open_(), commit(1, 3, length=50)) == [draft(1, 3, 4, 5, 6, 7)]
    assert say(engine, commit(2, 3, 4, 5, 6)) == [draft(2, 6, 7)]
    assert say(engine, commit(3, 6, 7)) == [draft(3, 7)], "an empty draft is the honest answer"


def test_tokens_outside_the_vocabulary_end_in_empty_drafts_not_in_resyncs_without_end():
    engine = make_engine()
    assert say(engine, open_("r", 1, VOCAB_SIZE), commit(1, 2)) == [draft(1, 2)]
    assert say(engine, open_("s"), commit(2, 3, -1, request_id="s")) == [draft(2, 4, request_id="s")]
    assert engine.counters.num_bad_messages == 2
    assert say(engine, open_(), commit(3, 3, length=1)) == [draft(3, 3, 4)], "a good Open heals it"


def test_what_is_said_beside_the_tokens_reaches_a_drafter_within_bounds():
    drafter = ScriptedDrafter()
    engine = make_engine(drafter, max_tree_nodes=6)

    def asked(**fields: object) -> Ask:
        say(engine, open_(), replace(commit(1, 3), **fields))
        return drafter.asks[-1]

    assert asked(max_nodes=1 << 60).max_nodes == 6
    assert asked(max_nodes=-5).max_nodes == 0
    assert asked(forced_ids=(4, 5)).forced_ids == (4, 5)
    assert asked(forced_ids=(4, VOCAB_SIZE, 5)).forced_ids == (4,)
    assert asked(forced_ids=(4, -1, 5)).forced_ids == (4,)
    assert asked(forced_ids=(4,) * 1000).forced_ids == (4,) * 3, "no more than are drafted"
    assert asked(predicted_ids=(4, 5)).predicted_ids == (4, 5)
    for bad in (-1, VOCAB_SIZE, 1 << 62):
        assert asked(predicted_ids=(4, bad, 5)).predicted_ids == (), "each has its place: all or none"


# --- states ---


def states(position: int, *values: float, request_id: str = "r", width: int = 1) -> States:
    data = struct.pack(f"<{len(values)}f", *values)
    return States(request_id=request_id, position=position, dtype="float32", width=width, data=data)


def states_engine(num_steps: int = 1, **limits: float) -> tuple[DraftEngine, ScriptedDrafter]:
    drafter = ScriptedDrafter(num_steps=num_steps, needs=DraftNeeds(taps=(0,)))
    return make_engine(drafter, **limits), drafter


def held(drafter: ScriptedDrafter) -> list[list[float]]:
    tensor = drafter.asks[-1].states
    return [] if tensor is None else tensor.tolist()


def test_states_reach_the_drafter_that_reads_them_and_no_other():
    engine, drafter = states_engine()
    say(engine, open_(), states(0, 1.0), states(1, 2.0), commit(1, 3))
    assert held(drafter) == [[1.0], [2.0]]
    drafter = ScriptedDrafter()
    say(make_engine(drafter), open_(), states(0, 1.0), commit(1, 3))
    assert held(drafter) == []


def test_states_that_do_not_fit_end_their_own_session_in_a_resync():
    engine, drafter = states_engine()
    say(engine, open_("a"), states(0, 1.0, request_id="a"), open_("b"), states(0, 5.0, request_id="b"))
    assert say(engine, states(7, 1.0, request_id="a")) == [Resync(request_id="a")]
    assert say(engine, states(0, 1.0, request_id="a"), states(0, 1.0, request_id="nobody")) == []
    assert len(say(engine, commit(1, 3, request_id="b"))) == 1
    assert held(drafter) == [[5.0]]


def test_unusable_states_end_in_empty_drafts_not_in_resyncs_without_end():
    engine, drafter = states_engine(num_steps=2)
    say(engine, open_(), states(0, 1.0), commit(1, 3))
    assert say(engine, states(1, math.inf)) == [draft(1, 3)], "also to the ask that was waiting"
    assert drafter.released == [SessionKey("v", "r")]
    assert say(engine, states(1, 2.0), commit(2, 3, 9)) == [draft(2, 4)]
    assert engine.counters.num_bad_messages == 1
    say(engine, open_(), states(0, 1.0), commit(3, 3))
    assert say(engine) == [draft(3, 3, 4, 5, 6)], "a session that is opened again"


def test_states_beyond_the_bound_cost_the_least_recently_used_sessions():
    engine, drafter = states_engine(max_state_bytes=32)
    for name in "abc":
        say(engine, open_(name), states(0, *[1.0] * 4, request_id=name))
    assert drafter.released == [SessionKey("v", "a")]
    assert engine.counters.num_evicted_sessions == 1
    assert say(engine, commit(1, 3, request_id="a")) == [Resync(request_id="a")]
    assert len(say(engine, commit(2, 3, request_id="c"))) == 1
    assert held(drafter) == [[1.0]] * 4


def test_a_session_whose_own_states_are_too_many_is_refused_and_harms_no_other():
    engine, drafter = states_engine(max_state_bytes=32)
    say(engine, open_("a"), states(0, *[1.0] * 4, request_id="a"), open_("b"), states(0, *[1.0] * 4, request_id="b"))
    say(engine, states(4, *[1.0] * 8, request_id="b"))
    assert say(engine, commit(1, 3, request_id="b")) == [draft(1, 3, request_id="b")]
    assert len(say(engine, commit(2, 3, request_id="a"))) == 1
    assert held(drafter) == [[1.0]] * 4


def test_requests_of_all_verifiers_share_one_call():
    drafter = ScriptedDrafter()
    engine = make_engine(drafter)
    for peer in ("v1", "v2"):
        engine.handle(peer, open_())
        engine.handle(peer, commit(1, 3, length=1))
    assert engine.step() == [("v1", draft(1, 3, 4)), ("v2", draft(1, 3, 4))]
    assert [tuple(ask.key) for ask in drafter.asks] == [("v1", "r"), ("v2", "r")]


def test_a_verifier_with_few_requests_does_not_queue_behind_one_with_many():
    drafter = ScriptedDrafter()
    engine = make_engine(drafter)
    for request_id in ("a", "b", "c"):
        engine.handle("busy", open_(request_id))
        engine.handle("busy", commit(1, 3, request_id=request_id))
    engine.handle("idle", open_())
    engine.handle("idle", commit(1, 3))
    engine.step()
    assert [tuple(ask.key) for ask in drafter.asks] == [("busy", "a"), ("idle", "r"), ("busy", "b"), ("busy", "c")]


def test_sessions_expire_and_then_ask_for_a_resync():
    clock = Clock()
    engine = make_engine(clock=clock)
    say(engine, open_(), commit(1, 3))
    clock.now_s = 10.0
    assert say(engine) == []
    assert engine.load().num_sessions == 0
    assert say(engine, commit(2, 3)) == [Resync(request_id="r")]


def test_the_least_recently_used_idle_session_makes_room():
    drafter = slow(99)
    engine = make_engine(drafter, max_sessions=2)
    say(engine, open_("a"), commit(1, 3, request_id="a"), open_("b"), open_("c"))
    assert drafter.released == [SessionKey("v", "b")], "not the older one, which waits for its draft"
    assert say(engine, commit(2, 3, request_id="b")) == [Resync(request_id="b")]


def test_a_waiting_session_that_is_evicted_gets_an_empty_draft():
    engine = make_engine(slow(99), max_sessions=1)
    say(engine, open_("a"), commit(1, 3, request_id="a"))
    assert say(engine, open_("b")) == [draft(1, 3, request_id="a")]
    assert engine.counters.num_evicted_sessions == 1


def test_close_and_forget_free_everything():
    drafter = slow(99)
    engine = make_engine(drafter)
    say(engine, open_("a"), commit(1, 3, request_id="a"), open_("b"), Close(request_id="b"))
    say(engine, open_("a"), peer="w")
    engine.handle("v", commit(5, 0, request_id="nobody"))
    engine.forget_peer("v")
    assert drafter.released == [SessionKey("v", "b"), SessionKey("v", "a")]
    assert not engine.has_work(), "not even a resync is left for a peer that is gone"
    assert engine.load().num_sessions == 1


def test_mean_draft_time_is_measured_from_ask_to_draft():
    clock = Clock()
    engine = make_engine(slow(2), clock)
    assert engine.load().mean_draft_s is None
    say(engine, open_(), commit(1, 3))
    clock.now_s = 0.5
    say(engine)
    assert engine.load().mean_draft_s == 0.5


def test_a_malformed_message_fails_its_own_session_only():
    engine = make_engine()
    say(engine, open_("a"), open_("b"))
    bad = encode(commit(1, 3, request_id="a")).replace(b"round_id", b"round_xx")
    assert [decode(answer, (Resync,)) for answer in handle_payload(engine, "v", bad)] == [Resync(request_id="a")]
    assert handle_payload(engine, "v", b"\xc1") == []
    assert engine.counters.num_bad_messages == 2
    assert say(engine, commit(2, 3, request_id="b", length=1)) == [draft(2, 3, 4, request_id="b")]


@pytest.mark.parametrize("spoil", [lambda frame: frame, lambda frame: frame.replace(b"round_id", b"round_xx")])
def test_an_id_that_no_gateway_gives_is_not_repeated(spoil):
    engine = make_engine()
    frame = spoil(encode(commit(1, 3, request_id="a" * (MAX_REQUEST_ID_CHARS + 1))))
    assert handle_payload(engine, "v", frame) == []
    assert not engine.has_work()
    assert engine.counters.num_bad_messages == 1


@given(st.binary(max_size=64))
def test_no_payload_breaks_the_engine(payload: bytes):
    engine = make_engine()
    handle_payload(engine, "v", payload)
    engine.step()
    engine.check_integrity()


MESSAGES = st.lists(
    st.tuples(
        st.sampled_from(["v", "w"]),
        st.one_of(
            st.builds(open_, st.sampled_from("abc"), st.integers(-1, VOCAB_SIZE), st.integers(0, 9)),
            st.builds(
                lambda name, round_id, position, tokens, length: commit(
                    round_id, position, *tokens, length=length, request_id=name
                ),
                st.sampled_from("abc"),
                st.integers(0, 3),
                st.integers(0, 6),
                st.lists(st.integers(-1, VOCAB_SIZE), max_size=3),
                st.integers(-1, 9),
            ),
            st.builds(Close, request_id=st.sampled_from("abc")),
        ),
    ),
    max_size=30,
)


@given(MESSAGES)
def test_any_conversation_leaves_the_engine_consistent(conversation: list):
    engine = make_engine(slow(2), max_sessions=3)
    for peer, message in conversation:
        say(engine, message, peer=peer)
    for _ in range(3):
        say(engine)
    assert not engine.has_work(), "every ask was answered"


@pytest.mark.parametrize("begins_early", [True, False])
def test_a_draft_begins_before_it_is_waited_for_only_where_a_device_computes_it(begins_early: bool, monkeypatch):
    engine, launched = make_engine(slow(1)), []
    monkeypatch.setattr(engine, "launch", lambda: launched.append(engine.has_work()) or False)
    client = LocalDraftClient(engine, begins_early=begins_early)
    client.send(LOCAL_DRAFTER_ID, [open_("a"), commit(1, 3, request_id="a")])
    assert launched == [True] * begins_early
    assert [event.message.round_id for event in client.poll() if event.message] == [1]


def test_local_client_answers_every_ask_within_poll():
    client = LocalDraftClient(make_engine(slow(3)))
    (up,) = client.poll()
    assert (up.drafter_id, up.is_up, up.vocab_size, up.message) == (LOCAL_DRAFTER_ID, True, VOCAB_SIZE, None)
    client.send(LOCAL_DRAFTER_ID, [open_("a"), commit(1, 3, request_id="a"), open_("b"), commit(2, 3, request_id="b")])
    client.send("elsewhere", [commit(9, 0)])
    assert [event.message.round_id for event in client.poll()] == [1, 2]
    assert client.poll() == []
