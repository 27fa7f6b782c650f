"""Triton, where it is installed: CUDA builds of torch bring it, installations for CPUs have none and need none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

__all__ = ["PER_STEP", "jit", "tl", "triton"]

# to specialise on what changes from step to step would compile anew while requests wait
PER_STEP = ("num_sequences", "table_width", "num_words", "window", "num_splits")


def jit(function: Callable[..., Any]) -> Any:
    """Make a kernel of a function, compiled when it is first launched; without Triton leave it as it is."""
    if triton is None:
        return function
    return triton.jit(do_not_specialize=[name for name in PER_STEP if name in function.__annotations__])(function)
