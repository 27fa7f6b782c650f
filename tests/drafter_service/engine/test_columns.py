"""Asks in columns: a frame means what its rows do, and its answers are columns."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.engine.messages import MAX_ROW_IDS, framed
from outrider.drafter_service.engine.payloads import handle_payload
from outrider.verifier_service.messages.draft import (
    Commit,
    Commits,
    Draft,
    DrafterMessage,
    Drafts,
    Resync,
    SparseRow,
)
from outrider.verifier_service.messages.wire import decode, encode
from tiny.scripted_drafter import PEER, ScriptedDrafter, commit, open_, say, scripted_engine


def singly(messages: list[DrafterMessage]) -> list[Draft | Resync]:
    return [one for said in messages for one in (said.drafts() if isinstance(said, Drafts) else [said])]


def make_engine(**options: int) -> DraftEngine:
    return scripted_engine(ScriptedDrafter(max_model_len=24, **options), max_sessions=4, max_draft_length=5)


def test_a_frame_is_answered_by_a_frame() -> None:
    engine = make_engine()
    for name in "abc":
        engine.handle(PEER, open_(name, (1, 2)))
    asks = [commit("a", 2, (3,), round_id=1, max_length=2), commit("b", 2, (), round_id=2, max_length=1)]
    [answer] = say(engine, Commits.of(asks))
    assert isinstance(answer, Drafts)
    assert [(one.request_id, one.round_id, one.position, one.token_ids) for one in answer.drafts()] == [
        ("a", 1, 3, (4, 5)),
        ("b", 2, 2, (3,)),
    ]
    assert isinstance(say(engine, commit("c", 2))[0], Draft), "what is asked alone is answered alone"


def random_asks(rng: random.Random, lengths: dict[str, int], round_id: int) -> list[Commit]:
    """Ask for some sessions, now and then from a wrong place, with a strange token or for nothing."""
    asks: list[Commit] = []
    for name in rng.sample(sorted(lengths), rng.randint(1, len(lengths))):
        tokens = tuple(
            rng.choice([1, 2, 3, 3, 99, -1] if rng.random() < 0.1 else [1, 2]) for _ in range(rng.randint(0, 3))
        )
        position = lengths[name] + (rng.random() < 0.05)
        asks.append(commit(name, position, tokens, round_id=round_id, max_length=rng.randint(-1, 6)))
        lengths[name] = position + len(tokens)
    return asks


@pytest.mark.parametrize("seed", range(20))
def test_a_frame_means_what_its_rows_do(seed: int) -> None:
    rng = random.Random(seed)
    num_steps = rng.randint(1, 2)
    framed_engine, single_engine = make_engine(num_steps=num_steps), make_engine(num_steps=num_steps)
    lengths: dict[str, int] = {}
    for round_id in range(40):
        if rng.random() < 0.3:
            name, prefix = str(rng.randint(0, 5)), (1,) * rng.randint(1, 3)
            lengths[name] = len(prefix)
            for engine in (framed_engine, single_engine):
                engine.handle(PEER, open_(name, prefix))
        asks = random_asks(rng, lengths, round_id) if lengths else []
        heard = singly(say(framed_engine, *([Commits.of(asks)] if asks else [])))
        expected = say(single_engine, *asks)
        assert sorted(heard, key=repr) == sorted(expected, key=repr)
        assert framed_engine.load() == single_engine.load()
        framed_engine.check_integrity()


def test_what_a_peer_asked_for_in_columns_goes_with_it() -> None:
    engine = make_engine()
    engine.handle(PEER, open_("a", (1, 2)))
    engine.handle(
        PEER,
        Commits.of(
            [
                replace(commit("a", 2), max_length=0),
            ]
        ),
    )
    assert not engine.has_work()
    engine.handle(PEER, open_("b", (99,)))
    engine.handle(PEER, Commits.of([commit("b", 1)]))
    assert engine.has_work(), "an empty answer waits to be sent"
    engine.forget_peer(PEER)
    assert engine.flush() == []


def test_a_frame_that_does_not_decode_fails_its_own_sessions_only() -> None:
    engine = make_engine()
    for name in "abc":
        engine.handle(PEER, open_(name, (1, 2)))
    payload = encode(Commits.of([commit("a", 2), commit("b", 2)]))
    spoilt = payload.replace(b"counts\xc4\x10", b"countz\xc4\x10")
    assert [decode(answer, (Resync,)).request_id for answer in handle_payload(engine, PEER, spoilt)] == ["a", "b"]
    assert (engine.load().num_sessions, engine.counters.num_bad_messages, engine.counters.num_resyncs) == (1, 1, 2)
    long = Commits.of([replace(commit("c", 2), request_id="c" * 1025), commit("c", 2)])
    assert handle_payload(engine, PEER, encode(long)) == []
    assert not engine.has_work()


def chain(request_id: str, *, num_ids: int = 0, **fields: object) -> Draft:
    row = SparseRow(token_ids=tuple(range(num_ids)), weights=(1,) * num_ids)
    rows = (row,) if num_ids else None
    return replace(Draft(request_id=request_id, round_id=1, position=2, token_ids=(3,), draft_probs=rows), **fields)


def test_answers_are_in_as_few_frames_as_hold_them() -> None:
    tree = chain("t", parents=(-1,))
    skewed = chain("s", confidences=(0.5, 0.5))
    far = chain("f", token_ids=(1 << 63,), confidences=(0.5,))
    alike = [chain("a"), chain("b"), chain("c", num_ids=2), chain("d", num_ids=3), chain("a", round_id=2)]
    sent = list(framed([tree, *alike, skewed, far]))
    assert [message for message in sent if isinstance(message, Draft)] == [tree, skewed, far]
    frames = [[one.request_id for one in frame.drafts()] for frame in sent if isinstance(frame, Drafts)]
    assert sorted(frames) == [["a"], ["a", "b"], ["c", "d"]]
    large = [chain(name, num_ids=MAX_ROW_IDS // 2 + 1) for name in "xyz"]
    assert [len(frame.request_ids) for frame in framed(large) if isinstance(frame, Drafts)] == [1, 1, 1]
    assert list(framed([])) == []
