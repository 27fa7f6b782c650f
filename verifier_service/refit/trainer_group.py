"""A torch.distributed group whose rank 0 is a trainer, from which tensors are broadcast.

The trainers of RL make it without torch's default group: a store at tcp://host:port, the group's name as the store's
prefix, and torch's own helper for further groups. Both sides must do the same, or they never meet. Nothing is pickled.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import Pipe

import torch

from outrider.verifier_service.formats.checkpoint import PLAIN_DTYPES, WeightError
from outrider.verifier_service.messages.engine import InitWeightsGroup
from outrider.verifier_service.messages.wire import decode, encode
from outrider.verifier_service.model.tensor_parallel import BACKENDS
from outrider.verifier_service.refit.trainer_process import TRAINER, Done, Join, Receive

START_TIMEOUT_S = 120.0  # of a process that imports torch
SLACK_S = 5.0  # torch's own time-outs come first: they say more
ALIGNMENT = 64  # bytes at which a tensor may begin in memory


class TrainerGroup:
    """This rank's membership, in a process of its own."""

    def __init__(self, message: InitWeightsGroup, rank: int, device: torch.device) -> None:
        """Begin to join; raises `WeightError` for wrong arguments."""
        if message.backend not in BACKENDS:
            raise WeightError(f"backend must be one of {', '.join(BACKENDS)}")
        if not TRAINER < rank < message.world_size:
            raise WeightError(f"rank {rank} is not in [1, {message.world_size}): rank 0 is the trainer")
        self._timeout_s, self._has_joined = message.timeout_s, False
        self._pipe, there = Pipe()
        command = [sys.executable, "-m", "outrider.verifier_service.refit.trainer_process", str(there.fileno())]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[there.fileno()])
        there.close()
        device = torch.device("cpu") if message.backend == "gloo" else device
        self._pipe.send_bytes(encode(Join(group=message, rank=rank, device=str(device))))

    def join(self) -> None:
        """Return once all ranks have joined, or at once if they have; raises `WeightError`."""
        if not self._has_joined:
            self._await(START_TIMEOUT_S)
        self._has_joined = True

    def receive(
        self, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]], *, is_flattened: bool
    ) -> list[torch.Tensor]:
        """Take part in the trainer's broadcasts, one per tensor, and return the tensors in host memory.

        `is_flattened`: one broadcast of all their bytes. What the trainer does not send is NaN. Raises `WeightError`
        if it sends more than that, or nothing.
        """
        sizes = [torch.Size(shape).numel() * dtype.itemsize for dtype, shape in zip(dtypes, shapes, strict=True)]
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += size if is_flattened else -(-size // ALIGNMENT) * ALIGNMENT
        parts = ((0, end),) if is_flattened else tuple(zip(starts, sizes, strict=True))
        room = self._receive(parts, max(1, end))
        flat = [room[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        # where the trainer lays tensors end to end, one's first byte may lie where no number of its dtype can begin
        aligned = [part.clone() for part in flat] if is_flattened else flat
        return [part.view(dtype).view(tuple(shape)) for part, dtype, shape in zip(aligned, dtypes, shapes, strict=True)]

    def _receive(self, parts: tuple[tuple[int, int], ...], num_bytes: int) -> torch.Tensor:
        descriptor = os.memfd_create("weights")
        try:
            os.ftruncate(descriptor, num_bytes)
            room = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            self._pipe.send_bytes(encode(Receive(path=path, num_bytes=num_bytes, parts=parts)))
            self._await()
        finally:
            os.close(descriptor)
        return room

    def _await(self, longer_s: float = 0.0) -> None:
        try:
            if not self._pipe.poll(self._timeout_s + longer_s + SLACK_S):
                raise WeightError(f"the trainer timed out: nothing within {self._timeout_s:g} s")
            done: Done = decode(self._pipe.recv_bytes(), (Done,))
        except (EOFError, OSError):
            raise WeightError(self._ending()) from None
        if done.error is not None:
            raise WeightError(done.error)

    def _ending(self) -> str:
        """Return why the process has ended."""
        status = self._process.wait()
        if status == -signal.SIGABRT:
            return "the trainer sent more bytes than dtypes and shapes say"
        return f"the weights group was left (status {status})"

    def close(self) -> None:
        """Leave the group, whose broadcasts in flight end with an error."""
        self._process.kill()
        self._process.wait()


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that a trainer names, as `bfloat16` or `torch.bfloat16`; raises `WeightError`.

    Weights are floating-point numbers of 16 bits or more.
    """
    found: object = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or found not in PLAIN_DTYPES.values():
        raise WeightError(f"dtypes: {name!r} is no floating-point dtype of 16 bits or more")
    return found
