"""Packed and fused layers compute what the plain ones do, and the plain weights are gone."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from outrider.verifier_service.cpu.kernels import load_kernels
from outrider.verifier_service.model.packed_linear import (
    Fp8Linear,
    Int8Linear,
    PackedLinear,
    PanelLinear,
    PlainLinear,
    dequantized,
    has_panels,
    make_linear,
    pack_linears,
    quantize,
    to_fp8,
)

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape))).to(dtype)


def require_panels(dtype: torch.dtype) -> None:
    kernels = load_kernels(dtype)
    if kernels is None or not kernels.linear:
        pytest.skip("needs a C++ compiler and a processor with AVX-512")


def panel_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PanelLinear:
    require_panels(weight.dtype)
    return PanelLinear(weight, bias, dtype=weight.dtype)


def int8_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Int8Linear:
    return Int8Linear(*quantize(weight), bias)


def int8_panels(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PanelLinear:
    require_panels(weight.dtype)
    quantized, scales = quantize(weight)
    return PanelLinear(quantized, bias, dtype=weight.dtype, scales=scales)


def packed_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU packs no bfloat16: it needs AVX-512")
    return PackedLinear(weight, bias)


LINEARS = {"panels": panel_linear, "packed": packed_linear, "int8": int8_linear, "int8_panels": int8_panels}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 512), (1, 5, 512), (33, 512), (1, 0, 512)], ids=str)
@pytest.mark.parametrize("make", LINEARS.values(), ids=LINEARS)
def test_every_kind_equals_the_plain_one(make, has_bias, shape, dtype):
    weight, bias, rows = drawn(768, 512, dtype=dtype), drawn(768, dtype=dtype), drawn(*shape, dtype=dtype)
    linear = make(weight, bias if has_bias else None)
    held = dequantized(weight.float()) if make in (int8_linear, int8_panels) else weight.float()
    expected = F.linear(rows.float(), held, bias.float() if has_bias else None)
    torch.testing.assert_close(linear(rows).float(), expected, atol=TOLERANCE[dtype] * 4, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_features", [1, 15, 16, 17, 63, 64, 65, 130])
def test_channels_that_fill_no_panel_are_multiplied_too(out_features, dtype):
    weight, rows = drawn(out_features, 6, dtype=dtype), drawn(9, 6, dtype=dtype)
    linear = panel_linear(weight)
    for num_rows in range(1, 10):
        expected = F.linear(rows[:num_rows].float(), weight.float())
        got = linear(rows[:num_rows])
        torch.testing.assert_close(got.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_features", [40, 71, 72])
def test_int8_rows_that_fill_no_vector_are_not_read_beyond_their_end(in_features, dtype):
    weight, bias, rows = drawn(24, in_features), drawn(24, dtype=dtype), drawn(3, in_features, dtype=dtype)
    beside = torch.full((5, in_features), torch.nan, dtype=dtype)
    beside[:3] = rows
    expected = F.linear(rows.float(), dequantized(weight), bias.float())
    got = int8_linear(weight.to(dtype).float(), bias)(beside)[:3]
    torch.testing.assert_close(got.float(), expected, atol=TOLERANCE[dtype] * 8, rtol=TOLERANCE[dtype])


def test_rows_may_be_views():
    linear, wide = panel_linear(drawn(32, 8)), drawn(5, 20)
    assert torch.equal(linear(wide[:, 4:12]), linear(wide[:, 4:12].contiguous()))
    assert torch.equal(linear(wide[:, :16:2]), linear(wide[:, :16:2].contiguous()))


def test_int8_is_the_nearest_of_255_levels_of_each_channel():
    weight = torch.tensor([[1.0, -0.5, 0.0039, 0.004], [0.0, 0.0, 0.0, 0.0]])
    quantized, scales = quantize(weight)
    assert quantized.tolist() == [[127, -64, 0, 1], [0, 0, 0, 0]]
    torch.testing.assert_close(dequantized(weight)[0], torch.tensor([1.0, -64 / 127, 0.0, 1 / 127]))
    assert scales[1] > 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(1, 512), (2, 5, 512), (1, 0, 512)], ids=str)
def test_fp8_products_are_those_of_the_rounded_sides(shape, device):
    weight, bias, rows = (drawn(*size, dtype=torch.bfloat16) for size in ((768, 512), (768,), shape))
    codes, scales = to_fp8(rows.reshape(-1, 512))
    expected = F.linear((codes.float() * scales).view(shape), dequantized(weight.float(), "fp8"), bias.float())
    got = Fp8Linear(weight.to(device), bias.to(device))(rows.to(device)).cpu()
    torch.testing.assert_close(got.float(), expected, atol=TOLERANCE[torch.bfloat16] * 4, rtol=1e-2)


def test_fp8_has_a_scale_for_each_row():
    codes, scales = to_fp8(torch.tensor([[448.0, 1.0, -0.3], [0.0, 0.0, 0.0], [7e-4, 3.5e-4, 0.0]]))
    assert codes[0].float().tolist() == [448.0, 1.0, -0.3125]
    assert codes[2].float().tolist() == [448.0, 224.0, 0.0]
    torch.testing.assert_close(scales[2], torch.tensor([7e-4 / 448]))
    assert not codes[1].float().any()


def test_fp8_is_for_shapes_that_a_device_multiplies():
    assert isinstance(make_linear(drawn(32, 48, dtype=torch.bfloat16), None, "fp8"), Fp8Linear)
    assert not isinstance(make_linear(drawn(24, 48, dtype=torch.bfloat16), None, "fp8"), Fp8Linear)


def test_the_fastest_is_made():
    require_panels(torch.float32)
    assert isinstance(make_linear(drawn(8, 8)), PanelLinear)
    assert isinstance(make_linear(drawn(8, 7, dtype=torch.bfloat16)), PlainLinear), "half a step is left"
    assert isinstance(make_linear(drawn(8, 8, dtype=torch.float16)), PlainLinear)
    assert isinstance(make_linear(torch.empty(512, 512, device="meta")), PlainLinear)
    assert isinstance(make_linear(drawn(8, 7, dtype=torch.bfloat16), None, "int8"), Int8Linear)


@torch.no_grad()
def test_a_models_linears_are_replaced():
    block, rows = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 7)), torch.randn(3, 512)
    expected, num_expected = block(rows), 2 if has_panels(block[1].weight) else 1
    assert pack_linears(block) == num_expected
    assert not isinstance(block[0], nn.Linear)
    torch.testing.assert_close(block(rows), expected, atol=1e-5, rtol=1e-4)


def test_only_the_packed_copy_remains():
    block = nn.Sequential(nn.Linear(512, 512, bias=False))
    weight = weakref.ref(block[0].weight)
    pack_linears(block)
    gc.collect()
    assert weight() is None
    assert list(block.parameters()) == []


def test_a_tied_head_stays_plain():
    model = nn.Sequential(nn.Embedding(1024, 512), nn.Linear(512, 1024, bias=False))
    model[1].weight = model[0].weight
    assert pack_linears(model, keep=[model[0].weight]) == 0
    assert model[1].weight is model[0].weight


MANY_SHAPES = """
import resource
import torch
from outrider.verifier_service.model.packed_linear import PackedLinear, bound_shape_caches

bound_shape_caches()
torch.set_num_threads(1)
linears = [PackedLinear(torch.zeros(num, 256)) for num in (512, 704, 1024)]
rows = torch.zeros(400, 256)
peaks = []
with torch.inference_mode():
    for num_rows in range(400, 0, -1):
        for linear in linears:
            linear(rows[:num_rows])
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(peaks[-1] - peaks[0])
"""


def test_many_row_counts_do_not_fill_the_memory():
    """In a process of its own: the caches are sized when the first linear runs. Unbounded it is about 700 MiB."""
    growth_kib = int(subprocess.check_output([sys.executable, "-c", MANY_SHAPES], text=True))
    assert growth_kib < 200 << 10
