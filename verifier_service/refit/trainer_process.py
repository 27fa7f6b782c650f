"""A process that takes part in a trainer's broadcasts for one rank.

Gloo ends the process that gets more bytes than it has room for, and a rendezvous with nobody cannot be broken off. So
neither happens in the process that serves. `TrainerGroup` starts this one, `python -m` this module with the number of a
socket; it ends with that.

    TrainerGroup ---- Join, Receive ---> here <--- broadcasts --- trainer
                 <--- Done ------------
    memory of the process that serves <-- bytes
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from outrider.verifier_service.messages.engine import InitWeightsGroup
from outrider.verifier_service.messages.wire import decode, encode

TRAINER = 0  # its rank
UNSENT = 0xFF  # what room is filled with: in floating-point numbers of any dtype it is NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Join a group as one of its ranks; broadcasts go through `device`'s memory."""

    group: InitWeightsGroup
    rank: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """Take part in a broadcast for each part of a file, which has room for all of them."""

    path: str
    num_bytes: int
    parts: tuple[tuple[int, int], ...]  # first byte and number of bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    error: str | None = None


def join(message: InitWeightsGroup, rank: int) -> dist.ProcessGroup:
    """Join the group; returns once all ranks have. Raises torch's errors in time."""
    timeout = timedelta(seconds=message.timeout_s)
    address = f"tcp://{message.master_address}:{message.master_port}"
    store, rank, world_size = next(dist.rendezvous(address, rank, message.world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(
        *(world_size, rank, [], dist.Backend(message.backend), dist.PrefixStore(message.group_name, store)),
        group_name=message.group_name,  # type: ignore[arg-type]
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {index: index for index in range(world_size)}
    return group


def receive(group: dist.ProcessGroup, message: Receive, device: torch.device) -> None:
    """Take part in the broadcasts; all are begun before the first is waited for, as on the trainer's side."""
    with open(message.path, "r+b") as file:
        room = torch.frombuffer(mmap.mmap(file.fileno(), message.num_bytes), dtype=torch.uint8)
    room.fill_(UNSENT)
    parts = [room[start : start + num_bytes] for start, num_bytes in message.parts]
    buffers = parts if device.type == "cpu" else [part.to(device) for part in parts]
    for work in [dist.broadcast(buffer, TRAINER, group=group, async_op=True) for buffer in buffers]:
        work.wait()
    for part, buffer in zip(parts, buffers, strict=True):
        if part is not buffer:
            part.copy_(buffer)


def serve(pipe: Connection) -> None:
    """Do what the other end of the pipe asks, until it is closed."""
    group: dist.ProcessGroup | None = None
    device = torch.device("cpu")
    while True:
        message = decode(pipe.recv_bytes(), (Join, Receive))
        error: str | None = None
        try:
            if isinstance(message, Join):
                device = torch.device(message.device)
                group = join(message.group, message.rank)
            else:
                assert group is not None, "Join comes first"
                receive(group, message, device)
        except Exception as caught:  # whatever it is, the rank that serves tells of it
            error = str(caught) or repr(caught)
        pipe.send_bytes(encode(Done(error=error)))


def main() -> None:
    with contextlib.suppress(EOFError, ConnectionError), Connection(int(sys.argv[1])) as pipe:
        serve(pipe)
    os._exit(0)  # to leave a group in order would wait for the trainer


if __name__ == "__main__":
    main()
