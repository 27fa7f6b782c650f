"""Quantised checkpoints of every layout are read as the weights that they stand for, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.verifier_service.formats.checkpoint import Shard, WeightError
from outrider.verifier_service.formats.quantized import FormatError, format_of, open_checkpoint, read_format
from tiny.formats.schemes import SCHEMES, compressed, write_quantized

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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "hqq"}, "quant_method: 'hqq'"),
        ({"bits": 4}, "quant_method: None"),
        ({"quant_method": "gptq", "bits": 3}, "bits: 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format: 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version: 'gemv'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo: 'W4A8_AWQ'"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format: 'marlin-24'"),
        ({**SCHEMES["compressed-int4"].config, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({**SCHEMES["compressed-int4"].config, "transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        (compressed("pack-quantized", num_bits=3, type="int"), "num_bits: 3"),
    ],
)
def test_an_unknown_format_is_refused_by_its_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=rf"quantization_config\.{message}"):
        format_of(config)


def test_a_multimodal_models_text_part_may_say_it(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "text_config": {"quantization_config": SCHEMES["awq"].config}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_format(tmp_path) == format_of(SCHEMES["awq"].config)


def test_modelopts_own_file_may_say_it(tmp_path: Path) -> None:
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    found = read_format(tmp_path)
    assert found is not None
    assert found.layouts == format_of(SCHEMES["modelopt-nvfp4"].config).layouts


def test_a_weight_that_has_lost_its_scales_is_named(tmp_path: Path) -> None:
    write_quantized(tmp_path, SCHEMES["fp8-blocks"])
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"{GATE}_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as source:
        assert not source.is_plain(GATE)
        with pytest.raises(WeightError, match=rf"{GATE}' is F8_E4M3, and nothing says how"):
            source.read(GATE)


@pytest.mark.parametrize(
    ("scheme", "suffix"),
    [("awq", ".qzeros"), ("compressed-int4", ".weight_shape"), ("modelopt-nvfp4", ".weight_scale")],
)
def test_what_lacks_another_of_its_tensors_is_named(tmp_path: Path, scheme: str, suffix: str) -> None:
    write_quantized(tmp_path, SCHEMES[scheme])
    tensors, lost = load_file(tmp_path / "model.safetensors"), GATE.removesuffix(".weight") + suffix
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=rf"lacks '{lost}'"), open_checkpoint(tmp_path):
        pass


def test_scales_that_do_not_fit_are_named(tmp_path: Path) -> None:
    write_quantized(tmp_path, SCHEMES["fp8-blocks"])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{GATE}_scale_inv"] = torch.ones(7, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    with (
        open_checkpoint(tmp_path) as source,
        pytest.raises(WeightError, match=rf"{GATE}' \(FP8\): 7 numbers cannot stand for 96"),
    ):
        source.read(GATE)


def test_last_blocks_may_be_smaller(tmp_path: Path) -> None:
    expected = write_quantized(tmp_path, SCHEMES["fp8-blocks"], intermediate_size=88).state_dict()[GATE]
    with open_checkpoint(tmp_path) as source:
        assert torch.equal(source.read(GATE), expected)
        for start, stop in ((0, 44), (44, 88), (81, 88)):
            assert torch.equal(source.read(GATE, Shard(dim=0, start=start, stop=stop)), expected[start:stop])
