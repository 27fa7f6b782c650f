"""Norms, rotary turns and gates in Triton beside torch: interpreted here, on the device where there is one."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from outrider.verifier_service.gpu import kernels as gpu
from outrider.verifier_service.model import decoder as decoder_module
from outrider.verifier_service.model.decoder import ACTIVATIONS, Rotary, rotated
from outrider.verifier_service.model.decoder_spec import RotarySpec
from tiny.triton_kernels import compiled_for_hopper, forget, interpreted

triton = pytest.importorskip("triton", reason="needs the package triton")

from outrider.verifier_service.gpu import row_kernels  # noqa: E402
from outrider.verifier_service.gpu.rows import RowKernels  # noqa: E402

MODULES = ("outrider.verifier_service.gpu.rows", "outrider.verifier_service.gpu.row_kernels")
LOOSE = {  # one rounding; to bfloat16 the interpreter cuts off instead
    torch.float32: {"atol": 3e-6, "rtol": 3e-6},
    torch.float16: {"atol": 1e-6, "rtol": 2**-10},
    torch.bfloat16: {"atol": 1e-6, "rtol": 2**-7},
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    return request.param


@pytest.fixture
def own(device) -> Iterator[RowKernels]:
    if device == "cuda":
        yield RowKernels()
        return
    with interpreted(*MODULES) as module:
        yield module.RowKernels()


@pytest.fixture(params=LOOSE, ids=str)
def dtype(request) -> torch.dtype:
    return request.param


def drawn(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def normed(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(rows.double(), (weight.shape[-1],), None, eps) * weight.double()


def turned(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return heads.double() * cos.double() + heads.double().roll(heads.shape[-1] // 2, -1) * sin.double()


def require_close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), expected, **LOOSE[dtype])


@pytest.mark.parametrize("size", [1, 33, 576, 5_120])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_rows_are_normed(own, dtype, device, num_tokens, size):
    fused = drawn(num_tokens, size + 3, dtype=dtype, device=device)
    weight = (torch.rand(1, size) + 0.5).to(device)
    given = fused[:, :size]  # rows of something wider
    require_close(own.rms_norm(given, weight, 1e-5), normed(given, weight[0], 1e-5), dtype)


@pytest.mark.parametrize("size", [20, 64])
def test_heads_are_normed_by_themselves(own, dtype, device, size):
    fused = drawn(3, 7, size, dtype=dtype, device=device)
    weight = (torch.rand(5, size) + 0.5).to(device)
    got = own.rms_norm(fused[:, 1:6], weight, 1e-5)
    assert got.shape == (3, 5, size)
    require_close(got, normed(fused[:, 1:6], weight, 1e-5), dtype)


@pytest.mark.parametrize("scale", [1.0, 0.22])
@pytest.mark.parametrize("size", [33, 576])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_the_sum_is_kept_and_it_is_what_is_normed(own, dtype, device, num_tokens, size, scale):
    hidden = drawn(num_tokens, size, dtype=dtype, device=device)
    update = drawn(num_tokens, size + 7, dtype=dtype, device=device)[:, :size]
    weight, before = (torch.rand(1, size) + 0.5).to(device), hidden.clone()
    total, got = own.add_and_norm(hidden, update, scale, weight, 1e-6)
    require_close(total, hidden.double() + scale * update.double(), dtype)
    require_close(got, normed(total, weight[0], 1e-6), dtype)
    assert torch.equal(hidden, before)  # a tap may read it later


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 2), (4, 20), (7, 80), (3, 96), (40, 128), (2, 2_050)])
@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_heads_of_a_view_are_turned(own, dtype, device, num_tokens, num_heads, head_dim, has_norm):
    fused = drawn(num_tokens, num_heads + 2, head_dim, dtype=dtype, device=device)
    cos, sin = (drawn(num_tokens, 1, head_dim + part, dtype=dtype, device=device)[..., part:] for part in (0, 1))
    cos, sin = cos.contiguous(), sin.contiguous()
    weight, before, heads = (torch.rand(num_heads, head_dim) + 0.5).to(device), fused.clone(), fused[:, :num_heads]
    if has_norm:
        got, expected = own.norm_and_rotate(heads, cos, sin, weight, 1e-5), normed(heads, weight, 1e-5)
    else:
        got, expected = own.rotate(heads, cos, sin), heads
    require_close(got, turned(expected, cos, sin), dtype)
    assert torch.equal(fused, before)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("num_turning", [3, 16])
def test_what_does_not_turn_stays(own, device, num_turning, has_norm):
    spec = RotarySpec(frequencies=tuple(0.3 / (i + 1) for i in range(num_turning)), scale=1.0, is_interleaved=False)
    positions = torch.tensor([0, 5, 77], device=device)
    turn = Rotary(spec, 32, dtype=torch.float32, device=torch.device(device))(positions)
    heads, weight = drawn(3, 5, 32, dtype=torch.float32, device=device), torch.rand(5, 32).to(device)
    before = own.rms_norm(heads, weight, 1e-5) if has_norm else heads.clone()
    got = own.norm_and_rotate(heads, *turn, weight, 1e-5) if has_norm else own.rotate(heads, *turn)
    torch.testing.assert_close(got, rotated(before.clone(), turn), **LOOSE[torch.float32])
    still = [i for i in range(32) if i % 16 >= num_turning]
    torch.testing.assert_close(got[..., still], before[..., still], **LOOSE[torch.float32])
    torch.testing.assert_close(got[0], before[0], **LOOSE[torch.float32])


def test_every_activation_of_the_decoder_has_a_kernel(own):
    assert own.activations == ACTIVATIONS.keys()


@pytest.mark.parametrize("shape", [(0, 12), (1, 2), (2, 3, 30), (3, 2 * 2_300)])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_gates_open_as_torchs_do(own, dtype, device, activation, shape):
    gate_up = drawn(*shape, dtype=dtype, device=device) * 6
    if shape[-1] > 2 and gate_up.numel():
        gate_up.view(-1)[0], gate_up.view(-1)[1] = -200.0, 200.0
    gate, up = gate_up.double().chunk(2, dim=-1)
    got = own.gated(gate_up, activation)
    assert got.shape == gate.shape
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), ACTIVATIONS[activation](gate) * up, atol=1e-5, rtol=LOOSE[dtype]["rtol"])


def test_rows_of_a_gate_may_lie_apart(own, device):
    """As those of a grouped product do."""
    wide = drawn(4, 40, dtype=torch.float32, device=device)
    gate, up = wide[:, :15], wide[:, 15:30]
    got = own.gated(wide[:, :30], "silu")
    require_close(got, F.silu(gate.double()) * up, torch.float32)


def test_infinite_and_missing_numbers_stay_what_they_are(own, dtype, device):
    given = drawn(2, 64, dtype=dtype, device=device)
    given[1, 3] = torch.nan
    ones = torch.ones(1, 64, device=device)
    assert own.rms_norm(given, ones, 1e-5).isnan().any(dim=1).tolist() == [False, True]
    for activation in ACTIVATIONS:
        gate_up = torch.tensor([[torch.inf, torch.nan, 1.0, 1.0]], dtype=dtype, device=device)
        assert own.gated(gate_up, activation)[0, 0].isposinf()
        assert own.gated(gate_up, activation)[0, 1].isnan()


# The host's side.


def test_only_plain_tensors_on_a_device_have_kernels():
    assert gpu.kernels_of(torch.empty(1)) is None
    assert gpu.kernels_of(torch.empty(1, device="meta")) is None
    assert decoder_module._kernels_of(torch.empty(1, dtype=torch.float16)) is None


def test_without_triton_there_are_none_and_the_log_says_so(caplog):
    with pytest.MonkeyPatch.context() as patch:
        forget(patch, *MODULES, "outrider.verifier_service.gpu.language")
        patch.setitem(sys.modules, "triton", None)
        assert gpu.load_kernels.__wrapped__() is None
    assert "Triton is not installed" in caplog.text


# The compiler, which needs no device.


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET leaves nothing to compile")
@pytest.mark.skipif(sys.platform != "linux", reason="Triton brings its assembler for Linux only")
@pytest.mark.parametrize("element", ["bf16", "fp16", "fp32"])
def test_all_kernels_compile_for_an_h100(tmp_path, monkeypatch, element):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    types = dict.fromkeys(("output", "total", "rows", "update", "heads", "cosines", "sines", "gate_up"), f"*{element}")
    types |= {"weight": "*fp32", "scale": "fp32", "eps": "fp32"}
    for size in (4_096, 5_120):
        sizes = {"SIZE": size, "BLOCK": 1 << (size - 1).bit_length()}
        compiled_for_hopper(row_kernels.norm_kernel, types, {**sizes, "HAS_UPDATE": True}, num_warps=8)
        without = {"total": None, "update": None, "HAS_UPDATE": False}
        compiled_for_hopper(row_kernels.norm_kernel, types, {**sizes, **without}, num_warps=8)
    for half, block in ((64, 64), (40, 64)):
        sizes = {"NUM_HEADS": 40, "HALF": half, "BLOCK": block, "HEADS": 8}
        compiled_for_hopper(row_kernels.turn_kernel, types, {**sizes, "HAS_NORM": True})
        compiled_for_hopper(row_kernels.turn_kernel, types, {**sizes, "weight": None, "HAS_NORM": False})
    for activation in ACTIVATIONS:
        constants = {"SIZE": 14_336, "BLOCK": 1_024, "ACTIVATION": activation}
        compiled_for_hopper(row_kernels.gate_kernel, types, constants)


# The device.


@pytest.mark.gpu
def test_a_captured_graph_works_on_what_its_rows_hold_later():
    own = RowKernels()
    hidden, update = (drawn(5, 4_096 + part, dtype=torch.bfloat16, device="cuda")[:, :4_096] for part in (0, 8))
    weight, head_weight = torch.rand(1, 4_096, device="cuda"), torch.rand(32, 128, device="cuda")
    turn = (drawn(5, 1, 128, dtype=torch.bfloat16, device="cuda"),) * 2

    def step() -> torch.Tensor:
        total, given = own.add_and_norm(hidden, update, 0.5, weight, 1e-5)
        heads = own.norm_and_rotate(given.unflatten(1, (32, 128)), *turn, head_weight, 1e-5)
        return own.gated(torch.cat([heads.flatten(1), total], dim=1), "silu")

    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    hidden.mul_(-1.5)
    graph.replay()
    torch.cuda.set_sync_debug_mode("error")
    try:
        expected = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(output, expected)
