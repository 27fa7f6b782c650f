"""The encoded messages of verifiers, handed to a drafting engine one by one."""

from __future__ import annotations

from collections.abc import Callable

from outrider.drafter_service.engine.engine import DraftEngine
from outrider.verifier_service.messages.draft import Close, Resync, VerifierMessage
from outrider.verifier_service.messages.link import MAX_REQUEST_ID_CHARS, VERIFIER_MESSAGES, peek_request_id
from outrider.verifier_service.messages.wire import WireError, decode, encode

Handle = Callable[[str, VerifierMessage], None]


def handle_payload(engine: DraftEngine, peer: str, payload: bytes, handle: Handle | None = None) -> list[bytes]:
    """Decode one message and hand it to the engine, or to what stands before it; return answers that need no step.

    A message that does not decode fails its own session only: where its request can be read, the verifier is asked
    to say everything again. Ids longer than any of ours are dropped: answers repeat them.
    """
    handle = handle or engine.handle
    message: VerifierMessage | None = None
    try:
        message = decode(payload, VERIFIER_MESSAGES)
        request_id: str | None = message.request_id
    except WireError:
        request_id = peek_request_id(payload)
    if request_id is None or len(request_id) > MAX_REQUEST_ID_CHARS:
        engine.counters.num_bad_messages += 1
        return []
    if message is None:
        engine.counters.num_bad_messages += 1
        handle(peer, Close(request_id=request_id))
        engine.counters.num_resyncs += 1
        return [encode(Resync(request_id=request_id))]
    handle(peer, message)
    return []
