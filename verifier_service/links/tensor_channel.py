"""Send tensors from a verifier's engine to a drafter's, or to another verifier's, over a two-rank process group.

A channel lives as long as one connection of a link, or as one handover. Its process group is made directly from the
receiver's store (`new_group` cannot span jobs). Each end is a thread, so that no step and no draft waits for the other
side. Bytes in flight are bounded, and every transfer has a time-out. The first failure closes the channel for good
(gloo closes a pair whose wait timed out, NCCL has to abort); states then go as bytes until the next connection.

The drafter only receives tensors that a frame has announced, so an idle channel has no transfer that could time out:

    verifier   offer(tensor) = 7 ......... frame "States, tensor 7, 24576 bytes" -> link ->  expect(7, 24576)
    sender     send, waits for the receiver ============ two-rank group ============>  receiver: recv, arrived()

Both ends must trust each other, as those of a link without TLS: nothing is encrypted, and gloo ends a process that
receives more bytes than announced.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from outrider.verifier_service.messages.tensor_route import NCCL, TensorRoute

logger = logging.getLogger(__name__)
SENDER, RECEIVER = 0, 1  # ranks
_NCCL_POLL_S = 0.0005
_MAX_TAG = 1 << 30


class ChannelError(RuntimeError):
    """A transfer failed or was too late; the channel is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelLimits:
    """Bounds on bytes in flight and on times. Raises `ValueError` naming the field."""

    connect_timeout_s: float = 5.0
    transfer_timeout_s: float = 2.0  # for one tensor; as long as a link's heartbeat time-out
    max_queued_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for name in ("connect_timeout_s", "transfer_timeout_s", "max_queued_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")


# --- the two-rank group ---


class TensorPair(Protocol):
    """One end of a two-rank group. Several transfers may be in flight; wait for them in the order of their start."""

    def start(self, tensor: torch.Tensor, number: int) -> Any:
        """Begin to send, or to receive into, a uint8 host tensor [num_bytes]; return the transfer to wait for."""

    def wait(self, transfer: Any, timeout_s: float) -> None:
        """Wait for a transfer; raises `ChannelError` if it failed or timed out."""

    def abort(self) -> None:
        """Abort all transfers in flight."""


OpenPair = Callable[[TensorRoute, int, ChannelLimits], TensorPair]


class TensorStore:
    """The rendezvous store of a drafter's channels: a TCP key-value store that listens on one address."""

    def __init__(self, host: str) -> None:
        listener = socket.create_server((host, 0), backlog=128)
        self.address = f"{host}:{listener.getsockname()[1]}"
        port = listener.getsockname()[1]
        # by default the store listens on every interface; it owns and closes the socket passed here
        self._store = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._lock = threading.Lock()
        self._groups: set[str] = set()

    @property
    def num_keys(self) -> int:
        return int(self._store.num_keys())

    def enter(self, group: str) -> None:
        with self._lock:
            self._groups.add(group)

    def leave(self, group: str) -> None:
        """Delete the keys of closed channels: of this one, and of those whose verifier connected too late."""
        with self._lock:
            self._groups.discard(group)
            for key in self._store.list_keys():
                if not any(key.startswith(f"{live}/") for live in self._groups):
                    self._store.delete_key(key)


def _join(route: TensorRoute, limits: ChannelLimits) -> tuple[dist.Store, str]:
    """Connect to a channel's store; return the channel's part of it, and this machine's address towards it."""
    host, _, port = route.store.rpartition(":")
    timeout = timedelta(seconds=limits.connect_timeout_s)
    # probe first: if the store is gone, torch's client would retry and fill the log
    with socket.create_connection((host, int(port)), limits.connect_timeout_s) as probe:
        own_host: str = probe.getsockname()[0]
    client = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    return dist.PrefixStore(route.group, client), own_host


class GlooPair:
    """A pair of TCP sockets under gloo."""

    def __init__(self, route: TensorRoute, rank: int, limits: ChannelLimits) -> None:
        backend: Any = dist.ProcessGroupGloo  # torch's stubs are incomplete
        store, host = _join(route, limits)
        options = backend._Options()
        options._devices = [backend.create_device(hostname=host)]
        options._timeout = timedelta(seconds=limits.connect_timeout_s)
        self._peer = 1 - rank
        self._group = backend(store, rank, 2, options)
        self._begin = self._group.send if rank == SENDER else self._group.recv

    def start(self, tensor: torch.Tensor, number: int) -> Any:
        return self._begin([tensor], self._peer, number % _MAX_TAG)

    def wait(self, transfer: Any, timeout_s: float) -> None:
        transfer.wait(timedelta(seconds=timeout_s))

    def abort(self) -> None:
        """Do nothing: transfers in flight end with the group."""


class NcclPair:
    """A communicator of two GPUs (NCCL refuses two ranks on one). Host tensors are staged on the GPU at both ends."""

    def __init__(self, route: TensorRoute, rank: int, limits: ChannelLimits) -> None:
        # by default NCCL's watchdog ends the process when a peer is lost; 2: clean up only
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
        backend: Any = dist.ProcessGroupNCCL
        store, _ = _join(route, limits)
        options = backend.Options()
        options._timeout = timedelta(seconds=limits.connect_timeout_s)
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._rank, self._peer = rank, 1 - rank
        self._group = backend(store, rank, 2, options)
        self._group.eager_connect_single_device(self._device)

    def start(self, tensor: torch.Tensor, number: int) -> Any:
        if self._rank == SENDER:
            staged = tensor.to(self._device)
            return self._group.send([staged], self._peer, 0), staged, None
        staged = torch.empty_like(tensor, device=self._device)
        return self._group.recv([staged], self._peer, 0), staged, tensor

    def wait(self, transfer: Any, timeout_s: float) -> None:
        work, staged, target = transfer
        deadline_s = time.monotonic() + timeout_s
        while not work.is_completed():  # `work.wait()` only makes the stream wait, without a time-out
            if time.monotonic() > deadline_s:
                raise ChannelError(f"timed out after {timeout_s:g} s")
            time.sleep(_NCCL_POLL_S)
        work.wait()
        if target is not None:
            target.copy_(staged)

    def abort(self) -> None:
        self._group.abort()


def open_pair(route: TensorRoute, rank: int, limits: ChannelLimits) -> TensorPair:
    """Join a channel's group, waiting for the other end; raises `RuntimeError` after the connect time-out."""
    return (NcclPair if route.transport == NCCL else GlooPair)(route, rank, limits)


# --- the channel's ends ---


@dataclass(slots=True)
class _Item:
    number: int
    tensor: torch.Tensor  # uint8 [num_bytes]


class _End:
    """A thread that works through a queue of transfers until one fails."""

    def __init__(self, route: TensorRoute, rank: int, limits: ChannelLimits, open_: OpenPair) -> None:
        self.route, self.limits = route, limits
        self.failure: str | None = None  # why the channel is closed for good
        self.is_connected = False
        self._rank, self._open = rank, open_
        self._lock = threading.Condition()
        self._queue: collections.deque[_Item] = collections.deque()
        self._num_queued_bytes = 0  # queued and in flight
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"tensors {route.group}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Tell the thread to end, at the latest after the transfer that it waits for; does not wait."""
        with self._lock:
            self._is_closed = True
            self._queue.clear()
            self._lock.notify()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; return whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _put(self, number: int, tensor: torch.Tensor) -> None:
        with self._lock:
            self._num_queued_bytes += tensor.numel()
            self._queue.append(_Item(number, tensor))
            self._lock.notify()

    def _run(self) -> None:
        try:
            self._work(self._open(self.route, self._rank, self.limits))
        except (RuntimeError, OSError, ValueError) as error:  # torch raises RuntimeError
            self.failure = str(error).partition("\n")[0]
            if not self._is_closed:
                logger.warning("tensor channel %s: %s; its states go as bytes", self.route.group, self.failure)
        finally:
            self.is_connected = False
            self._on_end()

    def _work(self, pair: TensorPair) -> None:
        self.is_connected = True
        try:
            for items in self._batches():
                self._transfer(pair, items)
        except BaseException:
            pair.abort()
            raise

    def _batches(self) -> Iterator[list[_Item]]:
        """Yield the queued transfers, waiting for the next, until the channel is closed."""
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._queue or self._is_closed)
                if self._is_closed:
                    return
                items, self._queue = list(self._queue), collections.deque()
            yield items

    def _transfer(self, pair: TensorPair, items: list[_Item]) -> None:
        """Start all transfers, so that none waits for another's handshake, then wait for each in turn."""
        started = [pair.start(item.tensor, item.number) for item in items]
        for item, transfer in zip(items, started, strict=True):
            if self._is_closed:
                return
            pair.wait(transfer, self.limits.transfer_timeout_s)
            with self._lock:
                self._num_queued_bytes -= item.tensor.numel()
            self._on_transferred(item)

    def _on_transferred(self, item: _Item) -> None:
        """Called after each complete transfer."""

    def _on_end(self) -> None:
        """Called at the end of the thread."""


class TensorSender(_End):
    """The verifier's end. `offer` never blocks; a tensor that it refuses goes as bytes."""

    def __init__(self, route: TensorRoute, limits: ChannelLimits | None = None, *, open_: OpenPair = open_pair) -> None:
        super().__init__(route, SENDER, limits or ChannelLimits(), open_)
        self._num_offered = 0
        self.start()

    def offer(self, data: torch.Tensor) -> int | None:
        """Send a uint8 tensor [num_bytes] that must not change any more; return its number, or None if refused."""
        num_bytes = data.numel()
        has_room = self._num_queued_bytes + num_bytes <= self.limits.max_queued_bytes
        is_open = self.is_connected and not self._is_closed and self.failure is None
        if not (is_open and has_room and num_bytes):
            return None
        self._num_offered += 1
        self._put(self._num_offered, data)
        return self._num_offered

    @property
    def is_refusing(self) -> bool:
        """Whether a refusal is a failure or a full queue: True once the channel is, or was, connected."""
        return self.is_connected or self._is_closed or self.failure is not None


class TensorReceiver(_End):
    """The drafter's end: receives the announced tensors, in order."""

    def __init__(
        self,
        route: TensorRoute,
        store: TensorStore,
        on_change: Callable[[], None],
        limits: ChannelLimits | None = None,
        *,
        open_: OpenPair = open_pair,
    ) -> None:
        """`on_change` is called on the receiver's thread for every arrived tensor, and when the thread ends."""
        super().__init__(route, RECEIVER, limits or ChannelLimits(), open_)
        self._store = store
        self._on_change = on_change
        store.enter(route.group)
        self._arrived: collections.deque[_Item] = collections.deque()
        self._num_expected = 0
        self.start()

    def expect(self, number: int, num_bytes: int) -> bool:
        """Receive an announced tensor; return False if the ends disagree: a gap in the numbers, or too many bytes."""
        has_room = self._num_queued_bytes + num_bytes <= 2 * self.limits.max_queued_bytes
        if number != self._num_expected + 1 or num_bytes < 1 or not has_room:
            return False
        self._num_expected = number
        self._put(number, torch.empty(num_bytes, dtype=torch.uint8))
        return True

    def arrived(self) -> list[tuple[int, torch.Tensor]]:
        """Take the tensors that have arrived: (number, uint8 [num_bytes])."""
        taken: list[tuple[int, torch.Tensor]] = []
        with contextlib.suppress(IndexError):
            while True:
                item = self._arrived.popleft()
                taken.append((item.number, item.tensor))
        return taken

    def _on_transferred(self, item: _Item) -> None:
        self._arrived.append(item)
        self._on_change()

    def _on_end(self) -> None:
        self._store.leave(self.route.group)
        self._on_change()


def as_tensor(data: bytes | bytearray | memoryview) -> torch.Tensor:
    """Return uint8 [num_bytes] over a buffer; a read-only buffer is copied."""
    return torch.frombuffer(bytearray(data) if memoryview(data).readonly else data, dtype=torch.uint8)
