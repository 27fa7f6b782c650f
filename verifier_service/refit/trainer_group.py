"""A torch.distributed group whose rank 0 is a trainer, from which tensors are broadcast.

The trainers of RL make it without torch's default group: a store at tcp://host:port, the group's name as the store's
prefix, and torch's own helper for further groups. Both sides must do the same, or they never meet. Nothing is pickled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from outrider.verifier_service.messages.engine import InitWeightsGroup
from outrider.verifier_service.model.tensor_parallel import BACKENDS
from outrider.verifier_service.model.weights import WeightError

TRAINER = 0  # its rank
_POLL_S = 0.001


class TrainerGroup:
    """This rank's membership."""

    def __init__(self, message: InitWeightsGroup, rank: int, device: torch.device) -> None:
        """Join; returns once all ranks have. Raises `WeightError` for wrong arguments, torch's errors in time."""
        if message.backend not in BACKENDS:
            raise WeightError(f"backend must be one of {', '.join(BACKENDS)}")
        if not TRAINER < rank < message.world_size:
            raise WeightError(f"rank {rank} is not in [1, {message.world_size}): rank 0 is the trainer")
        self._timeout_s = message.timeout_s
        is_gloo = message.backend == "gloo"
        # NCCL's own time-out ends the process, so that ours comes first
        timeout = timedelta(seconds=message.timeout_s * (1 if is_gloo else 10))
        self._device = torch.device("cpu") if is_gloo else device
        address = f"tcp://{message.master_address}:{message.master_port}"
        meeting = dist.rendezvous(address, rank, message.world_size, timeout=timedelta(seconds=message.timeout_s))
        store, rank, world_size = next(meeting)
        store.set_timeout(timedelta(seconds=message.timeout_s))
        self._group, _ = c10d._new_process_group_helper(
            *(world_size, rank, [], dist.Backend(message.backend), dist.PrefixStore(message.group_name, store)),
            group_name=message.group_name,  # type: ignore[arg-type]
            timeout=timeout,
        )
        c10d._world.pg_group_ranks[self._group] = {index: index for index in range(world_size)}

    def receive(
        self, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]], *, is_flattened: bool
    ) -> list[torch.Tensor]:
        """Take part in the trainer's broadcasts, one per tensor, and return the tensors in host memory.

        `is_flattened`: one broadcast of all their bytes. Raises torch's errors, `TimeoutError` included.
        """
        if is_flattened:
            return self._receive_bytes(dtypes, shapes)
        # all are begun before the first is waited for, as on the trainer's side
        tensors = [
            torch.empty(tuple(shape), dtype=dtype, device=self._device)
            for dtype, shape in zip(dtypes, shapes, strict=True)
        ]
        works = [dist.broadcast(tensor, TRAINER, group=self._group, async_op=True) for tensor in tensors]
        for work in works:
            self._wait(work)
        return [tensor.cpu() for tensor in tensors]

    def _receive_bytes(self, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        sizes = [torch.Size(shape).numel() * dtype.itemsize for dtype, shape in zip(dtypes, shapes, strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        self._wait(dist.broadcast(flat, TRAINER, group=self._group, async_op=True))
        parts = flat.cpu().split(sizes)
        # a part's first byte may lie where no number of its dtype can begin, hence the copies
        return [
            part.clone().view(dtype).view(tuple(shape))
            for part, dtype, shape in zip(parts, dtypes, shapes, strict=True)
        ]

    def _wait(self, work: Any) -> None:
        if self._device.type == "cpu":
            work.wait()  # gloo raises in time
            return
        deadline_s = time.monotonic() + self._timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the trainer's broadcast did not end within {self._timeout_s:g} s")
            time.sleep(_POLL_S)
        work.wait()

    def close(self) -> None:
        """Leave the group, whose broadcasts in flight end with an error."""
        if self._device.type == "cuda":
            c10d._abort_process_group(self._group)  # to destroy it would wait for them
        else:
            dist.destroy_process_group(self._group)


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that a trainer names, as `bfloat16` or `torch.bfloat16`. Raises `WeightError`."""
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise WeightError(f"{name!r} is no dtype")
    return found
