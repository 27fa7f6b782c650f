"""Torch's operators alone: as on an accelerator, and on a CPU without a C++ compiler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from outrider.verifier_service.cpu import kernels


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Have what is loaded within find no kernels of ours; what was loaded before keeps its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(kernels.VARIABLE, "0")
        _forget()
        yield
    _forget()


def _forget() -> None:
    kernels.load_kernels.cache_clear()
    kernels._library.cache_clear()
