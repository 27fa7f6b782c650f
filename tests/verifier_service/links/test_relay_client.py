from __future__ import annotations

import pytest

from outrider.verifier_service.links.relay_client import RelayDraftClient
from outrider.verifier_service.messages.draft import Close, Commit, Draft, DrafterEvent, DraftSampling, Open, Resync
from outrider.verifier_service.messages.engine import PeerState, PeerWeights, Relay
from outrider.verifier_service.messages.link import MAX_LINK_FRAME_BYTES
from outrider.verifier_service.messages.wire import decode, encode

DRAFT = Draft(request_id="a", round_id=3, position=5, token_ids=(1, 2))
OPEN = Open(request_id="a", sampling=DraftSampling(temperature=0.0), token_ids=(1, 2))
COMMIT = Commit(request_id="a", round_id=1, position=2, token_ids=(), max_length=3)


def test_states_and_messages_become_events_in_order():
    client = RelayDraftClient()
    client.feed(PeerState(peer="d", is_up=True, vocab_size=99))
    client.feed(PeerWeights(peer="d", weight_version="v1"))
    client.feed(Relay(peer="d", payload=encode(DRAFT)))
    client.feed(Relay(peer="e", payload=encode(Resync(request_id="b"))))
    client.feed(PeerState(peer="d", is_up=False))
    assert client.poll() == [
        DrafterEvent(drafter_id="d", vocab_size=99),
        DrafterEvent(drafter_id="d", weight_version="v1"),
        DrafterEvent(drafter_id="d", message=DRAFT),
        DrafterEvent(drafter_id="e", message=Resync(request_id="b")),
        DrafterEvent(drafter_id="d", is_up=False),
    ]
    assert client.poll() == []


def test_the_largest_message_of_a_link_still_fits_its_relay():
    relay = Relay(peer="d" * 100, payload=bytes(MAX_LINK_FRAME_BYTES), received_s=1.0)
    assert decode(encode(relay), (Relay,)) == relay


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", encode(DRAFT)[:-1], encode(COMMIT), encode(DRAFT).replace(b"position", b"poSition")],
    ids=["empty", "no msgpack", "cut short", "a verifier's message", "missing field"],
)
def test_a_bad_frame_is_counted_and_nothing_else(payload: bytes):
    client = RelayDraftClient()
    client.feed(Relay(peer="d", payload=payload))
    client.feed(Relay(peer="d", payload=encode(DRAFT)))
    assert client.num_bad_frames == 1
    assert client.poll() == [DrafterEvent(drafter_id="d", message=DRAFT)]


def test_what_is_sent_waits_in_the_outbox_for_its_peer():
    client = RelayDraftClient()
    client.send("d", [OPEN, COMMIT])
    client.send("e", [Close(request_id="b")])
    relays = client.take_outbox()
    decoded = [(relay.peer, decode(relay.payload, (Open, Commit, Close))) for relay in relays]
    assert decoded == [("d", OPEN), ("d", COMMIT), ("e", Close(request_id="b"))]
    assert client.take_outbox() == ()
