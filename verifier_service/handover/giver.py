"""The giver's side of a handover: sends a request's KV to those who take it, part by part, as it is computed."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from outrider.verifier_service.handover.kv_bytes import KVBytes
from outrider.verifier_service.links.tensor_channel import TensorSender
from outrider.verifier_service.messages.handover import GivenFrame, KVEnd, KVPart, KVRefused, TakeKV
from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.messages.tensor_route import TensorRoute
from outrider.verifier_service.messages.wire import encode

MAX_PART_BYTES = 4 << 20
MAX_BYTES_PER_ROUND = 16 << 20  # of all takers together: no step waits for more to be written
MAX_UNREAD_BYTES = 64 << 20  # of one taker, in frames: a slow link or taker fills no memory
HOLD_S = 5.0  # so long a request stands still for a taker; then it goes on by itself
EARLY_S = 5.0  # a taker may come before the request: both were sent at once


@dataclass(slots=True)
class _Take:
    message: TakeKV
    deadline_s: float  # by which the request must be here
    sender: TensorSender | None
    request: Request | None = None
    num_preemptions: int = 0  # of the request, when it was found
    num_sent: int = 0  # positions
    num_unread: int = 0  # bytes of frames that the taker has not read yet
    is_over: bool = False  # all was sent, or the taker was refused

    @property
    def is_behind(self) -> bool:
        """Whether KV is there that was not sent, and that the taker has room for."""
        is_here = self.request is not None and self.num_sent < self.request.num_computed_tokens
        return is_here and not self.is_over and self.num_unread < MAX_UNREAD_BYTES


class Giver:
    """Serves the takers of one engine's requests. Call everything between two steps."""

    def __init__(
        self,
        kv: KVBytes,
        requests: Mapping[str, Request],
        *,
        is_current: Callable[[Request], bool],
        weight_version: Callable[[], str],
        clock: Callable[[], float],
        open_sender: Callable[[TensorRoute], TensorSender] = TensorSender,
    ) -> None:
        """`requests`: the engine's, by id. `is_current`: whether a request's KV is of the weights of now."""
        self.num_given, self.num_bytes = 0, 0  # requests, and their KV
        self.refusals: collections.Counter[str] = collections.Counter()
        self._kv, self._requests, self._clock = kv, requests, clock
        self._is_current, self._weight_version, self._open_sender = is_current, weight_version, open_sender
        self._takes: dict[str, _Take] = {}
        self._frames: list[GivenFrame] = []

    @property
    def is_behind(self) -> bool:
        """Whether the next `pump` has something to send although no step runs meanwhile."""
        return any(take.is_behind for take in self._takes.values())

    def take(self, message: TakeKV) -> None:
        """Begin to give a request's KV."""
        terms = message.terms
        sender = None if terms.tensors is None else self._open_sender(terms.tensors)
        take = self._takes[message.take_id] = _Take(message, self._clock() + EARLY_S, sender)
        if terms.fingerprint != self._kv.fingerprint:
            self._refuse(take, "other_model")
        elif terms.weight_version != self._weight_version():
            self._refuse(take, "other_weights")

    def end(self, take_id: str) -> None:
        """The taker has hung up. What it did not take goes on by itself after a while, unless it is cancelled."""
        take = self._takes.pop(take_id, None)
        if take is None:
            return
        if take.sender is not None:
            take.sender.close()
        request = take.request
        if request is not None and request.stands_until_s == math.inf and not self._is_taken(request):
            request.stands_until_s = self._clock() + HOLD_S

    def read(self, take_id: str, num_bytes: int) -> None:
        """Note that a taker has read frames of so many bytes."""
        if (take := self._takes.get(take_id)) is not None:
            take.num_unread -= num_bytes

    def pump(self) -> list[GivenFrame]:
        """Return frames with what was computed since the last time, at most MAX_BYTES_PER_ROUND."""
        num_left = MAX_BYTES_PER_ROUND
        for take in self._takes.values():
            if not take.is_over:
                num_left -= self._give(take, num_left)
        frames, self._frames = self._frames, []
        return frames

    def close(self) -> None:
        """Close all channels."""
        for take_id in list(self._takes):
            self.end(take_id)

    def _give(self, take: _Take, max_bytes: int) -> int:
        """Send what a taker lacks; return the number of bytes."""
        request = self._find(take)
        if request is None:
            return 0
        if request.stands_until_s is not None:
            request.stands_until_s = math.inf  # until the taker hangs up
        max_bytes = min(max_bytes, MAX_UNREAD_BYTES - take.num_unread)
        stop = min(request.num_computed_tokens, take.num_sent + max_bytes // self._kv.num_bytes_per_token)
        first, per_part = take.num_sent, max(1, MAX_PART_BYTES // self._kv.num_bytes_per_token)
        for start in range(first, stop, per_part):
            self._send_part(take, request, start, min(stop, start + per_part))
        take.num_sent = max(first, stop)
        if request.stands_until_s is not None and take.num_sent == request.num_computed_tokens:
            self._finish(take, request)
        return (take.num_sent - first) * self._kv.num_bytes_per_token

    def _find(self, take: _Take) -> Request | None:
        """Return the request of a take; None if it is not here yet, or if the taker has been refused."""
        request = self._requests.get(take.message.request_id)
        if take.request is None:
            if request is None:
                if self._clock() > take.deadline_s:
                    self._refuse(take, "unknown_request")
                return None
            take.request, take.num_preemptions = request, request.num_preemptions
        problem = None
        if request is not take.request:
            problem = "ended"
        elif take.request.num_preemptions != take.num_preemptions:
            problem = "preempted"
        elif not take.request.hands_over and take.request.stands_until_s is None:
            problem = "went_on"
        elif take.request.block_table and not self._is_current(take.request):
            problem = "other_weights"
        if problem is not None:
            self._refuse(take, problem)
            return None
        return take.request

    def _send_part(self, take: _Take, request: Request, start: int, stop: int) -> None:
        data = self._kv.read(request.block_table, start, stop)
        self.num_bytes += data.numel()
        number = None if take.sender is None else take.sender.offer(data)
        if number is None:
            part = KVPart(start=start, stop=stop, data=cast(bytes, data.numpy().data))  # a view, not a copy
        else:
            part = KVPart(start=start, stop=stop, data=b"", tensor=number, num_bytes=data.numel())
        frame = GivenFrame(take_id=take.message.take_id, payload=encode(part))
        take.num_unread += len(frame.payload)
        self._frames.append(frame)

    def _finish(self, take: _Take, request: Request) -> None:
        take.is_over = True
        self.num_given += 1
        output_token_ids = tuple(request.token_ids[request.num_prompt_tokens :])
        end = KVEnd(output_token_ids=output_token_ids, num_tokens=request.num_tokens)
        self._frames.append(GivenFrame(take_id=take.message.take_id, payload=encode(end), is_last=True))

    def _refuse(self, take: _Take, reason: str) -> None:
        take.is_over = True
        self.refusals[reason] += 1
        refused = KVRefused(reason=reason)
        self._frames.append(GivenFrame(take_id=take.message.take_id, payload=encode(refused), is_last=True))

    def _is_taken(self, request: Request) -> bool:
        """Return whether another taker holds the request still."""
        return any(take.request is request for take in self._takes.values())
