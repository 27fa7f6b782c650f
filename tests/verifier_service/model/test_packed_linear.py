"""Packed and fused layers compute what the plain ones do, and the plain weights are gone."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

from outrider.verifier_service.model.lean_modules import FastRMSNorm, fuse_siblings, replace_rms_norms
from outrider.verifier_service.model.packed_linear import PackedLinear, can_pack, measure_row_cost, pack_linears
from tiny.models import make_model


class Block(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj = nn.Linear(512, 512, bias=bias)
        self.k_proj = nn.Linear(512, 256, bias=bias)
        self.v_proj = nn.Linear(512, 256, bias=bias)
        self.small = nn.Linear(512, 8, bias=bias)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x), self.small(x)], dim=-1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 512), (1, 5, 512), (33, 512), (1, 0, 512)])
def test_packed_and_fused_equal_plain(bias, shape):
    block, rows = Block(bias), torch.randn(shape)
    expected = block(rows)
    fuse_siblings(block)
    torch.testing.assert_close(block(rows), expected, atol=1e-5, rtol=1e-4)
    assert pack_linears(block) == 1
    torch.testing.assert_close(block(rows), expected, atol=1e-5, rtol=1e-4)
    assert isinstance(block.q_proj.fused, PackedLinear)
    assert isinstance(block.small, nn.Linear)


def test_only_the_packed_copy_remains():
    block = nn.Sequential(nn.Linear(512, 512, bias=False))
    weight = weakref.ref(block[0].weight)
    pack_linears(block)
    gc.collect()
    assert weight() is None
    assert list(block.parameters()) == []


def test_fusing_drops_the_parts():
    block = Block()
    parts = [weakref.ref(block.q_proj.weight), weakref.ref(block.v_proj.weight)]
    fuse_siblings(block)
    gc.collect()
    assert [part() for part in parts] == [None, None]


def test_a_tied_head_stays_plain():
    model = nn.Sequential(nn.Embedding(1024, 512), nn.Linear(512, 1024, bias=False))
    model[1].weight = model[0].weight
    assert pack_linears(model, keep=[model[0].weight]) == 0
    assert model[1].weight is model[0].weight


def test_what_cannot_be_packed():
    assert can_pack(nn.Linear(512, 512))
    assert not can_pack(nn.Linear(512, 512, dtype=torch.bfloat16))
    assert not can_pack(nn.Linear(8, 8))
    assert not can_pack(nn.LayerNorm(512))


def test_linears_that_differ_in_bias_are_not_fused():
    block = Block()
    block.k_proj = nn.Linear(512, 256, bias=True)
    fuse_siblings(block)
    assert isinstance(block.q_proj, nn.Linear)


def test_fused_projections_refuse_another_input():
    block = Block()
    fuse_siblings(block)
    block.q_proj(torch.randn(1, 512))
    with pytest.raises(AssertionError, match="share"):
        block.k_proj(torch.randn(1, 512))


def test_fast_norms_equal_the_library():
    model = make_model("llama")
    rows = torch.randn(3, 7, 64)
    expected = model.model.norm(rows)
    replace_rms_norms(model)
    assert isinstance(model.model.norm, FastRMSNorm)
    torch.testing.assert_close(model.model.norm(rows), expected, atol=1e-6, rtol=1e-5)


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
linears = [PackedLinear(torch.nn.Linear(256, num, bias=False)) for num in (512, 704, 1024)]
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
