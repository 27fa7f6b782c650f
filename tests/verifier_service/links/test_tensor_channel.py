"""Tensor channels: both ends over a scripted pair, over gloo in this process, and against a peer that fails."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from fakes.tensor_peer import Peer
from outrider.verifier_service.links.tensor_channel import (
    RECEIVER,
    SENDER,
    ChannelError,
    ChannelLimits,
    NcclPair,
    TensorReceiver,
    TensorSender,
    TensorStore,
    as_tensor,
    open_pair,
)
from outrider.verifier_service.messages.tensor_route import TensorRoute
from support.waiting import wait_until as until

PATIENCE_S = 30.0
ROUTE = TensorRoute(transport="gloo", store="nowhere:1", group="v/1/1")


def data(num_bytes: int, value: int = 1) -> torch.Tensor:
    return torch.full((num_bytes,), value, dtype=torch.uint8)


class ScriptedPair:
    """A pair whose transfers end when a test says so: True lets one through, False fails it."""

    def __init__(self) -> None:
        self.verdicts: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.started: list[int] = []
        self.is_aborted = False

    def open(self, route: TensorRoute, rank: int, limits: ChannelLimits) -> ScriptedPair:
        self.rank = rank
        return self

    def start(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        self.started.append(number)
        return tensor

    def wait(self, transfer: torch.Tensor, timeout_s: float) -> None:
        if not self.verdicts.get():
            raise ChannelError("scripted")
        if self.rank == RECEIVER:
            transfer.fill_(9)

    def abort(self) -> None:
        self.is_aborted = True


@pytest.fixture
def store() -> TensorStore:
    return TensorStore("127.0.0.1")


# --- limits and buffers ---


@pytest.mark.parametrize("name", ["connect_timeout_s", "transfer_timeout_s", "max_queued_bytes"])
def test_limits_must_be_positive(name: str):
    with pytest.raises(ValueError, match=name):
        ChannelLimits(**{name: 0})


def test_a_buffer_is_copied_only_where_it_must_not_be_written_to():
    writable = bytearray(b"abc")
    tensor = as_tensor(writable)
    writable[0] = ord("z")
    assert bytes(tensor.tolist()) == b"zbc"
    assert bytes(as_tensor(b"abc").tolist()) == b"abc"


# --- the sender, over a scripted pair ---


def test_tensors_are_numbered_and_all_started_before_any_is_waited_for():
    pair = ScriptedPair()
    sender = TensorSender(ROUTE, open_=pair.open)
    until(lambda: sender.is_connected)
    assert pair.rank == SENDER
    assert sender.offer(data(5)) == 1
    until(lambda: pair.started == [1])
    assert [sender.offer(data(5)), sender.offer(data(5))] == [2, 3]
    pair.verdicts.put(True)
    until(lambda: pair.started == [1, 2, 3])
    for _ in range(2):
        pair.verdicts.put(True)
    until(pair.verdicts.empty)
    sender.close()
    assert sender.join(PATIENCE_S)
    assert sender.failure is None


def test_a_sender_that_was_closed_takes_nothing_more_though_its_thread_still_waits():
    pair = ScriptedPair()
    sender = TensorSender(ROUTE, open_=pair.open)
    until(lambda: sender.is_connected)
    assert sender.offer(data(5)) == 1
    until(lambda: pair.started == [1])
    sender.close()
    assert sender.is_connected
    assert sender.offer(data(5)) is None
    pair.verdicts.put(True)
    assert sender.join(PATIENCE_S)


def test_a_full_queue_refuses_until_there_is_room():
    pair = ScriptedPair()
    sender = TensorSender(ROUTE, ChannelLimits(max_queued_bytes=10), open_=pair.open)
    until(lambda: sender.is_connected)
    assert [sender.offer(data(6)), sender.offer(data(5)), sender.offer(data(4))] == [1, None, 2]
    assert sender.is_refusing
    pair.verdicts.put(True)
    until(lambda: sender.offer(data(5)) == 3)
    pair.verdicts.put(False)
    assert sender.join(PATIENCE_S)


def test_a_channel_that_is_not_there_yet_takes_nothing_and_has_not_failed():
    pair, may_open = ScriptedPair(), threading.Event()

    def open_late(route: TensorRoute, rank: int, limits: ChannelLimits) -> ScriptedPair:
        assert may_open.wait(PATIENCE_S)
        return pair.open(route, rank, limits)

    sender = TensorSender(ROUTE, open_=open_late)
    assert sender.offer(data(5)) is None
    assert not sender.is_refusing
    may_open.set()
    until(lambda: sender.is_connected)
    assert sender.offer(data(5)) == 1
    pair.verdicts.put(True)
    sender.close()
    assert sender.join(PATIENCE_S)


def test_a_failed_transfer_closes_the_channel_for_good():
    pair = ScriptedPair()
    sender = TensorSender(ROUTE, open_=pair.open)
    until(lambda: sender.is_connected)
    sender.offer(data(5))
    pair.verdicts.put(False)
    assert sender.join(PATIENCE_S)
    assert sender.failure == "scripted"
    assert pair.is_aborted
    assert sender.offer(data(5)) is None
    assert sender.is_refusing


# --- the receiver, over a scripted pair ---


def test_what_arrives_is_told_once_and_in_order(store: TensorStore):
    pair, changes = ScriptedPair(), threading.Semaphore(0)
    receiver = TensorReceiver(ROUTE, store, changes.release, open_=pair.open)
    assert receiver.expect(1, 3)
    assert receiver.expect(2, 2)
    assert receiver.arrived() == []
    for _ in range(2):
        pair.verdicts.put(True)
        assert changes.acquire(timeout=PATIENCE_S)
    assert [(number, tensor.tolist()) for number, tensor in receiver.arrived()] == [(1, [9, 9, 9]), (2, [9, 9])]
    assert receiver.arrived() == []
    receiver.close()
    assert receiver.join(PATIENCE_S)
    assert changes.acquire(timeout=PATIENCE_S), "the end is told too"


def test_more_than_may_be_on_its_way_is_not_expected(store: TensorStore):
    pair = ScriptedPair()
    receiver = TensorReceiver(ROUTE, store, lambda: None, ChannelLimits(max_queued_bytes=10), open_=pair.open)
    assert receiver.expect(1, 15)
    assert not receiver.expect(2, 6)
    assert not receiver.expect(2, 0)
    assert not receiver.expect(2, -1)
    assert not receiver.expect(3, 1), "one is missing before it"
    assert not receiver.expect(1, 1)
    assert receiver.expect(2, 5)
    pair.verdicts.put(False)
    assert receiver.join(PATIENCE_S)
    assert receiver.failure == "scripted"


# --- gloo, both ends in this process ---


class Joined:
    """Both ends of one channel, as patient as these tests unless told otherwise."""

    def __init__(self, store: TensorStore, group: str, *, transfer_timeout_s: float = PATIENCE_S) -> None:
        route = TensorRoute(transport="gloo", store=store.address, group=group)
        self.changes = threading.Semaphore(0)
        limits = ChannelLimits(connect_timeout_s=PATIENCE_S, transfer_timeout_s=transfer_timeout_s)
        self.receiver = TensorReceiver(route, store, self.changes.release, limits)
        self.sender = TensorSender(route, limits)
        until(lambda: self.sender.is_connected and self.receiver.is_connected)

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        number = self.sender.offer(tensor)
        assert number is not None
        assert self.receiver.expect(number, tensor.numel())
        assert self.changes.acquire(timeout=PATIENCE_S)
        [(arrived_number, arrived)] = self.receiver.arrived()
        assert arrived_number == number
        return arrived

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        assert self.sender.join(PATIENCE_S)
        assert self.receiver.join(PATIENCE_S)


def test_tensors_arrive_as_they_were(store: TensorStore):
    joined = Joined(store, "a")
    for num_bytes in (1, 5, 3072, 4 << 20):
        tensor = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
        assert torch.equal(joined.move(tensor), tensor)
    joined.close()


def test_channels_come_and_go_without_leaks(store: TensorStore):
    Joined(store, "first").close()  # what the libraries make once
    before = [len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")]
    for index in range(50):
        joined = Joined(store, f"v/{index}")
        assert joined.move(data(10, index % 256)).tolist() == [index % 256] * 10
        joined.close()
        assert store.num_keys == 0
    until(lambda: [len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")] <= before)


def test_a_peer_that_does_not_come_is_a_failure_and_leaves_nothing(store: TensorStore):
    route = TensorRoute(transport="gloo", store=store.address, group="alone")
    limits = ChannelLimits(connect_timeout_s=0.3)
    receiver = TensorReceiver(route, store, lambda: None, limits)
    assert receiver.join(PATIENCE_S)
    assert receiver.failure is not None
    assert store.num_keys == 0
    sender = TensorSender(route, limits)  # too late
    assert sender.join(PATIENCE_S)
    assert sender.failure is not None
    Joined(store, "next").close()
    assert store.num_keys == 0, "the next channel that ends sweeps up after those that came too late"


def test_a_store_that_is_gone_is_a_failure_at_once():
    gone = TensorRoute(transport="gloo", store="127.0.0.1:9", group="g")
    sender = TensorSender(gone, ChannelLimits(connect_timeout_s=PATIENCE_S))
    assert sender.join(PATIENCE_S / 2)
    assert sender.failure is not None


def test_a_transfer_that_nobody_takes_ends_at_its_time_out_and_both_ends_close(store: TensorStore):
    joined = Joined(store, "a", transfer_timeout_s=0.2)
    joined.sender.offer(data(5))
    assert joined.sender.join(PATIENCE_S)
    assert joined.sender.failure is not None
    joined.receiver.expect(1, 5)
    assert joined.receiver.join(PATIENCE_S)
    assert joined.receiver.failure is not None


def test_a_store_listens_on_its_own_address_alone(store: TensorStore):
    port = int(store.address.rpartition(":")[2])
    with open("/proc/net/tcp") as table, open("/proc/net/tcp6") as table6:
        listening = [line.split()[1] for line in [*table, *table6] if line.split()[3] == "0A"]
    assert [address for address in listening if address.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]


# --- a peer in another process ---


@pytest.fixture
def peer() -> Iterator[Peer]:
    child = Peer()
    yield child
    child.kill()


def sender_to(peer: Peer, group: str, **limits: float) -> TensorSender:
    peer.say("receive", group)
    route = TensorRoute(transport="gloo", store=peer.store, group=group)
    sender = TensorSender(route, ChannelLimits(connect_timeout_s=PATIENCE_S, max_queued_bytes=1 << 30, **limits))
    until(lambda: sender.is_connected)
    return sender


def test_a_frozen_peer_is_given_up_and_never_holds_the_step_loop(peer: Peer):
    timeout_s = 2.0
    sender = sender_to(peer, "a", transfer_timeout_s=timeout_s)
    peer.say("expect", "a", 1, 6)
    assert sender.offer(data(6)) == 1
    peer.hear("a 1 6")
    peer.signal(signal.SIGSTOP)
    begin_s = time.monotonic()
    offers_s: list[float] = []
    while sender.failure is None:
        asked_s = time.monotonic()
        sender.offer(data(1 << 16))
        offers_s.append(time.monotonic() - asked_s)
        time.sleep(0.005)  # the step
        assert time.monotonic() - begin_s < 5 * timeout_s
    assert time.monotonic() - begin_s > 0.5 * timeout_s
    assert len(offers_s) > 10, "an offer that waits for the peer is the only one until it is given up"
    assert sorted(offers_s)[-2] < 0.1 * timeout_s, "one stall is the machine's, two are ours"
    peer.signal(signal.SIGCONT)
    again = sender_to(peer, "b", transfer_timeout_s=PATIENCE_S)  # the next connection of the link
    peer.say("expect", "b", 1, 7)
    assert again.offer(data(7)) == 1
    peer.hear("b 1 7")
    again.close()


def test_a_peer_killed_before_it_takes_a_tensor_is_noticed_at_once(peer: Peer):
    sender = sender_to(peer, "a", transfer_timeout_s=10 * PATIENCE_S)
    assert sender.offer(data(100)) == 1
    peer.signal(signal.SIGKILL)
    assert sender.join(PATIENCE_S)
    assert sender.failure is not None


def test_a_peer_killed_amid_the_bytes_of_a_tensor_is_given_up_at_the_time_out(peer: Peer):
    sender = sender_to(peer, "a", transfer_timeout_s=1.0)  # gloo itself waits on, for ever
    num_bytes = 256 << 20
    peer.say("expect", "a", 1, num_bytes)
    assert sender.offer(data(num_bytes)) == 1
    peer.signal(signal.SIGKILL)
    assert sender.join(PATIENCE_S)
    assert sender.failure is not None


def test_a_verifier_killed_amid_a_transfer_leaves_the_drafter_alive(peer: Peer, store: TensorStore):
    route = TensorRoute(transport="gloo", store=store.address, group="a")
    limits = ChannelLimits(connect_timeout_s=PATIENCE_S, transfer_timeout_s=PATIENCE_S)
    receiver = TensorReceiver(route, store, lambda: None, limits)
    peer.say("send", "a", store.address)
    peer.hear("a connected")
    peer.say("offer", "a", 5)
    peer.hear("a offered 1")
    assert receiver.expect(1, 5)
    until(receiver.arrived)
    assert receiver.expect(2, 5)  # named in a frame, and then the verifier dies
    peer.signal(signal.SIGKILL)
    assert receiver.join(PATIENCE_S / 2)
    assert receiver.failure is not None
    assert store.num_keys == 0


# --- NCCL ---


@pytest.mark.gpu
def test_nccl_moves_tensors_between_two_gpus(store: TensorStore):
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL refuses two ranks on one GPU")
    route = TensorRoute(transport="nccl", store=store.address, group="n")
    moved = data(4096, 7)

    def send() -> None:
        torch.cuda.set_device(1)
        pair = open_pair(route, SENDER, ChannelLimits(connect_timeout_s=PATIENCE_S))
        pair.wait(pair.start(moved, 1), PATIENCE_S)

    thread = threading.Thread(target=send)
    thread.start()
    torch.cuda.set_device(0)
    pair = open_pair(route, RECEIVER, ChannelLimits(connect_timeout_s=PATIENCE_S))
    assert isinstance(pair, NcclPair)
    arrived = torch.zeros_like(moved)
    pair.wait(pair.start(arrived, 1), PATIENCE_S)
    thread.join()
    assert torch.equal(arrived, moved)
    with pytest.raises(ChannelError, match="timed out"):
        pair.wait(pair.start(arrived, 2), 0.5)
    pair.abort()
