"""Who agrees to which channel in the handshake, and what a verifier's client makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from outrider.verifier_service.links.drafter_link import DrafterLink, LinkError
from outrider.verifier_service.links.relay_client import RelayDraftClient
from outrider.verifier_service.messages.draft import (
    Close,
    Commit,
    Commits,
    Draft,
    DraftNeeds,
    Drafts,
    Resync,
    States,
    VerifierMessage,
)
from outrider.verifier_service.messages.engine import PeerState, Relay
from outrider.verifier_service.messages.link import VERIFIER_MESSAGES, DrafterIdentity, Hello, Welcome, frame_of
from outrider.verifier_service.messages.tensor_route import TensorRoute, choose_transport, offered_transports
from outrider.verifier_service.messages.wire import decode, encode

ROUTE = TensorRoute(transport="gloo", store="127.0.0.1:7", group="v/1/1")
HELLO = Hello(verifier_id="v", epoch=1, vocab_size=9, state_taps=(1,), tensor_transports=("gloo",))
IDENTITY = DrafterIdentity(
    drafter_id="d",
    vocab_size=9,
    vocab_fingerprint="",
    max_draft_length=8,
    max_model_len=64,
    needs=DraftNeeds(taps=(1,)),
    tensor_transports=("nccl", "gloo"),
    tensor_store="127.0.0.1:7",
)


def test_the_first_wanted_transport_that_both_can_do_is_taken():
    assert choose_transport(("nccl", "gloo"), ("gloo",)) == "gloo"
    assert choose_transport(("nccl", "gloo"), ("gloo", "nccl")) == "nccl"
    assert choose_transport((), ("gloo",)) is None
    assert choose_transport(("gloo",), ()) is None


def test_bytes_in_frames_are_no_channel():
    choices = ("auto", "grpc", "gloo", "nccl")
    offered = [offered_transports(choice, is_encrypted=False) for choice in choices]
    assert offered == [("gloo",), (), ("gloo",), ("nccl",)]


def test_beside_an_encrypted_link_there_is_no_channel():
    assert offered_transports("auto", is_encrypted=True) == offered_transports("grpc", is_encrypted=True) == ()


def test_a_drafter_that_reads_states_names_the_channel_that_both_can_do():
    assert IDENTITY.route(HELLO, "v/1/1") == ROUTE
    assert IDENTITY.welcome(ROUTE).tensors == ROUTE
    assert IDENTITY.welcome().tensors is None


@pytest.mark.parametrize(
    ("hello", "identity"),
    [
        (replace(HELLO, tensor_transports=()), IDENTITY),
        (HELLO, replace(IDENTITY, tensor_transports=("nccl",))),
        (HELLO, replace(IDENTITY, tensor_store="")),
        (HELLO, replace(IDENTITY, needs=DraftNeeds())),
    ],
    ids=["not wanted", "not offered", "no store", "no states"],
)
def test_there_is_no_channel_unless_both_can_and_it_is_needed(hello: Hello, identity: DrafterIdentity):
    assert identity.route(hello, "v/1/1") is None


@pytest.mark.parametrize(("offered", "is_taken"), [(("gloo",), True), ((), False), (("nccl",), False)])
def test_a_link_refuses_a_channel_that_it_did_not_offer(offered: tuple[str, ...], is_taken: bool):
    async def accept() -> Welcome:
        hello = replace(HELLO, tensor_transports=offered)
        link = DrafterLink("nowhere:1", drafter_id="d", hello=hello, on_event=lambda event: None)
        return link._accept(frame_of("v", 1, encode(IDENTITY.welcome(ROUTE))))

    if is_taken:
        assert asyncio.run(accept()).tensors == ROUTE
    else:
        with pytest.raises(LinkError, match="'gloo'"):
            asyncio.run(accept())


# --- the verifier's client ---


class FakeSender:
    """A channel that takes what has room."""

    def __init__(self, route: TensorRoute) -> None:
        self.route = route
        self.taken: list[bytes] = []
        self.has_room = self.is_open = True

    def offer(self, data: torch.Tensor) -> int | None:
        if not (self.is_open and self.has_room):
            return None
        self.taken.append(bytes(data.tolist()))
        return len(self.taken)

    @property
    def is_refusing(self) -> bool:
        return True

    def close(self) -> None:
        self.is_open = False


class LongestWays:
    """Eight bytes and more go through the channel; what was measured is kept."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, float, bool]] = []

    def choose_channel(self, num_bytes: int) -> bool:
        return num_bytes >= 8

    def observe(self, num_bytes: int, seconds: float, *, by_channel: bool) -> None:
        self.rounds.append((num_bytes, seconds, by_channel))


class Bench:
    """A client whose channels are fakes."""

    def __init__(self) -> None:
        self.senders: list[FakeSender] = []
        self.ways = LongestWays()
        self.now_s = 0.0
        self.client = RelayDraftClient(
            self._open,  # type: ignore[arg-type]
            make_ways=lambda: self.ways,
            clock=lambda: self.now_s,
        )

    def _open(self, route: TensorRoute) -> FakeSender:
        self.senders.append(FakeSender(route))
        return self.senders[-1]

    def come_up(self, tensors: TensorRoute | None = ROUTE, peer: str = "d") -> None:
        self.client.feed(PeerState(peer=peer, is_up=True, tensors=tensors))

    def say(self, data: bytes, peer: str = "d") -> States:
        self.client.send(peer, [states(data)])
        [relay] = self.client.take_outbox()
        assert relay.peer == peer
        message = decode(relay.payload, VERIFIER_MESSAGES)
        assert isinstance(message, States)
        return message

    def hear(self, message: Draft | Resync) -> None:
        self.client.feed(Relay(peer="d", payload=encode(message)))


WORDS: Sequence[bytes] = (b"aaaabbbb", b"ccccddddeeee")


def test_states_go_through_the_channel_and_the_frame_names_them():
    bench = Bench()
    bench.come_up()
    said = [bench.say(data) for data in WORDS]
    assert [(message.data, message.tensor, message.num_bytes) for message in said] == [(b"", 1, 8), (b"", 2, 12)]
    assert bench.senders[0].taken == [*WORDS]
    assert bench.client.num_state_bytes == {"gloo": 20}
    assert bench.client.num_tensor_fallbacks == 0


def test_what_the_channel_does_not_take_goes_as_bytes():
    bench = Bench()
    bench.come_up()
    assert bench.say(b"tiny").data == b"tiny"
    assert bench.client.num_tensor_fallbacks == 0
    bench.senders[0].has_room = False
    assert (bench.say(WORDS[0]).data, bench.say(WORDS[0]).tensor) == (WORDS[0], 0)
    assert bench.client.num_tensor_fallbacks == 2
    bench.senders[0].has_room = True
    assert bench.say(WORDS[0]).tensor == 1
    assert bench.client.num_state_bytes == {"grpc": 20, "gloo": 8}


def test_a_drafter_without_a_channel_gets_bytes():
    bench = Bench()
    bench.come_up(None)
    assert bench.say(WORDS[0]).data == WORDS[0]
    assert bench.senders == []
    assert bench.client.num_tensor_fallbacks == 0


def test_every_connection_has_a_channel_of_its_own():
    bench = Bench()
    bench.come_up()
    bench.come_up(peer="other")
    bench.client.feed(PeerState(peer="d", is_up=False))
    assert [sender.is_open for sender in bench.senders] == [False, True]
    assert bench.say(WORDS[0]).data == WORDS[0]
    bench.come_up()
    assert bench.say(WORDS[0]).tensor == 1
    bench.client.close()
    assert not any(sender.is_open for sender in bench.senders)


def test_a_drafter_that_lost_its_tensors_gets_bytes_from_then_on():
    bench = Bench()
    bench.come_up()
    bench.hear(Resync(request_id="r"))
    assert bench.say(WORDS[0]).tensor == 1
    bench.hear(Resync(request_id="r", lost_tensors=True))
    assert bench.say(WORDS[0]).data == WORDS[0]
    assert len(bench.client.poll()) == 3, "its coming up and both resyncs"


def commit(round_id: int, **fields: object) -> Commit:
    return Commit(request_id="r", round_id=round_id, position=0, token_ids=(), **{"max_length": 4, **fields})


def answer(round_id: int) -> Draft:
    return Draft(request_id="r", round_id=round_id, position=0, token_ids=(1,))


def states(data: bytes) -> States:
    return States(request_id="r", position=0, dtype="float32", width=1, data=data)


def test_round_trips_are_measured_from_the_first_word_on_by_the_way_that_the_states_went():
    bench = Bench()
    bench.come_up()
    for round_id, data, took_s in ((1, WORDS[0], 0.25), (2, b"tiny", 0.5)):
        said_s = bench.now_s
        bench.client.send("d", [states(data), commit(round_id)])
        bench.now_s += 9.0  # until the engine polls
        bench.client.feed(Relay(peer="d", payload=encode(answer(round_id)), received_s=said_s + took_s))
    assert bench.ways.rounds == [(8, 0.25, True), (4, 0.5, False)]


def test_rounds_in_columns_are_measured_as_others():
    bench = Bench()
    bench.come_up()
    bench.client.send("d", [states(WORDS[0]), Commits.of([commit(1)])])
    bench.now_s = 0.5
    bench.client.feed(Relay(peer="d", payload=encode(Drafts.of([answer(1)]))))
    assert bench.ways.rounds == [(8, 0.5, True)]


def test_all_states_of_a_round_go_one_way():
    """Five bytes alone would go in the frame."""
    bench = Bench()
    bench.come_up()
    bench.client.send("d", [states(b"aaaaa"), states(b"bbbbb"), commit(1)])
    bench.hear(answer(1))
    assert bench.senders[0].taken == [b"aaaaa", b"bbbbb"]
    assert bench.ways.rounds == [(10, 0.0, True)]


def test_a_round_whose_channel_did_not_take_all_says_nothing():
    bench = Bench()
    bench.come_up()
    bench.senders[0].has_room = False
    bench.client.send("d", [states(WORDS[0]), commit(1)])
    bench.hear(answer(1))
    assert bench.ways.rounds == []


@pytest.mark.parametrize("later", [[commit(2)], [states(WORDS[0]), commit(2)]], ids=["next round", "more states"])
def test_a_round_that_went_on_without_its_draft_took_at_least_as_long(later: list[VerifierMessage]):
    bench = Bench()
    bench.come_up()
    bench.client.send("d", [states(WORDS[0]), commit(1)])
    bench.now_s += 2.0
    bench.client.send("d", later)
    bench.hear(answer(1))
    assert bench.ways.rounds == [(8, 2.0, True)]


def test_of_a_request_that_ended_nothing_is_measured():
    bench = Bench()
    bench.come_up()
    bench.client.send("d", [states(WORDS[0]), commit(1)])
    bench.client.send("d", [Close(request_id="r")])
    bench.hear(answer(1))
    assert bench.ways.rounds == []


def test_of_a_connection_that_is_gone_no_round_is_measured():
    bench = Bench()
    bench.come_up()
    bench.client.send("d", [states(WORDS[0]), commit(1)])
    bench.come_up()
    bench.hear(answer(1))
    assert bench.ways.rounds == []
