"""Which instructions are chosen, from what a processor says of itself."""

from __future__ import annotations

import pytest

from outrider.verifier_service.cpu.isa import Isa, chosen_isas

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
    assert chosen_isas(cpuinfo, None, permitted)[0] is isa
    assert chosen_isas(cpuinfo, "", permitted)[0] is isa


def test_an_operator_may_want_less():
    assert chosen_isas(XEON, "avx512_bf16", permitted)[0] is Isa.AVX512_BF16
    assert chosen_isas(EPYC, "avx2", permitted)[0] is Isa.AVX2
    assert chosen_isas(EPYC, "baseline", permitted)[0] is Isa.BASELINE
    assert chosen_isas(EPYC, "0", permitted) == ()


def test_a_compiler_that_does_not_know_the_fullest_is_asked_for_the_next():
    assert chosen_isas(XEON, None, permitted) == (Isa.AMX, Isa.AVX512, Isa.AVX2, Isa.BASELINE)
    assert chosen_isas(XEON, "avx512", permitted) == (Isa.AVX512,)


def test_a_system_that_permits_no_tiles_has_none():
    assert chosen_isas(XEON, None, lambda: False)[0] is Isa.AVX512
    with pytest.raises(ValueError, match=r"one of avx512_bf16, avx512, avx2, baseline .*'amx'"):
        chosen_isas(XEON, "amx", lambda: False)


@pytest.mark.parametrize("wish", ["avx512", "amx", "1"])
def test_what_the_processor_lacks_is_refused(wish):
    with pytest.raises(ValueError, match=f"OUTRIDER_CPU_KERNELS must be 0 or one of avx2, baseline .*'{wish}'"):
        chosen_isas(OLD_EPYC, wish, permitted)
