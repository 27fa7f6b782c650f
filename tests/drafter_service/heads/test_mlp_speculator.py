from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.drafter_service.heads.mlp_speculator import MlpSpeculator

EMB_DIM, VOCAB_SIZE, N_PREDICT = 6, 11, 3
SIZES = {"emb_dim": EMB_DIM, "vocab_size": VOCAB_SIZE, "n_predict": N_PREDICT}


def make_speculator(**options: Any) -> MlpSpeculator:
    torch.manual_seed(0)
    speculator = MlpSpeculator(**{**SIZES, **options}).eval()
    with torch.no_grad():
        for parameter in speculator.parameters():
            if parameter.ndim == 1:  # ones and zeros would hide a missing scale or shift
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return speculator


def run(speculator: MlpSpeculator) -> torch.Tensor:
    """Feed fixed tokens: [n_predict, 4, vocab_size]."""
    state = speculator.start(torch.randn(4, speculator.emb_dim, generator=torch.Generator().manual_seed(9)))
    steps = []
    for index in range(speculator.n_predict):
        logits, state = speculator.step(index, state, torch.tensor([1, 2, 3, 4]) + index)
        steps.append(logits)
    return torch.stack(steps)


def tensors_of(speculator: MlpSpeculator) -> dict[str, torch.Tensor]:
    return {f"speculator.{name}": tensor.clone() for name, tensor in speculator.state_dict().items()}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("scale_input", [False, True])
def test_two_steps_by_hand(scale_input: bool):
    """The formulas of the paper, in float64 and written out."""
    speculator = make_speculator(inner_dim=4, n_predict=2, scale_input=scale_input).double()
    weights = dict(speculator.named_parameters())
    state = torch.randn(EMB_DIM, dtype=torch.float64)
    state_weight = 0.5 ** (1 / 4)  # two steps leave half of the variance
    emb_weight = math.sqrt((1 - state_weight**2) * 4 / 2)
    value = state
    if scale_input:
        value = state / torch.sqrt((state**2).mean() + 1e-6) / math.sqrt(2)
    ours = speculator.start(state)
    torch.testing.assert_close(ours, value)
    for index, token_id in enumerate((3, 8)):
        value = weights[f"proj.{index}.weight"] @ value
        value = value + emb_weight / state_weight * weights[f"emb.{index}.weight"][token_id]
        value = value / torch.sqrt((value**2).mean() + 1e-6)
        value = weights[f"ln.{index}.weight"] * value + weights[f"ln.{index}.bias"]
        value = value / 2 * (1 + torch.erf(value / math.sqrt(2)))
        logits, ours = speculator.step(index, ours, torch.tensor(token_id))
        torch.testing.assert_close(ours, value)
        torch.testing.assert_close(logits, weights[f"head.{index}.weight"] @ value)


@pytest.mark.parametrize(
    "options", [{}, {"inner_dim": 4}, {"inner_dim": 4, "tie_weights": True}, {"scale_input": True}]
)
def test_saved_speculators_are_read_back(tmp_path: Path, options: dict[str, Any]):
    speculator = make_speculator(**options)
    speculator.save(tmp_path)
    again = MlpSpeculator.from_folder(tmp_path)
    assert torch.equal(run(speculator), run(again))
    assert len(list(again.parameters())) == len(list(speculator.parameters())), "tied weights are one parameter"


def test_tied_steps_share_all_but_the_first_projection():
    names = {name for name, _ in make_speculator(tie_weights=True, inner_dim=4).named_parameters()}
    shared = {"emb.0.weight", "head.0.weight", "ln.0.weight", "ln.0.bias"}
    assert names == shared | {"proj.0.weight", "proj.1.weight"}


def test_tied_tensors_may_be_stored_once(tmp_path: Path):
    speculator = make_speculator(tie_weights=True, inner_dim=4)
    held = {f"speculator.{name}": tensor.detach() for name, tensor in speculator.named_parameters()}
    folder = write(tmp_path, {**SIZES, "inner_dim": 4, "tie_weights": True}, held)
    assert torch.equal(run(MlpSpeculator.from_folder(folder)), run(speculator))


def test_half_precision_is_stored_and_read_as_wanted(tmp_path: Path):
    make_speculator().save(tmp_path, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert run(MlpSpeculator.from_folder(tmp_path)).dtype == torch.float32
    assert next(MlpSpeculator.from_folder(tmp_path, dtype=torch.bfloat16).parameters()).dtype == torch.bfloat16


def changed(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    every = tensors_of(make_speculator()) | {f"speculator.{name}": value for name, value in tensors.items()}
    return {name: tensor for name, tensor in every.items() if tensor is not None}


@pytest.mark.parametrize(
    ("config", "tensors", "problem"),
    [
        ({"emb_dim": None}, changed(), "emb_dim is missing"),
        ({"n_predict": 0}, changed(), "n_predict must be an integer of at least 1"),
        ({"tie_weights": "yes"}, changed(), "tie_weights must be true or false"),
        ({"model_type": "llama"}, changed(), "model_type must be mlp_speculator, not 'llama'"),
        ({}, changed(**{"emb.1.weight": None}), "tensor 'speculator.emb.1.weight' is missing"),
        ({}, changed(**{"ln.2.bias": torch.ones(5)}), r"'speculator.ln.2.bias' has shape \(5,\), expected \(6,\)"),
        ({"inner_dim": 4}, changed(), r"has shape \(11, 6\), expected \(11, 4\)"),
        ({"n_predict": 2}, changed(), "tensor 'speculator.emb.2.weight' has no place"),
        ({}, changed(extra=torch.ones(1)), "tensor 'speculator.extra' has no place"),
        ({"tie_weights": True}, changed(), "tie_weights: tensor 'speculator.emb.1.weight' differs from"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=problem) as caught:
        MlpSpeculator.from_folder(write(tmp_path, {**SIZES, **config}, tensors))
    assert str(tmp_path) in str(caught.value)


def test_a_single_step_has_nothing_to_tie():
    with pytest.raises(ValueError, match="tie_weights: n_predict must be at least 2"):
        MlpSpeculator(**{**SIZES, "n_predict": 1}, tie_weights=True)
