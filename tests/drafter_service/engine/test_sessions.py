from __future__ import annotations

import pytest

from outrider.drafter_service.engine.drafter import Ask, SessionKey, first_bad_token, known_prefix
from outrider.drafter_service.engine.sessions import (
    Round,
    Session,
    SessionTable,
    in_turns,
)
from outrider.verifier_service.messages.draft import DraftNeeds, DraftSampling, States

GREEDY = DraftSampling(temperature=0.0)
ROUND = Round(
    Ask(key=SessionKey("v", "r"), ask_id=1, token_ids=[1], sampling=GREEDY, length=1), round_id=1, asked_s=0.0
)


def session(name: str, used_s: float = 0.0, *, peer: str = "v", asked: bool = False) -> Session:
    return Session(SessionKey(peer, name), GREEDY, [1], used_s, round=ROUND if asked else None)


def table_of(*sessions: Session, max_sessions: int = 8) -> SessionTable:
    table = SessionTable(max_sessions=max_sessions, ttl_s=10.0)
    for item in sessions:
        table.put(item)
    return table


def names(sessions: list[Session]) -> list[str]:
    return [item.key.request_id for item in sessions]


def test_sessions_expire_by_last_use_but_not_while_they_wait_for_a_draft():
    table = table_of(session("old"), session("asked", asked=True), session("young", 5.0))
    assert names(table.expired(9.9)) == []
    assert names(table.expired(10.0)) == ["old"]
    assert names(table.expired(15.0)) == ["old", "young"]


def test_touch_makes_a_session_the_youngest():
    first = session("first")
    table = table_of(first, session("second", 1.0))
    table.touch(first, 2.0)
    assert names(list(table)) == ["second", "first"]
    table.check_integrity()


def test_surplus_takes_idle_sessions_before_waiting_ones():
    table = table_of(session("a", asked=True), session("b"), session("c"), max_sessions=2)
    assert names(table.surplus()) == ["b"]
    table = table_of(session("a", asked=True), session("new"), max_sessions=1)
    assert names(table.surplus()) == ["a"], "never the newest"
    assert table_of(session("a")).surplus() == []


def test_a_verifier_with_more_than_its_share_makes_room_itself():
    small = [session("small", peer="v1"), session("asked", peer="v1", asked=True)]
    large = [session(name, peer="v2", asked=True) for name in ("a", "b", "c")]
    assert names(table_of(*small, *large, max_sessions=4).surplus()) == ["a"]
    newest = session("new", peer="v1")
    assert names(table_of(*small, *large, newest, max_sessions=5).surplus()) == ["small"], "3 each: both are beyond 2.5"
    assert names(table_of(*small, *large, newest, max_sessions=4).surplus()) == ["small", "asked"]


def test_every_verifiers_first_comes_before_anybodys_second():
    sessions = [session(name, peer=peer) for name, peer in (("a", "v1"), ("b", "v1"), ("c", "v1"), ("d", "v2"))]
    assert names(in_turns([*sessions, session("e", peer="v3")])) == ["a", "d", "e", "b", "c"]
    assert names(in_turns(sessions[:3])) == ["a", "b", "c"], "one verifier's own are in their order"
    assert in_turns([]) == []


def test_the_same_request_of_two_peers_is_two_sessions():
    table = table_of(session("r", peer="v1"), session("r", peer="v2"))
    assert [item.key.peer for item in table.of_peer("v1")] == ["v1"]
    assert len(table) == 2


def test_integrity_check_sees_disorder():
    table = table_of(session("late", 5.0), session("early", 1.0))
    with pytest.raises(AssertionError, match="order"):
        table.check_integrity()


@pytest.mark.parametrize(("tokens", "bad"), [([], None), ([0, 9], None), ([0, 10], 10), ([3, -1], -1)])
def test_first_bad_token(tokens: list[int], bad: int | None):
    assert first_bad_token(tokens, 10) == bad


def with_states(item: Session, num_bytes: int) -> Session:
    message = States(request_id="r", position=0, dtype="float32", width=1, data=bytes(num_bytes))
    item.states.append(message, DraftNeeds(taps=(0,)))
    return item


def test_surplus_states_are_of_the_least_recently_used_idle_sessions():
    asked, idle = with_states(session("asked", asked=True), 16), with_states(session("idle"), 16)
    newest = with_states(session("newest"), 16)
    table = table_of(asked, session("empty"), idle, newest)
    assert names(table.surplus_states(48, spared=newest)) == []
    assert names(table.surplus_states(47, spared=newest)) == ["idle"]
    assert names(table.surplus_states(31, spared=newest)) == ["idle", "asked"]
    assert names(table.surplus_states(0, spared=newest)) == ["idle", "asked"], "never the spared one"
    assert names(table.surplus_states(32, spared=idle)) == ["newest"]


def test_known_prefix():
    assert known_prefix((0, 9, 3), 10) == (0, 9, 3)
    assert known_prefix((4, 10, 3), 10) == (4,)
    assert known_prefix((4, -1, 3), 10) == (4,)
    assert known_prefix((1 << 62,), 10) == known_prefix((), 10) == ()
