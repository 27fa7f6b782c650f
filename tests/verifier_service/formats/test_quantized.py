"""Quantised checkpoints of every layout are read as the weights that they stand for, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.verifier_service.formats.checkpoint import Shard
from outrider.verifier_service.formats.quantized import open_checkpoint
from tiny.formats.schemes import SCHEMES, write_quantized

GATE, DOWN = "model.layers.1.mlp.gate_proj.weight", "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_every_tensor_is_what_it_stands_for(tmp_path: Path, scheme: str) -> None:
    expected = write_quantized(tmp_path, SCHEMES[scheme]).state_dict()
    with open_checkpoint(tmp_path) as source:
        assert set(source.names) == expected.keys()
        for name, weight in expected.items():
            assert (source.is_plain(name), source.shape(name)) == (True, tuple(weight.shape))
            torch.testing.assert_close(source.read(name), weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
@pytest.mark.parametrize(("name", "dim"), [(GATE, 0), (DOWN, 1)])
def test_a_slice_is_that_of_the_whole(tmp_path: Path, scheme: str, name: str, dim: int) -> None:
    expected = write_quantized(tmp_path, SCHEMES[scheme]).state_dict()[name]
    with open_checkpoint(tmp_path) as source:
        for start, stop in ((0, 48), (48, 96), (33, 41), (95, 96)):
            got = source.read(name, Shard(dim=dim, start=start, stop=stop))
            torch.testing.assert_close(got, expected.narrow(dim, start, stop - start), rtol=1e-6, atol=1e-7)
