"""Which instructions are chosen, from what a processor says of itself."""

from __future__ import annotations

import pytest

from outrider.verifier_service.cpu.isa import Isa, chosen_isa

XEON = "processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu avx2 fma avx512f avx512_bf16 amx_bf16 amx_tile\n"
EPYC = XEON.replace("GenuineIntel", "AuthenticAMD").replace(" amx_bf16 amx_tile", "")
OLD_EPYC = "vendor_id : AuthenticAMD\nflags : avx2 fma\n"
SKYLAKE = "vendor_id : GenuineIntel\nflags : avx2 fma avx512f\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16\n"


def permitted() -> bool:
    return True


@pytest.mark.parametrize(
    ("cpuinfo", "isa"),
    [
        (XEON, Isa.AMX),
        (XEON.replace(" amx_tile", ""), Isa.AVX512),  # its pair products are the slower ones
        (EPYC, Isa.AVX512_BF16),
        (SKYLAKE, Isa.AVX512),
        (EPYC.replace(" avx512_bf16", ""), Isa.AVX512),
        (OLD_EPYC, Isa.AVX2),
        (OLD_EPYC.replace(" fma", ""), Isa.BASELINE),
        (ARM, Isa.BASELINE),
        ("", Isa.BASELINE),
    ],
)
def test_the_fastest_of_a_processor(cpuinfo, isa):
    assert chosen_isa(cpuinfo, None, permitted) is isa
    assert chosen_isa(cpuinfo, "", permitted) is isa


def test_an_operator_may_want_less():
    assert chosen_isa(XEON, "avx512_bf16", permitted) is Isa.AVX512_BF16
    assert chosen_isa(EPYC, "avx2", permitted) is Isa.AVX2
    assert chosen_isa(EPYC, "baseline", permitted) is Isa.BASELINE
    assert chosen_isa(EPYC, "0", permitted) is None


def test_a_system_that_permits_no_tiles_has_none():
    assert chosen_isa(XEON, None, lambda: False) is Isa.AVX512
    with pytest.raises(ValueError, match=r"one of avx512_bf16, avx512, avx2, baseline .*'amx'"):
        chosen_isa(XEON, "amx", lambda: False)


@pytest.mark.parametrize("wish", ["avx512", "amx", "1"])
def test_what_the_processor_lacks_is_refused(wish):
    with pytest.raises(ValueError, match=f"OUTRIDER_CPU_KERNELS must be 0 or one of avx2, baseline .*'{wish}'"):
        chosen_isa(OLD_EPYC, wish, permitted)
