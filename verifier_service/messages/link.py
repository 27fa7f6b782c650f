"""Handshake and heartbeat of a verifier-drafter link, and the framing of its messages; see `draft` for the others.

Every message travels as msgpack (see `wire`) in a `Frame` that names the verifier and its epoch, in both directions,
so that frames of an older incarnation are recognised.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgpack

from outrider.proto.link_pb2 import Frame
from outrider.verifier_service.messages.draft import (
    PROTOCOL_VERSION,
    Close,
    Commit,
    Commits,
    Draft,
    DraftNeeds,
    Drafts,
    Open,
    Resync,
    Seed,
    States,
)
from outrider.verifier_service.messages.drafter_load import DrafterLoad
from outrider.verifier_service.messages.tensor_route import TensorRoute, choose_transport
from outrider.verifier_service.messages.wire import MAX_FRAME_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The verifier's first frame: its identity, vocabulary, and offers."""

    protocol_version: int = PROTOCOL_VERSION
    verifier_id: str
    epoch: int
    vocab_size: int
    vocab_fingerprint: str = ""  # empty: unknown
    state_taps: tuple[int, ...] = ()  # the hidden states that it keeps for drafters, as in `DraftNeeds`
    tensor_transports: tuple[str, ...] = ()  # supported tensor channels, best first; bytes in frames always work


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The drafter's answer to a `Hello` it accepts."""

    protocol_version: int = PROTOCOL_VERSION
    drafter_id: str
    vocab_size: int
    max_draft_length: int
    max_model_len: int
    needs: DraftNeeds = DraftNeeds()
    tensors: TensorRoute | None = None  # None: states come as bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """The drafter's answer to a `Hello` that it refuses; it then ends the stream."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    sent_s: float  # by the verifier's clock, returned unchanged
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    """The drafter's answer to a `Ping`, with its load."""

    sent_s: float
    load: DrafterLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterIdentity:
    """A drafter's side of the handshake."""

    drafter_id: str
    vocab_size: int
    vocab_fingerprint: str
    max_draft_length: int
    max_model_len: int
    needs: DraftNeeds = DraftNeeds()
    tensor_transports: tuple[str, ...] = ()  # supported tensor channels
    tensor_store: str = ""  # "host:port" of the channels' rendezvous store; "": no channels

    def route(self, hello: Hello, group: str) -> TensorRoute | None:
        """Return the tensor channel of a link to a verifier; None: no common transport, or no need for states."""
        transport = choose_transport(hello.tensor_transports, self.tensor_transports)
        if transport is None or not self.tensor_store or not self.needs.taps:
            return None
        return TensorRoute(transport=transport, store=self.tensor_store, group=group)

    def welcome(self, tensors: TensorRoute | None = None) -> Welcome:
        return Welcome(
            drafter_id=self.drafter_id,
            vocab_size=self.vocab_size,
            max_draft_length=self.max_draft_length,
            max_model_len=self.max_model_len,
            needs=self.needs,
            tensors=tensors,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterEndpoint:
    """One incarnation of a drafter, and the address of its link."""

    drafter_id: str
    endpoint: str  # "host:port"
    epoch: int


VERIFIER_MESSAGES = (Open, Seed, States, Commit, Commits, Close)  # verifier to drafter, for the drafting engine
DRAFTER_MESSAGES = (Draft, Drafts, Resync)  # drafter to verifier, for its engine; Pong is handled by the link

# The shell relays a link's message to the engine in an envelope, with every default spelled out. The result must still
# be a valid frame, or a peer could kill the engine with a message just below the limit.
MAX_LINK_FRAME_BYTES = MAX_FRAME_BYTES - (64 << 10)
# A draft has some kilobytes; decoding a frame of the full size would delay a step by seconds.
MAX_DRAFTER_FRAME_BYTES = 1 << 20
MAX_TOGETHER_BYTES = 1 << 18  # messages are packed into one frame up to this size; a longer one goes alone
MAX_REQUEST_ID_CHARS = 1024  # a gateway's prefix, and a client's id of at most 128

# gRPC would send calls within a cluster through the http_proxy of the environment, which is for the world outside.
NO_PROXY = ("grpc.enable_http_proxy", 0)

# Set at both ends: grpc notices a frozen peer only with ping_timeout_ms beside the keepalive options, and a server
# refuses frequent pings unless it is configured to expect them.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    NO_PROXY,
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_receive_message_length", MAX_LINK_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_LINK_FRAME_BYTES),
)


def vocab_fingerprint(vocab: Mapping[str, int]) -> str:
    """Hash a tokenizer's vocabulary: equal for two tokenizers exactly when every token has the same id."""
    digest = hashlib.blake2b(digest_size=16)
    for token, token_id in sorted(vocab.items(), key=lambda item: (item[1], item[0])):
        encoded = token.encode("utf-8", "surrogatepass")
        # lengths make the encoding injective
        digest.update(b"%d %d " % (token_id, len(encoded)))
        digest.update(encoded)
    return digest.hexdigest()


def refusal_reason(hello: Hello, drafter: DrafterIdentity) -> str | None:
    """Return why a drafter cannot serve a verifier, as text for the operator; None: it can."""
    if hello.protocol_version != PROTOCOL_VERSION:
        return f"protocol version {hello.protocol_version} of the verifier, {PROTOCOL_VERSION} of the drafter"
    if drafter.needs.taps and hello.state_taps != drafter.needs.taps:
        return f"the drafter reads the target's states {drafter.needs.taps}, the verifier keeps {hello.state_taps}"
    if hello.vocab_fingerprint and drafter.vocab_fingerprint:
        if hello.vocab_fingerprint != drafter.vocab_fingerprint:
            return f"vocabularies differ: {hello.vocab_fingerprint} (verifier), {drafter.vocab_fingerprint} (drafter)"
        return None
    if drafter.vocab_size < hello.vocab_size:
        # a larger vocabulary may be padded; a smaller one lacks tokens of the verifier
        return f"the drafter's vocabulary has {drafter.vocab_size} tokens, the verifier's {hello.vocab_size}"
    return None


def frame_of(verifier_id: str, epoch: int, payload: bytes, more: Sequence[bytes] = ()) -> Frame:
    return Frame(sender=verifier_id, epoch=epoch, payload=payload, more=more)


def payloads_of(frame: Frame) -> list[bytes]:
    """Return the messages of a frame, in order."""
    return [frame.payload, *frame.more]


def take_together(outbox: deque[bytes]) -> list[bytes]:
    """Take the next frame's messages from a non-empty queue, in order, up to MAX_TOGETHER_BYTES."""
    taken = [outbox.popleft()]
    num_bytes = len(taken[0])
    while outbox and (num_bytes := num_bytes + len(outbox[0])) <= MAX_TOGETHER_BYTES:
        taken.append(outbox.popleft())
    return taken


def peek_type(payload: bytes) -> str | None:
    """Return the type of an encoded message without decoding the rest; None if it is malformed."""
    unpacker = msgpack.Unpacker(max_buffer_size=MAX_FRAME_BYTES)
    try:
        unpacker.feed(payload)
        if unpacker.read_array_header() < 1:
            return None
        name = unpacker.unpack()
    except (ValueError, msgpack.UnpackException, msgpack.BufferFull):
        return None
    return name if isinstance(name, str) else None


def peek_request_ids(payload: bytes) -> tuple[str, ...]:
    """Return the request ids of a message that failed to decode; none if not even those are readable."""
    try:
        _, fields = msgpack.unpackb(payload)
        found = fields.get("request_ids", [fields.get("request_id")])
    except (ValueError, TypeError, AttributeError, msgpack.UnpackException):
        return ()
    are_readable = isinstance(found, list) and all(isinstance(request_id, str) for request_id in found)
    return tuple(dict.fromkeys(found)) if are_readable else ()
