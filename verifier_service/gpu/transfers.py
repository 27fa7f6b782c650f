"""What goes to a device and comes back, without anybody waiting for it before it is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

ALIGNMENT_BYTES = 16  # of each part of an upload: Triton compiles aligned and unaligned pointers apart

TORCH_TYPES = {
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "float64": torch.float64,
}

Layout = Sequence[tuple[torch.dtype, tuple[int, ...]]]  # dtypes and shapes of an upload's parts


def upload(parts: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Move parts to a device in one copy that nobody waits for; on the host they stay where they are."""
    if device.type == "cpu":
        return [torch.from_numpy(part) for part in parts]
    layout = [(TORCH_TYPES[part.dtype.name], part.shape) for part in parts]
    staged = torch.empty(num_bytes(layout), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for place, part in zip(carved(staged, layout), parts, strict=True):
        place.numpy()[...] = part
    return carved(staged.to(device, non_blocking=True), layout)


def upload_rows(rows: Sequence[int], device: torch.device) -> torch.Tensor:
    """Move the numbers of some rows to a device: int64 [num_rows]; see `upload`."""
    return upload([np.array(rows, np.int64)], device)[0]


class CopyBack:
    """The way back of `upload`: a tensor that goes to the host, whatever becomes of the device's own after this."""

    def __init__(self, values: torch.Tensor) -> None:
        on_device = values.device.type == "cuda"
        self._hosted = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_device)
        self._hosted.copy_(values, non_blocking=True)
        self._arrived = torch.cuda.Event() if on_device else None
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> torch.Tensor:
        """Return it, in host memory, once it is there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._hosted


def num_bytes(layout: Layout) -> int:
    """Count the bytes of memory that hold such parts one after another, each of them aligned."""
    return sum(_aligned_bytes(dtype, shape) for dtype, shape in layout)


def carved(memory: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Cut parts out of memory, uint8 [at least `num_bytes(layout)`]."""
    parts, start = [], 0
    for dtype, shape in layout:
        size = math.prod(shape) * dtype.itemsize
        parts.append(memory[start : start + size].view(dtype).view(shape))
        start += _aligned_bytes(dtype, shape)
    return parts


def _aligned_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
