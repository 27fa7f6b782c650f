"""Messages wait for the states that they name: over scripted channels, then over gloo in front of the draft loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from multiprocessing import Pipe
from typing import Any

import numpy as np
import pytest
import torch

from fakes.by_channel import ByChannel
from outrider.drafter_service.engine.drafter import Ask, DraftEngineConfig, SessionKey
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.engine.messages import FROM_DRAFT_ENGINE
from outrider.drafter_service.engine.state_transport import StateTransport
from outrider.drafter_service.service.rank_main import DraftLoop
from outrider.verifier_service.links.relay_client import RelayDraftClient
from outrider.verifier_service.links.tensor_channel import (
    ChannelError,
    ChannelLimits,
    TensorSender,
    TensorStore,
    as_tensor,
)
from outrider.verifier_service.messages.draft import (
    Close,
    Commit,
    Commits,
    Draft,
    DraftNeeds,
    DraftSampling,
    Open,
    Resync,
    States,
    VerifierMessage,
)
from outrider.verifier_service.messages.engine import PeerState, Relay
from outrider.verifier_service.messages.link import VERIFIER_MESSAGES
from outrider.verifier_service.messages.tensor_route import TensorRoute
from outrider.verifier_service.messages.wire import decode, encode
from support.waiting import PATIENCE_S, wait_until

WIDTH = 2
PROMPT = (4, 8, 15)
ROUTE = TensorRoute(transport="gloo", store="nowhere:1", group="v/1/1")


class SumDrafter:
    """Drafts one token: the sum of the states that it was shown."""

    vocab_size, max_model_len = 1000, 64
    needs = DraftNeeds(taps=(1,))

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[Draft]:
        sums = [0 if ask.states is None else int(ask.states.sum()) for ask in asks]
        return [ask.answer((total,)) for ask, total in zip(asks, sums, strict=True)]

    def release(self, key: SessionKey) -> None: ...

    def check_integrity(self, keys: Collection[SessionKey]) -> None: ...


class SlowPair:
    """A pair that delivers what a test puts in, by number; None fails it."""

    def __init__(self) -> None:
        self._data: dict[int, bytes | None] = {}
        self._changed = threading.Condition()

    def open(self, route: TensorRoute, rank: int, limits: ChannelLimits) -> SlowPair:
        return self

    def put(self, number: int, data: bytes | None) -> None:
        with self._changed:
            self._data[number] = data
            self._changed.notify_all()

    def start(self, tensor: torch.Tensor, number: int) -> tuple[torch.Tensor, int]:
        return tensor, number

    def wait(self, transfer: tuple[torch.Tensor, int], timeout_s: float) -> None:
        tensor, number = transfer
        with self._changed:
            if not self._changed.wait_for(lambda: number in self._data, timeout_s):
                raise ChannelError("too late")
            data = self._data[number]
        if data is None:
            raise ChannelError("scripted")
        tensor.copy_(as_tensor(data))

    def abort(self) -> None:
        """Nothing is on its way."""


class Scene:
    """An engine behind a transport with one scripted channel, to peer "v"."""

    def __init__(self, **limits: float) -> None:
        self.engine = DraftEngine(SumDrafter(), clock=lambda: 0.0, config=DraftEngineConfig())
        self.pair = SlowPair()
        self.transport = StateTransport(
            self.engine, TensorStore("127.0.0.1"), ChannelLimits(**limits), open_=self.pair.open
        )
        self.transport.open("v", ROUTE)
        self.said: list[tuple[str, Draft | Resync]] = []

    def say(self, *messages: VerifierMessage, peer: str = "v") -> None:
        for message in messages:
            self.transport.handle(peer, message)

    def step(self) -> list[tuple[str, Any]]:
        self.transport.collect()
        said = self.engine.step()
        self.engine.check_integrity()
        return said

    def hear(self) -> list[tuple[str, Any]]:
        """Step until all that can be is answered: (request, drafted tokens or lost_tensors) of each answer."""
        self.said = self.step()
        return [
            (said.request_id, said.token_ids if isinstance(said, Draft) else said.lost_tensors) for _, said in self.said
        ]

    def hear_some(self) -> list[tuple[str, Any]]:
        heard: list[tuple[str, Any]] = []
        wait_until(lambda: heard.extend(self.hear()) or heard)
        return heard


def floats(*values: float) -> bytes:
    return np.array(values, dtype=np.float32).tobytes()


def open_(request_id: str = "r") -> Open:
    return Open(request_id=request_id, sampling=DraftSampling(temperature=0.0), token_ids=PROMPT)


def states(
    request_id: str = "r", *, tensor: int = 1, position: int = 0, num_bytes: int = 16, channel: str = ROUTE.group
) -> States:
    return States(
        request_id=request_id,
        position=position,
        dtype="float32",
        width=WIDTH,
        data=b"",
        tensor=tensor,
        num_bytes=num_bytes,
        channel=channel,
    )


def commit(request_id: str = "r", *, round_id: int = 1, position: int = 3, tokens: tuple[int, ...] = ()) -> Commit:
    return Commit(request_id=request_id, round_id=round_id, position=position, token_ids=tokens, max_length=1)


def test_a_commit_waits_for_the_states_before_it():
    scene = Scene()
    scene.say(open_(), states(), commit())
    assert scene.hear() == []
    scene.pair.put(1, floats(1, 2, 3, 4))
    assert scene.hear_some() == [("r", (10,))]
    assert scene.transport.num_held == 0


def test_rows_of_a_frame_wait_alone():
    scene = Scene()
    scene.say(open_("a"), states("a"), open_("b"), open_("c"))
    scene.say(Commits.of([commit("a"), commit("b"), commit("c")]))
    assert [(frame.request_ids, frame.token_ids.tolist()) for _, frame in scene.step()] == [(("b", "c"), [0, 0])]
    scene.pair.put(1, floats(1, 2, 3, 4))
    assert scene.hear_some() == [("a", (10,))]


def test_a_session_that_waits_holds_no_other_up():
    scene = Scene()
    scene.say(open_("a"), states("a"), commit("a"), open_("b"), commit("b"))
    inline = States(request_id="c", position=0, dtype="float32", width=WIDTH, data=floats(1, 1))
    scene.say(open_("c"), inline, commit("c"))
    assert scene.hear() == [("b", (0,)), ("c", (2,))]
    scene.pair.put(1, floats(5, 0, 0, 0))
    assert scene.hear_some() == [("a", (5,))]


def test_states_of_one_session_come_in_several_tensors_and_as_bytes_between():
    scene = Scene()
    inline = States(request_id="r", position=2, dtype="float32", width=WIDTH, data=floats(100, 0))
    scene.say(open_(), states(tensor=1), inline, states(tensor=2, position=3, num_bytes=8))
    scene.say(commit(tokens=(1, 1)))
    scene.pair.put(1, floats(1, 2, 3, 4))
    wait_until(lambda: scene.transport.collect() or scene.transport.num_held == 2)
    assert scene.hear() == []
    scene.pair.put(2, floats(0, 7))
    assert scene.hear_some() == [("r", (117,))]


@pytest.mark.parametrize("message", [Close(request_id="r"), open_()])
def test_what_is_held_is_pointless_once_the_session_ends_or_starts_again(message: VerifierMessage):
    scene = Scene()
    scene.say(open_(), states(), commit(), message)
    assert scene.transport.num_held == 0
    scene.say(open_("s"), states("s", tensor=2), commit("s"))
    scene.pair.put(1, floats(1, 2, 3, 4))
    scene.pair.put(2, floats(1, 1, 1, 1))
    assert scene.hear_some() == [("s", (4,))], "a tensor that nothing waits for is dropped"


def test_a_channel_that_fails_resyncs_the_sessions_that_wait_and_no_other():
    scene = Scene()
    scene.say(open_("a"), states("a"), commit("a"), open_("b"), states("b", tensor=2), open_("c"), commit("c"))
    scene.pair.put(1, None)
    heard = scene.hear_some() + scene.hear()
    wait_until(lambda: heard.extend(scene.hear()) or len(heard) >= 3)
    assert sorted(heard) == [("a", True), ("b", True), ("c", (0,))]
    assert scene.transport.num_held == 0
    scene.say(open_("a"), states("a", tensor=3))
    assert scene.hear() == [("a", True)], "named in a frame that was sent before the verifier heard of it"


def test_a_tensor_of_a_channel_that_is_gone_is_not_waited_for_at_the_next_one():
    """Both count from 1, and another size than was announced ends a gloo process."""
    scene = Scene()
    scene.say(open_("a"), states("a", channel="v/1/0", num_bytes=8), open_("b"), states("b"), commit("b"))
    assert scene.hear() == [("a", False)]
    scene.pair.put(1, floats(1, 2, 3, 4))
    assert scene.hear_some() == [("b", (10,))]


def test_a_tensor_that_is_too_late_is_given_up():
    scene = Scene(transfer_timeout_s=0.05)
    scene.say(open_(), states(), commit())
    assert scene.hear_some() == [("r", True)]


def test_what_arrived_before_a_failure_is_not_lost():
    scene = Scene()
    scene.say(open_("a"), states("a"), commit("a"), open_("b"), states("b", tensor=2), commit("b"))
    scene.pair.put(1, floats(1, 2, 3, 4))
    scene.pair.put(2, None)
    heard: list[tuple[str, Any]] = []
    wait_until(lambda: heard.extend(scene.hear()) or len(heard) == 2)
    assert sorted(heard) == [("a", (10,)), ("b", True)]


@pytest.mark.parametrize(("tensor", "num_bytes"), [(2, 0), (2, -5), (2, 1 << 40), (3, 16), (1, 16)])
def test_a_tensor_that_nobody_could_mean_ends_the_channel_but_not_the_link(tensor: int, num_bytes: int):
    scene = Scene()
    scene.say(open_("a"), states("a"), open_("b"), states("b", tensor=tensor, num_bytes=num_bytes))
    scene.say(open_("c"), commit("c"))
    assert scene.hear() == [("a", True), ("b", True), ("c", (0,))]
    inline = States(request_id="b", position=0, dtype="float32", width=WIDTH, data=floats(1, 1))
    scene.say(open_("b"), inline, commit("b"))
    assert scene.hear() == [("b", (2,))]


def test_states_that_do_not_fit_are_a_bad_message_of_their_session():
    scene = Scene()
    scene.say(open_(), states(num_bytes=6), commit())
    scene.pair.put(1, b"abcdef")
    assert scene.hear_some() == [("r", False), ("r", False)], "the states and the commit after them"
    assert scene.engine.counters.num_bad_messages == 1


def test_a_peer_that_leaves_takes_what_it_said_along():
    scene = Scene()
    scene.say(open_(), states(), commit())
    scene.transport.close_peer("v")
    scene.engine.forget_peer("v")
    assert scene.transport.num_held == 0
    scene.pair.put(1, floats(1, 2, 3, 4))
    assert scene.hear() == []


def test_without_a_channel_a_tensor_cannot_be_meant():
    scene = Scene()
    scene.say(open_(), states(), peer="w")
    assert scene.hear() == [("r", True)]


# --- the draft loop, over gloo ---


class Loop:
    """The shell's end of a draft loop on a thread."""

    def __init__(self) -> None:
        self.pipe, self._far = Pipe()
        self.engine = DraftEngine(SumDrafter(), clock=time.monotonic, config=DraftEngineConfig())
        self.store = TensorStore("127.0.0.1")
        self.drafts = RelayDraftClient()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        loop = DraftLoop(self.engine, self._far, clock=time.monotonic, check_integrity=True, store=self.store)
        loop.run()
        self._far.close()

    def connect(self, group: str) -> TensorSender:
        """Be a verifier whose link has come up."""
        route = TensorRoute(transport="gloo", store=self.store.address, group=group)
        senders: list[TensorSender] = []
        self.drafts = RelayDraftClient(
            lambda route: senders.append(TensorSender(route)) or senders[0], make_ways=ByChannel
        )
        self.pipe.send_bytes(encode(PeerState(peer="d", is_up=True, tensors=route)))
        self.drafts.feed(PeerState(peer="d", is_up=True, tensors=route))
        wait_until(lambda: senders[0].is_connected)
        return senders[0]

    def say(self, *messages: VerifierMessage) -> list[VerifierMessage]:
        self.drafts.send("d", messages)
        relays = self.drafts.take_outbox()
        for relay in relays:
            self.pipe.send_bytes(encode(relay))
        return [decode(relay.payload, VERIFIER_MESSAGES) for relay in relays]

    def hear(self) -> Any:
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            assert self.pipe.poll(PATIENCE_S)
            for relay in decode(self.pipe.recv_bytes(), FROM_DRAFT_ENGINE).relays:
                self.drafts.feed(Relay(peer="d", payload=relay.payload))
                return decode(relay.payload, (Draft, Resync))
        raise AssertionError("no answer")

    def end(self) -> None:
        self.pipe.close()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


def with_data(position: int, *values: float) -> States:
    return States(request_id="r", position=position, dtype="float32", width=WIDTH, data=floats(*values))


def test_states_go_through_gloo_and_as_bytes_once_that_has_failed_and_through_gloo_after_a_reconnect():
    loop = Loop()
    sender = loop.connect("v/1")
    said = loop.say(open_(), with_data(0, 1, 2, 3, 4), commit())
    assert [message.tensor for message in said if isinstance(message, States)] == [1]
    assert loop.hear().token_ids == (10,)
    assert loop.drafts.num_state_bytes == {"gloo": 16}

    sender.close()  # the verifier's end goes: what is named after that does not come
    assert sender.join(PATIENCE_S)
    lost = states(tensor=2, position=2, num_bytes=8, channel=sender.route.group)
    loop.pipe.send_bytes(encode(Relay(peer="d", payload=encode(lost))))
    assert loop.hear() == Resync(request_id="r", lost_tensors=True)
    said = loop.say(open_(), with_data(0, 1, 2, 3, 4, 5, 6), commit(tokens=(7,)))
    assert [message.tensor for message in said if isinstance(message, States)] == [0]
    assert loop.hear().token_ids == (21,)
    assert loop.drafts.num_state_bytes == {"gloo": 16, "grpc": 24}
    assert loop.drafts.num_tensor_fallbacks == 1

    loop.pipe.send_bytes(encode(PeerState(peer="d", is_up=False)))
    loop.connect("v/2")
    loop.say(open_(), with_data(0, 1, 2, 3, 5), commit())
    assert loop.hear().token_ids == (11,)
    assert loop.drafts.num_state_bytes == {"gloo": 16}
    loop.drafts.close()
    loop.end()
