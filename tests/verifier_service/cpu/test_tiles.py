"""The order of AMX's sums: as the manual says it, in kernels without AMX, and in a processor's tiles."""

from __future__ import annotations

import pytest
import torch

from outrider.verifier_service.cpu import kernels
from outrider.verifier_service.cpu.isa import Isa
from outrider.verifier_service.cpu.kernels import Kernels, own_isa
from outrider.verifier_service.model.packed_linear import TILE_INPUTS, to_panels
from tiny.models import played_tiles

# tiles and panels that are whole and that are not, and one long sum
SHAPES = ((64, 96), (48, 32), (50, 34), (7, 2), (100, 610), (33, 1536))
NUM_ROWS = (1, 2, 15, 16, 17, 32, 33, 47, 64, 65, 300)  # of no tile, some and many; the last ones overlap
CASES = ("bfloat16", "bias", "int8 and bias")


@pytest.fixture(scope="module")
def ordered() -> Kernels:
    return played_tiles(torch.bfloat16)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def multiplied(own: Kernels, rows: torch.Tensor, shape: tuple[int, int], case: str) -> torch.Tensor:
    out_features, in_features = shape
    weight, scales, bias = drawn(*shape).bfloat16(), None, None
    if case == "int8 and bias":
        weight, scales = (drawn(*shape) * 40).clamp(-128, 127).to(torch.int8), drawn(out_features).abs()
    if case != "bfloat16":
        bias = drawn(out_features)
    panels, output = to_panels(weight), torch.full((len(rows), out_features), torch.nan, dtype=torch.bfloat16)
    own.linear[weight.dtype](
        *(in_features, out_features, panels.data_ptr()),
        *(None if given is None else given.data_ptr() for given in (scales, bias)),
        *(rows.data_ptr(), output.data_ptr(), len(rows), rows.stride(0), 2),
    )
    return output


def rows_of_a_view(num_rows: int, in_features: int) -> torch.Tensor:
    return drawn(num_rows + 1, in_features + 6).bfloat16()[1:, 2 : in_features + 2]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_those_of_even_and_of_odd_inputs_tile_by_tile(ordered, shape):
    rows, weight = rows_of_a_view(5, shape[1]), drawn(*shape).bfloat16().float()
    totals = torch.zeros(5, shape[0])
    for begin in range(0, shape[1], TILE_INPUTS):
        even, odd = torch.zeros_like(totals), torch.zeros_like(totals)
        for i in range(begin, min(begin + TILE_INPUTS, shape[1]), 2):  # a product of bfloat16 is exact in float32
            even += rows[:, i].float()[:, None] * weight[:, i]
            odd += rows[:, i + 1].float()[:, None] * weight[:, i + 1]
        totals += even + odd
    assert torch.equal(multiplied(ordered, rows, shape, "bfloat16"), totals.bfloat16())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_rows_sums_are_the_same_alone_and_in_company(ordered, shape, case):
    rows = rows_of_a_view(max(NUM_ROWS), shape[1])
    alone = torch.cat([multiplied(ordered, row[None], shape, case) for row in rows])
    for num_rows in NUM_ROWS:
        assert torch.equal(multiplied(ordered, rows[:num_rows], shape, case), alone[:num_rows]), num_rows


@pytest.mark.skipif(own_isa() is not Isa.AMX, reason="needs a processor with AMX, this one has none or may not use it")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_make_these_bits(ordered, shape, case):
    tiles = kernels.load_kernels(torch.bfloat16)
    assert tiles is not None
    for num_rows in NUM_ROWS:
        rows = rows_of_a_view(num_rows, shape[1])
        expected = multiplied(ordered, rows, shape, case)
        assert torch.equal(multiplied(tiles, rows, shape, case), expected), num_rows


def test_no_rows_have_no_output(ordered):
    for own in {ordered, kernels.load_kernels(torch.bfloat16) or ordered}:
        assert multiplied(own, rows_of_a_view(0, 34), (50, 34), "bias").shape == (0, 50)
