"""The encoded messages of verifiers, handed to a drafting engine one by one."""

from __future__ import annotations

from collections.abc import Callable

from outrider.drafter_service.engine.engine import DraftEngine
from outrider.verifier_service.messages.draft import Close, Commits, Resync, VerifierMessage
from outrider.verifier_service.messages.link import MAX_REQUEST_ID_CHARS, VERIFIER_MESSAGES, peek_request_ids
from outrider.verifier_service.messages.wire import WireError, decode, encode

Handle = Callable[[str, VerifierMessage], None]


def handle_payload(engine: DraftEngine, peer: str, payload: bytes, handle: Handle | None = None) -> list[bytes]:
    """Decode one message and hand it to the engine, or to what stands before it; return answers that need no step.

    A message that does not decode fails its own sessions only: where its requests can be read, the verifier is asked
    to say everything again. Ids longer than any of ours are dropped: answers repeat them.
    """
    handle = handle or engine.handle
    message: VerifierMessage | None = None
    try:
        message = decode(payload, VERIFIER_MESSAGES)
        request_ids = message.request_ids if isinstance(message, Commits) else (message.request_id,)
    except WireError:
        request_ids = peek_request_ids(payload)
    is_sane = all(len(request_id) <= MAX_REQUEST_ID_CHARS for request_id in request_ids)
    if message is not None and is_sane:
        handle(peer, message)
        return []
    engine.counters.num_bad_messages += 1
    if not is_sane:
        return []
    for request_id in request_ids:
        handle(peer, Close(request_id=request_id))
    engine.counters.num_resyncs += len(request_ids)
    return [encode(Resync(request_id=request_id)) for request_id in request_ids]
