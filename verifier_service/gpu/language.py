"""Triton, if it is installed: CUDA builds of torch include it, CPU installations do not need it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

__all__ = ["PER_STEP", "jit", "tl", "triton"]

# not specialised: these change between steps, and each new value class would compile while requests wait
PER_STEP = ("num_sequences", "table_width", "num_words", "window", "num_splits")


def jit(function: Callable[..., Any]) -> Any:
    """Turn a function into a kernel, compiled at its first launch; without Triton, return the function unchanged."""
    if triton is None:
        return function
    return triton.jit(do_not_specialize=[name for name in PER_STEP if name in function.__annotations__])(function)
