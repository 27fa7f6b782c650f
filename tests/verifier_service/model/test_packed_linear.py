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

from outrider.verifier_service.model.packed_linear import (
    PackedLinear,
    can_pack,
    make_linear,
    measure_row_cost,
    pack_linears,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 512), (1, 5, 512), (33, 512), (1, 0, 512)])
def test_packed_equals_plain(has_bias, shape, dtype):
    generator = torch.Generator().manual_seed(0)
    weight, bias, rows = (
        torch.randn(size, generator=generator, dtype=torch.float32).to(dtype) for size in ((768, 512), (768,), shape)
    )
    linear = make_linear(weight, bias if has_bias else None)
    assert isinstance(linear, PackedLinear)
    expected = F.linear(rows, weight, bias if has_bias else None)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(linear(rows), expected, atol=tolerance, rtol=tolerance)


@torch.no_grad()
def test_only_what_gains_is_packed():
    block, rows = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 8)), torch.randn(3, 512)
    expected = block(rows)
    assert pack_linears(block) == 1
    assert isinstance(block[0], PackedLinear)
    assert isinstance(block[1], nn.Linear)
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


def test_what_cannot_be_packed():
    assert can_pack(torch.empty(512, 512))
    assert not can_pack(torch.empty(512, 512, dtype=torch.float16))
    assert not can_pack(torch.empty(512, 512, device="meta"))
    assert not can_pack(torch.empty(8, 8))


def test_row_cost_is_a_ratio_of_medians():
    now_s = [0.0]

    def forward(num_rows: int) -> None:
        now_s[0] += 0.01 * num_rows

    assert measure_row_cost(forward, num_rows=5, clock=lambda: now_s[0]) == pytest.approx(5.0)


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
