"""Load the row kernels for a CUDA device; Triton is imported only if there is one."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from outrider.verifier_service.gpu.rows import RowKernels

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})

logger = logging.getLogger(__name__)


def kernels_of(rows: torch.Tensor) -> RowKernels | None:
    """Return the kernels for a tensor; None if it is not on a CUDA device or needs gradients."""
    is_on_device = type(rows) is torch.Tensor and rows.device.type == "cuda"  # not a FakeTensor, which has no memory
    return load_kernels() if is_on_device and rows.dtype in DTYPES and not rows.requires_grad else None


@cache
def load_kernels() -> RowKernels | None:
    """Return the kernels; None without Triton, which is logged once."""
    from outrider.verifier_service.gpu.language import triton
    from outrider.verifier_service.gpu.rows import RowKernels

    if triton is None:
        logger.warning("Triton is not installed: norms, rotary turns and gates are torch's, which takes longer")
        return None
    return RowKernels()
