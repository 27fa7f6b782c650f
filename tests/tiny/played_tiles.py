"""Our kernels with the sums of AMX and none of its instructions: on every processor with AVX-512."""

from __future__ import annotations

import shutil

import pytest
import torch

from outrider.verifier_service.cpu import kernels
from outrider.verifier_service.cpu.isa import NEEDED, PLAYED_TILES, Isa
from outrider.verifier_service.cpu.kernels import Kernels


def played_tiles(dtype: torch.dtype) -> Kernels:
    """Compile them, or skip the test by name."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler (g++ or clang++), there is none")
    if not NEEDED[Isa.AVX512] <= set(kernels._cpu_info().split()):
        pytest.skip("needs a processor with AVX-512")
    return Kernels(kernels._compile_once(compiler, (PLAYED_TILES,)), dtype)
