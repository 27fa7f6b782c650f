"""The taker's side of a handover: gathers a request's KV in host memory until all is there, or gives up.

The engine hears of the request only then. It writes the KV when it admits the request, so what is on its way holds no
block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from outrider.verifier_service.handover.kv_bytes import KVBytes
from outrider.verifier_service.links.tensor_channel import TensorReceiver, TensorStore, as_tensor
from outrider.verifier_service.messages.handover import (
    GIVER_MESSAGES,
    ArrivedKV,
    ArrivedPart,
    KVEnd,
    KVPart,
    KVRefused,
    KVTerms,
    PullKV,
    TakenFrame,
)
from outrider.verifier_service.messages.request import GenerationRequest, Request, RequestOutput
from outrider.verifier_service.messages.tensor_route import TensorRoute
from outrider.verifier_service.messages.wire import WireError, decode

MAX_HOST_BYTES = 8 << 30  # of KV that is on its way or waits for blocks; more is not taken
LONGEST_SILENCE_S = 2.0  # of tensors that were announced, once everything else is here


class Taken(NamedTuple):
    """A request whose KV is here."""

    message: GenerationRequest
    arrived: ArrivedKV


@dataclass(slots=True)
class _Pull:
    message: GenerationRequest
    receiver: TensorReceiver | None
    weight_version: str
    parts: list[ArrivedPart] = field(default_factory=list)
    announced: dict[int, int] = field(default_factory=dict)  # a tensor's number: its place among `parts`
    num_tokens: int = 0  # positions that the parts cover
    end: KVEnd | None = None
    silent_since_s: float = 0.0


class Taker:
    """Takes requests over for one engine. Call everything between two steps."""

    def __init__(
        self,
        kv: KVBytes,
        *,
        weight_version: Callable[[], str],
        clock: Callable[[], float],
        store: TensorStore | None = None,
        transport: str = "",
    ) -> None:
        """With a `store`, KV comes over tensor channels of this `transport`, where the giver can."""
        self._kv, self._weight_version, self._clock = kv, weight_version, clock
        self._store, self._transport = store, transport
        self._pulls: dict[str, _Pull] = {}
        self._num_bytes: dict[str, int] = {}  # of host memory, by request, until the engine has written its KV
        self._calls: list[PullKV] = []
        self._taken: list[Taken] = []
        self._failed: list[RequestOutput] = []
        self._num_channels = 0
        self.num_taken = 0

    def __len__(self) -> int:
        return len(self._pulls)

    @property
    def awaits_tensors(self) -> bool:
        """Whether a tensor may arrive that no message tells of."""
        return any(pull.announced for pull in self._pulls.values())

    def begin(self, message: GenerationRequest) -> None:
        """Ask for a request's KV where it is, unless there is too much on its way already."""
        assert message.kv_source is not None
        num_bytes = (len(message.prompt_token_ids) + len(message.output_token_ids)) * self._kv.num_bytes_per_token
        if self._num_bytes and num_bytes + sum(self._num_bytes.values()) > MAX_HOST_BYTES:
            self._failed.append(RequestOutput.not_taken(message.request_id, "no_room"))
            return
        self._num_bytes[message.request_id] = num_bytes
        version, receiver = self._weight_version(), self._open_receiver(message.request_id)
        self._pulls[message.request_id] = _Pull(message, receiver, version)
        terms = KVTerms(
            fingerprint=self._kv.fingerprint,
            weight_version=version,
            tensors=None if receiver is None else receiver.route,
        )
        self._calls.append(PullKV(request_id=message.request_id, source=message.kv_source, terms=terms))

    def feed(self, frame: TakenFrame) -> None:
        """Take in a giver's frame, or the end of its call."""
        pull = self._pulls.get(frame.request_id)
        if pull is None:
            return
        if not frame.payload:
            if pull.end is None:
                self._fail(pull, frame.error or "the giver hung up")
            return
        try:
            self._take(pull, decode(frame.payload, GIVER_MESSAGES))
        except WireError as error:
            self._fail(pull, str(error))

    def write(self, request: Request, start: int) -> None:
        """Write a request's KV to its blocks, from a position on; what is before it the prefix cache had."""
        arrived, width = request.arrived, self._kv.num_bytes_per_token
        assert arrived is not None, f"{request.request_id} came without KV"
        for part in arrived.parts:
            first, stop = max(start, part.start), min(part.stop, arrived.num_tokens)
            if first < stop:
                data = as_tensor(part.data).view(-1, width)
                self._kv.write(request.block_table, first, stop, data[first - part.start : stop - part.start])
        self.release(request)

    def release(self, request: Request) -> None:
        """Drop the KV that a request brought, if it is still on the host: it is written, or is of no use any more."""
        request.arrived = None
        self._num_bytes.pop(request.request_id, None)

    def drop(self, request_id: str) -> None:
        """Forget a request that was cancelled, if it is on its way or waits for blocks."""
        self._num_bytes.pop(request_id, None)
        pull = self._pulls.get(request_id)
        if pull is not None:
            self._end(pull)

    def pump(self) -> tuple[list[Taken], list[RequestOutput]]:
        """Return what has come whole since the last time, and the only outputs of what will not come."""
        for pull in list(self._pulls.values()):
            self._take_tensors(pull)
            if pull.end is not None and not pull.announced:
                self._complete(pull, pull.end)
        taken, self._taken = self._taken, []
        failed, self._failed = self._failed, []
        return taken, failed

    def take_calls(self) -> tuple[PullKV, ...]:
        """Return and clear what the shell is to call, or to hang up."""
        calls, self._calls = tuple(self._calls), []
        return calls

    def close(self) -> None:
        """Close all channels."""
        for pull in list(self._pulls.values()):
            self._end(pull)
        self._num_bytes.clear()

    def _open_receiver(self, request_id: str) -> TensorReceiver | None:
        if self._store is None:
            return None
        self._num_channels += 1
        route = TensorRoute(
            transport=self._transport, store=self._store.address, group=f"kv-{self._num_channels}-{request_id}"
        )
        return TensorReceiver(route, self._store, on_change=lambda: None)

    def _take(self, pull: _Pull, message: KVPart | KVEnd | KVRefused) -> None:
        match message:
            case KVRefused():
                self._fail(pull, message.reason)
            case KVEnd():
                pull.end, pull.silent_since_s = message, self._clock()
            case KVPart():
                self._take_part(pull, message)

    def _take_part(self, pull: _Pull, part: KVPart) -> None:
        num_bytes = (part.stop - part.start) * self._kv.num_bytes_per_token
        if part.start != pull.num_tokens or part.stop <= part.start:
            self._fail(pull, f"positions {part.start} to {part.stop} after {pull.num_tokens}")
        elif part.stop > _most_tokens(pull.message):
            self._fail(pull, f"position {part.stop} of a request of {_most_tokens(pull.message)} tokens at most")
        elif num_bytes != (part.num_bytes if part.tensor else len(part.data)):
            self._fail(pull, f"{part.num_bytes or len(part.data)} bytes for {part.stop - part.start} positions")
        elif part.tensor and (pull.receiver is None or not pull.receiver.expect(part.tensor, part.num_bytes)):
            self._fail(pull, f"tensor {part.tensor} was not expected")
        else:
            if part.tensor:
                pull.announced[part.tensor] = len(pull.parts)
            pull.parts.append(ArrivedPart(part.start, part.stop, part.data))
            pull.num_tokens = part.stop

    def _take_tensors(self, pull: _Pull) -> None:
        if pull.receiver is None:
            return
        for number, tensor in pull.receiver.arrived():
            place = pull.announced.pop(number)
            pull.parts[place] = pull.parts[place]._replace(data=tensor.numpy().data)
            pull.silent_since_s = self._clock()
        if pull.announced and pull.receiver.failure is not None:
            self._fail(pull, f"tensor channel: {pull.receiver.failure}")
        elif pull.announced and pull.end is not None and self._clock() > pull.silent_since_s + LONGEST_SILENCE_S:
            self._fail(pull, "tensors that were announced did not come")

    def _complete(self, pull: _Pull, end: KVEnd) -> None:
        message, source = pull.message, pull.message.kv_source
        assert source is not None
        known, num_prompt = message.output_token_ids, len(message.prompt_token_ids)
        num_tokens = num_prompt + len(end.output_token_ids)
        if end.num_tokens != num_tokens or pull.num_tokens != num_tokens - 1:
            self._fail(pull, f"KV of {pull.num_tokens} positions for {num_tokens} tokens")
        elif known and known != end.output_token_ids:
            self._fail(pull, "the giver has other tokens than were published")
        elif pull.weight_version != self._weight_version():
            self._fail(pull, "other_weights")
        else:
            self._end(pull)
            output_token_ids = () if source.draws_anew else end.output_token_ids
            arrived = ArrivedKV(num_prompt + len(output_token_ids) - 1, pull.parts)
            # without siblings: their KV is shared within one pool, and this one has KV of its own
            message = replace(message, kv_source=None, group_id=None, output_token_ids=output_token_ids)
            self._taken.append(Taken(message, arrived))
            self.num_taken += 1

    def _fail(self, pull: _Pull, reason: str) -> None:
        self._end(pull)
        del self._num_bytes[pull.message.request_id]
        self._failed.append(RequestOutput.not_taken(pull.message.request_id, reason))

    def _end(self, pull: _Pull) -> None:
        """Forget a pull; its shell hangs up."""
        del self._pulls[pull.message.request_id]
        if pull.receiver is not None:
            pull.receiver.close()
        assert pull.message.kv_source is not None
        self._calls.append(PullKV(request_id=pull.message.request_id, source=pull.message.kv_source, terms=None))


def _most_tokens(message: GenerationRequest) -> int:
    """Return how many tokens a request has at its giver at most: those that were published, or all that it may have."""
    return len(message.prompt_token_ids) + (len(message.output_token_ids) or message.sampling.max_tokens)
