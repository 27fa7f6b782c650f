"""The kernels between the linear layers against torch, and what becomes of a machine without any."""

from __future__ import annotations

import ctypes
import logging
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from outrider.verifier_service.cache import CACHE_VARIABLE
from outrider.verifier_service.cpu import kernels
from outrider.verifier_service.cpu.kernels import Kernels, kernels_of, load_kernels
from outrider.verifier_service.model.decoder import ACTIVATIONS

DTYPES = (torch.float32, torch.bfloat16)
LOOSE = {torch.float32: {"atol": 2e-6, "rtol": 2e-6}, torch.bfloat16: {"atol": 1e-6, "rtol": 2**-8}}  # one rounding


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture
def own(dtype) -> Kernels:
    found = load_kernels(dtype)
    if found is None:
        pytest.skip("needs a C++ compiler (g++ or clang++), there is none")
    return found


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


# a few tokens, and so many that threads share them
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 200])
def test_heads_of_a_view_are_normed_by_themselves(own, dtype, num_tokens):
    fused, weight = drawn(num_tokens, 7, 40, dtype=dtype), torch.rand(5, 40) + 0.5
    got = own.rms_norm(fused[:, 1:6], weight, 1e-5)
    expected = F.rms_norm(fused[:, 1:6].double(), (40,), None, 1e-5) * weight
    torch.testing.assert_close(got.double(), expected, **LOOSE[dtype])


def test_a_row_is_normed_as_one_head(own, dtype):
    rows, weight = drawn(3, 576, dtype=dtype), torch.rand(1, 576)
    expected = F.rms_norm(rows.double(), (576,), weight[0].double(), 1e-6)
    torch.testing.assert_close(own.rms_norm(rows, weight, 1e-6).double(), expected, **LOOSE[dtype])


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 200])
def test_heads_of_a_view_are_turned_in_place_and_no_other(own, dtype, num_tokens):
    fused = drawn(num_tokens, 6, 32, dtype=dtype)
    cos, sin = (drawn(num_tokens, 1, 32, dtype=dtype) for _ in range(2))
    before, heads = fused.clone(), fused[:, :4]
    own.rotate(heads, cos, sin)
    expected = before[:, :4].double() * cos + before[:, :4].double().roll(16, -1) * sin
    torch.testing.assert_close(heads.double(), expected, **LOOSE[dtype])
    assert torch.equal(fused[:, 4:], before[:, 4:])


@pytest.mark.parametrize("shape", [(0, 12), (1, 12), (2, 3, 30), (400, 256)])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_gates_open_as_torchs_do(own, dtype, activation, shape):
    gate_up = drawn(*shape, dtype=dtype) * 6
    if gate_up.numel():
        gate_up.view(-1)[0], gate_up.view(-1)[1] = -200.0, 200.0
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = ACTIVATIONS[activation](gate) * up
    got = own.gated(gate_up, activation)
    assert got.shape == expected.shape
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=LOOSE[dtype]["rtol"])


def test_infinite_and_missing_numbers_stay_what_they_are(own, dtype):
    rows = drawn(2, 64, dtype=dtype)
    rows[1, 3] = torch.nan
    assert own.rms_norm(rows, torch.ones(1, 64), 1e-5).isnan().any(dim=1).tolist() == [False, True]
    gate_up = torch.tensor([[torch.inf, torch.nan, 1.0, 1.0]], dtype=dtype)
    assert own.gated(gate_up, "silu")[0, 0].isposinf()
    assert own.gated(gate_up, "silu")[0, 1].isnan()


def test_only_plain_tensors_on_a_cpu_have_kernels():
    assert kernels_of(torch.empty(1, requires_grad=True)) is None
    assert kernels_of(torch.empty(1, device="meta")) is None
    assert kernels_of(torch.nn.Parameter(torch.empty(1))) is None
    assert kernels_of(torch.empty(1, dtype=torch.float16)) is None


@pytest.mark.parametrize("own", [kernels.Attend, kernels.Product, kernels.Norm, kernels.Layer])
def test_the_fields_of_a_structure_are_those_of_the_kernels_in_their_order(own):
    text = "".join(path.read_text() for path in kernels.SOURCES)
    struct = text[text.index(f"struct {own.__name__} {{") :]
    declared = re.findall(r"(\w+)\s*[,;]", re.sub(r"//.*", "", struct[: struct.index("};")]))
    assert [name for name, _ in own._fields_] == declared


SIZES = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float}


@pytest.mark.parametrize("name", ["linear_float32_int8", "rms_norm_bfloat16", "rotate_bfloat16", "silu_bfloat16"])
def test_the_arguments_of_the_others_are_declared_as_in_their_sources(name):
    kind = name.removesuffix("_bfloat16").removesuffix("_float32_int8")
    text = "".join(path.read_text().replace("\\\n", " ") for path in kernels.SOURCES)
    arguments = re.search(rf"outrider_{kind}_##NAME\(([^)]*)\)", text)
    assert arguments is not None
    declared = [
        ctypes.c_void_p if "*" in argument else SIZES[argument.split()[-2]] for argument in arguments[1].split(",")
    ]
    own = {"linear": kernels._LINEAR, "rms_norm": kernels._RMS_NORM, "rotate": kernels._ROTATE, "silu": kernels._GATED}
    assert list(own[kind]) == declared


# --- without them ---


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    kernels.load_kernels.cache_clear()
    kernels._library.cache_clear()
    yield tmp_path
    kernels.load_kernels.cache_clear()
    kernels._library.cache_clear()


def test_without_a_compiler_there_are_none_and_the_log_says_so(fresh, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(fresh))
    with caplog.at_level(logging.WARNING):
        assert kernels.load_kernels(torch.float32) is None
    assert "no C++ compiler" in caplog.text


def test_a_compiler_that_does_not_know_all_instructions_compiles_with_fewer(fresh, monkeypatch, caplog):
    isas = kernels._wanted_isas()
    if len(isas) < 2:
        pytest.skip("needs a processor with more than the baseline's instructions")
    refused: list[tuple[str, ...]] = []

    def old(compiler: str, flags: tuple[str, ...]) -> Path:
        if not refused:
            refused.append(flags)
            raise OSError("unknown instructions")
        return Path("libc.so.6")  # any library

    monkeypatch.setattr(kernels, "_compile_once", old)
    with caplog.at_level(logging.WARNING):
        assert kernels.own_isa() is isas[1]
    assert refused == [isas[0].compiler_flags]
    assert f"no kernels for {isas[0]}" in caplog.text


def test_a_compiler_that_fails_is_told_with_its_words(fresh, monkeypatch, caplog):
    (fresh / "g++").write_text("#!/bin/sh\necho 'what is this machine' >&2\nexit 1\n")
    (fresh / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{fresh}:/bin:/usr/bin")
    with caplog.at_level(logging.WARNING):
        assert kernels.load_kernels(torch.float32) is None
    assert "what is this machine" in caplog.text
    assert not list((fresh / "kernels").iterdir())


def test_they_can_be_switched_off(fresh, monkeypatch):
    monkeypatch.setenv(kernels.VARIABLE, "0")
    assert kernels.load_kernels(torch.float32) is None


@pytest.mark.timeout(900)  # it compiles, and may have to share its processors
def test_what_was_compiled_is_kept(fresh):
    assert kernels.load_kernels(torch.bfloat16) is not None
    (library,) = (fresh / "kernels").iterdir()
    made_ns = library.stat().st_mtime_ns
    kernels._library.cache_clear()
    kernels.load_kernels.cache_clear()
    assert kernels.load_kernels(torch.float32) is not None
    assert [path.stat().st_mtime_ns for path in (fresh / "kernels").iterdir()] == [made_ns]
    assert kernels.load_kernels(torch.float16) is None
