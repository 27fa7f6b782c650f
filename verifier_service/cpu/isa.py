"""Which of a processor's instructions the kernels are compiled for.

    amx           AMX: products of tiles of bfloat16, beside AVX-512
    avx512_bf16   AVX-512, and its products of bfloat16 pairs
    avx512        AVX-512: bfloat16 is widened to float32
    avx2          256-bit vectors
    baseline      what the compiler takes by itself: NEON on ARM64, SSE2 on x86-64

All run the same sources. `PLAYED_TILES` compiles them with the sums of AMX and none of its instructions, for tests.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from enum import StrEnum

VARIABLE = "OUTRIDER_CPU_KERNELS"  # an `Isa`: no more than these instructions; "0": torch's operators instead


class Isa(StrEnum):
    """Instruction sets, the fullest first."""

    AMX = "amx"
    AVX512_BF16 = "avx512_bf16"
    AVX512 = "avx512"
    AVX2 = "avx2"
    BASELINE = "baseline"

    @property
    def compiler_flags(self) -> tuple[str, ...]:
        """Return what a compiler is told, besides the processor's own name."""
        return FLAGS[self]


FLAGS = {
    Isa.AMX: ("-DOUTRIDER_BFLOAT16_PRODUCTS", "-DOUTRIDER_TILES"),
    Isa.AVX512_BF16: ("-DOUTRIDER_BFLOAT16_PRODUCTS",),
    Isa.AVX512: (),
    Isa.AVX2: ("-mno-avx512f",),
    Isa.BASELINE: ("-mno-avx",) if platform.machine().lower() in ("x86_64", "amd64") else (),
}
PLAYED_TILES = "-DOUTRIDER_PLAYED_TILES"
NEEDED = {
    Isa.AMX: frozenset({"avx512f", "avx512_bf16", "amx_tile", "amx_bf16"}),
    Isa.AVX512_BF16: frozenset({"avx512f", "avx512_bf16"}),
    Isa.AVX512: frozenset({"avx512f"}),
    Isa.AVX2: frozenset({"avx2", "fma"}),
    Isa.BASELINE: frozenset[str](),
}
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18  # of Linux on x86-64: syscall, code, state
# Intel's cores multiply pairs of bfloat16 at half the rate of float32 or less: widened, 16 rows take 0.65 times as long
SLOW_PAIRS = "GenuineIntel"


def chosen_isas(cpuinfo: str, wish: str | None, may_use_tiles: Callable[[], bool]) -> tuple[Isa, ...]:
    """Return the instructions to use, the fastest first, for a compiler that does not know them all; (): torch's.

    `cpuinfo` is the text of /proc/cpuinfo, "" where there is none; `wish` is the value of `VARIABLE`. Raises
    `ValueError` naming it where the processor lacks them. A system may have to permit the use of AMX.
    """
    if wish == "0":
        return ()
    vendor, flags = _field(cpuinfo, "vendor_id"), frozenset(_field(cpuinfo, "flags").split())
    had = [isa for isa in Isa if NEEDED[isa] <= flags and (isa is not Isa.AMX or may_use_tiles())]
    if not wish:
        return tuple(isa for isa in had if isa is not Isa.AVX512_BF16 or vendor != SLOW_PAIRS)
    if wish not in had:
        raise ValueError(f"{VARIABLE} must be 0 or one of {', '.join(had)} on this processor, not {wish!r}")
    return (Isa(wish),)


def permit_tiles() -> bool:
    """Ask Linux to let this process use AMX, which it does from 5.16 on; return whether it does."""
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0


def _field(cpuinfo: str, name: str) -> str:
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
