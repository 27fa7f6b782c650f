"""Asynchronous copies between host and device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

ALIGNMENT_BYTES = 16  # of each part of an upload: Triton specialises kernels on aligned pointers

TORCH_TYPES = {
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "float64": torch.float64,
}

Layout = Sequence[tuple[torch.dtype, tuple[int, ...]]]  # dtypes and shapes of an upload's parts


def upload(parts: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copy parts to a device in one asynchronous copy; for a CPU, return them without a copy."""
    if device.type == "cpu":
        return [torch.from_numpy(part) for part in parts]
    layout = [(TORCH_TYPES[part.dtype.name], part.shape) for part in parts]
    staged = torch.empty(num_bytes(layout), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for place, part in zip(carved(staged, layout), parts, strict=True):
        place.numpy()[...] = part
    return carved(staged.to(device, non_blocking=True), layout)


def upload_rows(rows: Sequence[int], device: torch.device) -> torch.Tensor:
    """Copy row indices to a device: int64 [num_rows]; see `upload`."""
    return upload([np.array(rows, np.int64)], device)[0]


class CopyBack:
    """An asynchronous copy of a tensor to the host; the device's tensor may be changed or freed at once."""

    def __init__(self, values: torch.Tensor) -> None:
        on_device = values.device.type == "cuda"
        self._hosted = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_device)
        self._hosted.copy_(values, non_blocking=True)
        self._arrived = torch.cuda.Event() if on_device else None
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> torch.Tensor:
        """Wait for the copy and return it, in host memory."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._hosted


def num_bytes(layout: Layout) -> int:
    """Return the bytes that hold all parts, each of them aligned."""
    return sum(_aligned_bytes(dtype, shape) for dtype, shape in layout)


def carved(memory: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Return views of the parts in `memory`, uint8 [at least `num_bytes(layout)`]."""
    parts, start = [], 0
    for dtype, shape in layout:
        size = math.prod(shape) * dtype.itemsize
        parts.append(memory[start : start + size].view(dtype).view(shape))
        start += _aligned_bytes(dtype, shape)
    return parts


def _aligned_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
