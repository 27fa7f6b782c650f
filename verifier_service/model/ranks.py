"""Connect the ranks of a tensor-parallel group and their shell.

All ranks of a group run on one node and meet at Unix sockets in a private folder: rank 0 listens for its followers at
`ranks.sock`, the shell (a Serve replica, or the process of `outrider generate`) listens for rank 0 at `shell.sock`.
These pipes carry bytes, never pickles.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pkgutil
import random
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from outrider.verifier_service.start_phases import begin_phases

if TYPE_CHECKING:
    from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup

CONNECT_TIMEOUT_S = 120.0  # a rank may still be importing torch
# below the system's ephemeral ports (Linux: from 32768), above the ports of Ray's workers
PORTS_TO_TRY = range(20_000, 32_768)
NUM_PORT_ATTEMPTS = 100
_POLL_S = 0.1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_MAX_MMAP_THRESHOLD = 32 << 20  # bytes: glibc's upper bound
_PIPE_BUFFER_BYTES = 4 << 20  # an engine's step must not wait for its shell to read


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """A process's rank, and the folder of its group's sockets."""

    rank: int
    size: int
    folder: Path

    @property
    def shell_address(self) -> str:
        return str(self.folder / "shell.sock")

    @property
    def ranks_address(self) -> str:
        return str(self.folder / "ranks.sock")


class MainFunction(NamedTuple):
    """What runs a spec's ranks, by name: a spec imports no engine."""

    function: str  # "module:function", of spec and rank
    process: str = ""  # as phases of its start name it; empty: it tells none before its imports
    first_phase: str = "importing the engine"


class RankMain(Protocol):
    """A spec whose ranks can be run."""

    @property
    def main(self) -> MainFunction: ...


def run_rank(spec: RankMain, rank: RankSpec) -> None:
    """Run one rank of a spec until its shell, or rank 0, is gone."""
    if spec.main.process:
        begin_phases(spec.main.process, spec.main.first_phase)
    pkgutil.resolve_name(spec.main.function)(spec, rank)


class PipeListener:
    """Accepts pipes at a Unix socket."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(address)
        self._socket.listen()
        self._socket.settimeout(_POLL_S)

    def accept(self, is_awaited: Callable[[], bool] = lambda: True, timeout_s: float = CONNECT_TIMEOUT_S) -> Connection:
        """Return the next pipe; raises `ConnectionError` after `timeout_s`, or once `is_awaited` returns False."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s and is_awaited():
            try:
                accepted, _ = self._socket.accept()
            except TimeoutError:
                continue
            accepted.setblocking(True)
            return widen(Connection(accepted.detach()))
        raise ConnectionError("a rank ended, or was too late, while its group was starting")

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> PipeListener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(address: str, timeout_s: float = CONNECT_TIMEOUT_S) -> Connection:
    """Connect to a listener, retrying until it exists."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return widen(Client(address, family="AF_UNIX"))
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)


def widen(pipe: Connection) -> Connection:
    """Enlarge a pipe's send buffer to hold many steps, so that its writer does not block."""
    with socket.socket(fileno=socket.dup(pipe.fileno())) as duplicate:
        duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PIPE_BUFFER_BYTES)
    return pipe


def arrived(pipe: Connection, patience_s: float = 0.0) -> Iterator[bytes]:
    """Read every frame that has arrived, waiting `patience_s` for the first one."""
    while pipe.poll(patience_s):
        yield pipe.recv_bytes()
        patience_s = 0.0


def gather(
    spec: RankSpec, backend: str, timeout_s: float, *, are_followers_alive: Callable[[], bool] = lambda: True
) -> tuple[TensorParallelGroup, list[Connection]]:
    """Join the group; rank 0 also gets a pipe to every follower, a follower one pipe to rank 0."""
    from outrider.verifier_service.model.tensor_parallel import (
        TensorParallelGroup,  # shells use the rest and need no torch
    )

    if spec.size == 1:
        return TensorParallelGroup.single(), []
    if spec.rank == 0:
        with PipeListener(spec.ranks_address) as listener:
            pipes = [listener.accept(are_followers_alive) for _ in range(spec.size - 1)]
        address = f"127.0.0.1:{free_port()}"
        for pipe in pipes:
            pipe.send_bytes(address.encode())
    else:
        pipes = [connect(spec.ranks_address)]
        address = pipes[0].recv_bytes().decode()
    return TensorParallelGroup.join(spec.rank, spec.size, address, backend, timeout_s), pipes


def keep_loaded() -> None:
    """Exclude all present objects from garbage collection: a full one takes 0.2 s, which would delay a step."""
    gc.collect()
    gc.freeze()


def keep_freed_memory() -> None:
    """Keep freed memory of CPU tensors in this process; does nothing without glibc's malloc.

    By default glibc returns much of it to the system after every step and page-faults it in again: 64 rows of a model
    of 250 M parameters then took 320 ms instead of 177. A user's own malloc settings in the environment stay.
    """
    named = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys()
    if named or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, -1)  # never


def free_port() -> int:
    """Return a free TCP port of the loopback address; see `free_ports`."""
    return free_ports(1)[0]


def free_ports(count: int) -> tuple[int, ...]:
    """Return `count` different free TCP ports of the loopback address.

    None is an ephemeral port: a process of Ray that asks the system for any port could get it first.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(PORTS_TO_TRY, NUM_PORT_ATTEMPTS):
        if len(ports) == count:
            break
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
    if len(ports) < count:
        raise OSError(f"of {NUM_PORT_ATTEMPTS} ports tried in {PORTS_TO_TRY}, {len(ports)} are free, not {count}")
    return tuple(ports)
