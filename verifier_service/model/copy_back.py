"""Copies from a device that nobody waits for before they are read."""

from __future__ import annotations

import torch


class CopyBack:
    """A tensor on its way to the host; what becomes of the device's own after this is no matter."""

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
