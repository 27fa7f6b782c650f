"""This process as rank 0 of two, and a rank 1 in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from outrider.verifier_service.model.ranks import free_port
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from tiny.forking import FORKING

Pair = tuple[TensorParallelGroup, Connection]
JOIN_TIMEOUT_S = 30.0


@contextmanager
def two_ranks(run_follower: Callable[[Connection, str], None]) -> Iterator[Pair]:
    """Yield rank 0's group and the pipe to rank 1, which `run_follower` is until it reads an empty frame."""
    near, far = FORKING.Pipe()
    address = f"127.0.0.1:{free_port()}"
    process = FORKING.Process(target=run_follower, args=(far, address), daemon=True)
    process.start()
    group = TensorParallelGroup.join(0, 2, address)
    yield group, near
    near.send_bytes(b"")
    process.join(JOIN_TIMEOUT_S)
    assert process.exitcode == 0
