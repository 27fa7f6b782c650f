"""Compile this folder's kernels once per machine, and call them; without a C++ compiler there are none.

A row's numbers do not depend on the other rows of its batch in any kernel, for any instructions: sums have one order,
which the sources write out. tests/exactness/rows holds it.
"""

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
from typing import Any

import torch

from outrider.verifier_service.cache import cache_folder
from outrider.verifier_service.cpu.isa import VARIABLE, Isa, chosen_isas, permit_tiles

SOURCES = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h"))
FLAGS = (  # sums keep their order, infinities and NaN stay
    *("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-Wno-psabi"),
)
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
COMPILE_TIMEOUT_S = 600.0  # 15 to 35 s on two idle processors, more beside other work
CPU_INFO = Path("/proc/cpuinfo")

logger = logging.getLogger(__name__)


class Attend(ctypes.Structure):
    """Arguments of the attention kernel, as in `attend.h`."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_sequences", "table_width")),
        *((name, ctypes.c_int32) for name in ("block_size", "num_threads")),
        *((name, ctypes.c_void_p) for name in ("slots", "firsts", "lengths", "tables")),
        *((name, ctypes.c_void_p) for name in ("prefixes", "positions", "seen_starts", "seen")),
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "output", "key_cache", "value_cache")),
        *((name, ctypes.c_int64) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, ctypes.c_int32) for name in ("num_heads", "num_kv_heads", "head_dim", "value_dim", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        ("sinks", ctypes.c_void_p),
    )


class Product(ctypes.Structure):
    """A linear layer of a `Layer`, as in `layer.cpp`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("multiply", "panels", "scales", "bias")),
        *((name, ctypes.c_int32) for name in ("in_features", "out_features")),
    )


class Norm(ctypes.Structure):
    """A norm of a `Layer`, as in `layer.cpp`."""

    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_float))


class Layer(ctypes.Structure):
    """What a whole layer is made of, as in `layer.cpp`."""

    _fields_ = (
        *((name, Product) for name in ("qkv", "output", "gate_up", "down")),
        *((name, Norm) for name in ("before_attention", "after_attention", "before_mlp", "after_mlp", "heads")),
        *((name, ctypes.c_void_p) for name in ("normalise", "rotate", "gate", "attend")),
        *((name, ctypes.c_int32) for name in ("num_kv_heads", "head_dim", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        ("sinks", ctypes.c_void_p),
    )


_INT, _LONG, _FLOAT, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_LINEAR = (_INT, _INT, *(_POINTER,) * 5, _INT, _LONG, _INT)
_RMS_NORM = (*(_POINTER,) * 3, _LONG, _LONG, _INT, _INT, _FLOAT, _INT)
_ROTATE = (*(_POINTER,) * 3, _LONG, _LONG, _INT, _INT, _INT)
_GATED = (*(_POINTER,) * 2, _LONG, _INT, _INT)
_LAYER = (ctypes.POINTER(Layer), ctypes.POINTER(Attend), *(_POINTER,) * 4)

Function = Callable[..., None]


class Kernels:
    """The kernels for rows of one dtype. They get addresses and check nothing; see each source."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        name = NAMES[dtype]
        # short calls keep the GIL: getting it back from another thread may take longer than the call
        long, short = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        self.attend: dict[torch.dtype, Function] = {  # by the caches' dtype
            dtype: _function(long, f"attend_{name}", (ctypes.POINTER(Attend),)),
            torch.float8_e4m3fn: _function(long, f"attend_{name}_fp8", (ctypes.POINTER(Attend),)),
        }
        self.linear: dict[torch.dtype, Function] = {  # by the weight's dtype
            weight: _function(long, f"linear_{name}_{NAMES[weight]}", _LINEAR) for weight in (dtype, torch.int8)
        }
        self.layer = _function(long, f"layer_{name}", _LAYER)
        self._rms_norm = _function(short, f"rms_norm_{name}", _RMS_NORM)
        self._rotate = _function(short, f"rotate_{name}", _ROTATE)
        kinds = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
        self.activations = {kind: _function(short, f"{own}_{name}", _GATED) for kind, own in kinds.items()}

    def addresses(self, activation: str, cache: torch.dtype) -> dict[str, int | None]:
        """Return what a `Layer` calls: addresses by its fields' names; `cache` is the KV pool's dtype."""
        gate = self.activations[activation]
        own = {"normalise": self._rms_norm, "rotate": self._rotate, "gate": gate, "attend": self.attend[cache]}
        return {name: address_of(function) for name, function in own.items()}

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Norm each head of [num_tokens, num_heads * size] or [num_tokens, num_heads, size].

        `weight` [num_heads, size] is float32.
        """
        output, (num_heads, size) = torch.empty(rows.shape, dtype=rows.dtype), weight.shape
        self._rms_norm(
            *(rows.data_ptr(), weight.data_ptr(), output.data_ptr()),
            *(rows.shape[0], rows.stride(0), num_heads, size, eps, torch.get_num_threads()),
        )
        return output

    def rotate(self, heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """Rotate [num_tokens, num_heads, head_dim] in place and return it; see `decoder.Rotary`."""
        num_tokens, num_heads, size = heads.shape
        self._rotate(
            *(heads.data_ptr(), cosines.data_ptr(), sines.data_ptr()),
            *(num_tokens, heads.stride(0), num_heads, size, torch.get_num_threads()),
        )
        return heads

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """Map [..., 2 * size] to activation(gate) * up [..., size]; the activation is one of `activations`."""
        *others, width = gate_up.shape
        output = torch.empty((*others, width // 2), dtype=gate_up.dtype)
        num_rows, num_threads = gate_up.numel() // width, torch.get_num_threads()
        self.activations[activation](gate_up.data_ptr(), output.data_ptr(), num_rows, width // 2, num_threads)
        return output


def kernels_of(rows: torch.Tensor) -> Kernels | None:
    """Return the kernels for a tensor; None if it is not on a CPU or needs gradients."""
    is_on_cpu = type(rows) is torch.Tensor and rows.device.type == "cpu"  # not a FakeTensor, which has no memory
    return load_kernels(rows.dtype) if is_on_cpu and not rows.requires_grad else None


@cache
def load_kernels(dtype: torch.dtype) -> Kernels | None:
    """Return the kernels for a dtype; None without a compiler, which is logged once. Raises as `wanted_isa`."""
    library = _library() if dtype in (torch.float32, torch.bfloat16) else None
    return None if library is None else Kernels(library[1], dtype)


def wanted_isa() -> Isa | None:
    """Return the instructions that kernels are compiled for where there is a compiler; None: no kernels are wanted.

    Raises `ValueError` where `isa.VARIABLE` asks for instructions that the processor lacks.
    """
    return next(iter(_wanted_isas()), None)


def own_isa() -> Isa | None:
    """Return the instructions that our kernels use; None: there are no kernels. Raises as `wanted_isa`."""
    library = _library()
    return None if library is None else library[0]


def address_of(function: Function) -> int | None:
    """Return a kernel's address."""
    return ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]


def _function(library: ctypes.CDLL, name: str, arguments: tuple[Any, ...]) -> Function:
    function = getattr(library, f"outrider_{name}")
    function.argtypes, function.restype = arguments, None
    return function


def _wanted_isas() -> tuple[Isa, ...]:
    return chosen_isas(_cpu_info(), os.environ.get(VARIABLE), permit_tiles)


@cache
def _library() -> tuple[Isa, Path] | None:
    isas = _wanted_isas()
    if not isas:
        return None
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        logger.warning("no C++ compiler (g++, clang++): attention and linear layers are torch's, which takes longer")
        return None
    for isa in isas:
        try:
            path = _compile_once(compiler, isa.compiler_flags)
            ctypes.CDLL(str(path))
            return isa, path
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning("no kernels for %s, a step takes longer: %s", isa, _text_of(error))
    return None


def _compile_once(compiler: str, flags: tuple[str, ...]) -> Path:
    """Return the compiled library, compiling it unless the cache has it for this source and processor."""
    command = (compiler, *FLAGS, *flags)
    path = cache_folder() / "kernels" / f"cpu-{_key(command)}.so"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            made = Path(scratch) / path.name
            sources = (str(source) for source in SOURCES if source.suffix == ".cpp")
            subprocess.run(
                [*command, "-o", str(made), *sources], check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S
            )
            made.replace(path)  # atomic; another process writes the same file
    return path


def _key(command: tuple[str, ...]) -> str:
    """Return a key of source, command and processor: machines with other instructions may share the folder."""
    flags = next((line for line in _cpu_info().splitlines() if line.startswith(("flags", "Features"))), "")
    parts = (*(source.read_text() for source in SOURCES), *command, flags)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _cpu_info() -> str:
    return CPU_INFO.read_text() if CPU_INFO.is_file() else ""


def _text_of(error: OSError | subprocess.SubprocessError) -> str:
    output = getattr(error, "stderr", None)
    return output.decode(errors="replace").strip() if output else str(error)
