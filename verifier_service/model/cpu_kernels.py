"""Compile `cpu_kernels.cpp` once for this machine, and call it; without a C++ compiler there are no kernels."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from outrider.verifier_service.model.gguf import cache_folder

SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
FLAGS = (  # sums may be reordered, which vectors take; infinities and NaN keep their meaning
    *("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"),
)
DTYPES = {torch.float32: "outrider_attend_float32", torch.bfloat16: "outrider_attend_bfloat16"}
COMPILE_TIMEOUT_S = 120.0
DISABLING_VARIABLE = "OUTRIDER_CPU_KERNELS"  # "0": do without them

logger = logging.getLogger(__name__)


class Attend(ctypes.Structure):
    """The arguments of a call, as in `cpu_kernels.cpp`."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_sequences", "table_width")),
        *((name, ctypes.c_int32) for name in ("block_size", "num_threads")),
        *((name, ctypes.c_void_p) for name in ("slots", "firsts", "lengths", "contexts", "tables")),
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "output", "key_cache", "value_cache")),
        *((name, ctypes.c_int64) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, ctypes.c_int32) for name in ("num_heads", "num_kv_heads", "head_dim", "value_dim", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        ("sinks", ctypes.c_void_p),
    )


Kernel = Callable[[Attend], None]


@cache
def load_kernel(dtype: torch.dtype) -> Kernel | None:
    """Return the kernel for keys and values of a dtype; None where there is none, said once in the log."""
    library = _library()
    if library is None or dtype not in DTYPES:
        return None
    function = getattr(library, DTYPES[dtype])
    function.restype = None

    def call(arguments: Attend) -> None:
        function(ctypes.byref(arguments))

    return call


@cache
def _library() -> ctypes.CDLL | None:
    if os.environ.get(DISABLING_VARIABLE) == "0":
        return None
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        logger.warning("no C++ compiler (g++, clang++): attention gathers keys and values, which takes longer")
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("the kernels were not compiled, attention takes longer: %s", _text_of(error))
        return None


def _compiled(compiler: str) -> Path:
    """Return the compiled library, from the cache where this source was compiled for this processor before."""
    path = cache_folder() / "kernels" / f"cpu-{_key(compiler)}.so"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            made = Path(scratch) / path.name
            command = [compiler, *FLAGS, "-o", str(made), str(SOURCE)]
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S)
            made.replace(path)  # whoever else does the same makes the same
    return path


def _key(compiler: str) -> str:
    """Tell builds apart: a home folder may be shared by machines with other instructions."""
    processor = Path("/proc/cpuinfo")
    lines = processor.read_text().splitlines() if processor.is_file() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    parts = (SOURCE.read_text(), *FLAGS, compiler, flags)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _text_of(error: OSError | subprocess.SubprocessError) -> str:
    output = getattr(error, "stderr", None)
    return output.decode(errors="replace").strip() if output else str(error)
