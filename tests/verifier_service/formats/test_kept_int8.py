"""INT8 weights that stay int8 on a CPU: the same numbers in half the memory, and which new weights they take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from outrider.verifier_service.formats.checkpoint import StateDictSource, WeightError
from outrider.verifier_service.model.packed_linear import PanelLinear, quantize
from outrider.verifier_service.model.runner import ModelRunner
from outrider.verifier_service.refit.model_weights import ModelWeights
from tiny.formats.runners import make_runner, require_equal
from tiny.formats.schemes import SCHEMES, write_quantized


def panels(runner: ModelRunner) -> list[torch.dtype]:
    """The dtypes in which its linear layers hold their weights."""
    assert isinstance(runner.model, nn.Module)
    return [module._panels.dtype for module in runner.model.modules() if isinstance(module, PanelLinear)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_give_the_codes_back_through_any_dtype(dtype: torch.dtype) -> None:
    scales = torch.logspace(-6, 3, 997)
    codes = torch.arange(-128, 128).expand(len(scales), -1)
    got, _ = quantize((codes * scales[:, None]).to(dtype), scales)
    assert torch.equal(got.long(), codes)


@pytest.mark.parametrize("scheme", ["compressed-int8", "compressed-int8-rows", "compressed-int4-rows"])
def test_int8_panels_but_for_what_the_checkpoint_leaves_out(tmp_path: Path, scheme: str) -> None:
    write_quantized(tmp_path, SCHEMES[scheme])
    runner = make_runner(tmp_path)
    assert panels(runner) == [torch.float32, *[torch.int8] * 8]  # head; 2 layers of qkv, output, gate and up, down
    assert len(runner.kept_int8) == 14


@pytest.mark.parametrize("scheme", ["compressed-int8-zeros", "compressed-int4", "compressed-int8-packed"])
def test_with_zero_points_or_groups_they_are_dequantised(tmp_path: Path, scheme: str) -> None:
    write_quantized(tmp_path, SCHEMES[scheme])
    assert set(panels(make_runner(tmp_path))) == {torch.float32}


@pytest.mark.parametrize("scheme", ["fp8-blocks", "gptq", "compressed-int8"])
def test_any_format_is_held_in_int8_where_that_is_asked_for(tmp_path: Path, scheme: str) -> None:
    """The start's check has compared the logits with the library's over weights that are rounded once more."""
    write_quantized(tmp_path, SCHEMES[scheme])
    runner = make_runner(tmp_path, quantization="int8")
    assert set(panels(runner)) == {torch.int8}
    assert not runner.kept_int8


def test_interleaved_rotary_embeddings_turn_scales_as_well(tmp_path: Path) -> None:
    model = write_quantized(tmp_path, SCHEMES["compressed-int8"], "glm4")
    runner = make_runner(tmp_path)
    assert torch.int8 in panels(runner)
    require_equal(runner, model)


def test_plain_weights_are_refused_by_name(tmp_path: Path) -> None:
    model = write_quantized(tmp_path, SCHEMES["compressed-int8"])
    weights = ModelWeights(make_runner(tmp_path))
    with pytest.raises(WeightError, match="quantization_config: weights that stay int8"):
        weights.missing(StateDictSource(model.state_dict()))


def test_weights_of_the_same_format_are_taken(tmp_path: Path) -> None:
    write_quantized(tmp_path / "old", SCHEMES["compressed-int8"])
    model = write_quantized(tmp_path / "new", SCHEMES["compressed-int8"], seed=1)
    update(runner := make_runner(tmp_path / "old"), tmp_path / "new")
    require_equal(runner, model)


@pytest.mark.parametrize("scheme", ["fp8-blocks", "gptq"])
def test_dequantised_weights_take_plain_ones(tmp_path: Path, scheme: str) -> None:
    write_quantized(tmp_path / "old", SCHEMES[scheme])
    model = write_quantized(tmp_path / "new", SCHEMES["fbgemm"], seed=1)
    update(runner := make_runner(tmp_path / "old"), tmp_path / "new" / "plain")
    require_equal(runner, model)


def test_quantised_weights_without_a_config_are_named(tmp_path: Path) -> None:
    write_quantized(tmp_path / "old", SCHEMES["fp8-blocks"])
    write_quantized(tmp_path / "new", SCHEMES["fp8-blocks"])
    (tmp_path / "new" / "config.json").unlink()
    with pytest.raises(WeightError, match="is not of a floating-point dtype"):
        update(make_runner(tmp_path / "old"), tmp_path / "new")


def update(runner: ModelRunner, folder: Path) -> None:
    weights = ModelWeights(runner)
    with runner.open_checkpoint(folder) as source:
        assert weights.missing(source) == ()
        weights.copy(source)
