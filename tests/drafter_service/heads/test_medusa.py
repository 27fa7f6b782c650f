from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.drafter_service.heads.medusa import MedusaHeads

HIDDEN_SIZE, VOCAB_SIZE, NUM_HEADS = 6, 11, 3
SIZES = {"hidden_size": HIDDEN_SIZE, "vocab_size": VOCAB_SIZE, "num_heads": NUM_HEADS}


def make_heads(seed: int = 0, **options: Any) -> MedusaHeads:
    torch.manual_seed(seed)
    return MedusaHeads(**{**SIZES, **options}).eval()


def states(num_states: int = 4) -> torch.Tensor:
    return torch.randn(num_states, HIDDEN_SIZE, generator=torch.Generator().manual_seed(9))


def original_tensors(num_layers: int = 1, *, num_heads: int = NUM_HEADS, has_bias: bool = True):
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{head}.{layer}.linear.weight"] = torch.randn(HIDDEN_SIZE, HIDDEN_SIZE, generator=generator)
            if has_bias:
                tensors[f"{head}.{layer}.linear.bias"] = torch.randn(HIDDEN_SIZE, generator=generator)
        tensors[f"{head}.{num_layers}.weight"] = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator)
    return tensors


def renamed_tensors() -> dict[str, torch.Tensor]:
    original = original_tensors(has_bias=False)
    return {f"blocks.{head}.layers.0.weight": original[f"{head}.0.linear.weight"] for head in range(NUM_HEADS)} | {
        f"lm_heads.{head}.weight": original[f"{head}.1.weight"] for head in range(NUM_HEADS)
    }


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def by_hand(tensors: dict[str, torch.Tensor], state: torch.Tensor, num_layers: int = 1) -> torch.Tensor:
    logits = []
    for head in range(NUM_HEADS):
        value = state
        for layer in range(num_layers):
            hidden = value @ tensors[f"{head}.{layer}.linear.weight"].T
            hidden = hidden + tensors.get(f"{head}.{layer}.linear.bias", torch.zeros(()))
            value = value + hidden * torch.sigmoid(hidden)
        logits.append(value @ tensors[f"{head}.{num_layers}.weight"].T)
    return torch.stack(logits)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_fasterdecodings_checkpoint_is_read_without_sizes_in_its_config(tmp_path: Path, num_layers: int):
    tensors = original_tensors(num_layers)
    config = {"medusa_num_heads": 2, "medusa_num_layers": num_layers, "base_model_name_or_path": "x"}  # it has 3 heads
    heads = MedusaHeads.from_folder(write(tmp_path, config, tensors))
    assert (heads.hidden_size, heads.vocab_size, heads.num_heads) == (HIDDEN_SIZE, VOCAB_SIZE, NUM_HEADS)
    torch.testing.assert_close(heads(states()), by_hand(tensors, states(), num_layers))


@pytest.mark.parametrize("prefix", ["medusa_heads.", "medusa_head."])
def test_prefixed_names_are_read(tmp_path: Path, prefix: str):
    tensors = original_tensors()
    prefixed = {prefix + name: tensor for name, tensor in tensors.items()}
    heads = MedusaHeads.from_folder(write(tmp_path, {}, prefixed))
    torch.testing.assert_close(heads(states()), by_hand(tensors, states()))


def test_vllms_layout_is_read(tmp_path: Path):
    config = {**SIZES, "num_hidden_layers": 1}
    heads = MedusaHeads.from_folder(write(tmp_path, config, renamed_tensors()))
    torch.testing.assert_close(heads(states()), by_hand(original_tensors(has_bias=False), states()))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 2, "has_bias": False},
        {"num_layers": 0},
        {"shares_lm_head": True, "logit_scale": 0.5},
        {"token_map": torch.tensor([7, 2, 5])},
        {"token_map": torch.tensor([7, 2, 5]), "shares_lm_head": True},
    ],
)
def test_saved_heads_are_read_back(tmp_path: Path, options: dict[str, Any]):
    heads = make_heads(**options)
    heads.save(tmp_path)
    again = MedusaHeads.from_folder(tmp_path)
    assert torch.equal(heads(states()), again(states()))
    assert again.state_dict().keys() == heads.state_dict().keys()


def test_saved_tensors_have_their_original_names(tmp_path: Path):
    make_heads().save(tmp_path, dtype=torch.float16)
    stored = load_file(tmp_path / "medusa_lm_head.safetensors")
    assert stored.keys() == original_tensors().keys()
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    assert MedusaHeads.from_folder(tmp_path)(states()).dtype == torch.float32


def test_the_first_heads_alone():
    heads = make_heads()
    assert torch.equal(heads(states(), 2), heads(states())[:2])
    assert heads(states().view(2, 2, HIDDEN_SIZE)).shape == (NUM_HEADS, 2, 2, VOCAB_SIZE)


def test_ids_outside_the_token_map_are_impossible():
    token_map = torch.tensor([7, 2, 5])
    logits = make_heads(token_map=token_map)(states())
    assert logits[..., token_map].isfinite().all()
    assert (logits == float("-inf")).sum(dim=-1).eq(VOCAB_SIZE - 3).all()


def test_a_truncated_vocabulary_stored_whole_is_cut(tmp_path: Path):
    token_map = torch.tensor([7, 2, 5])
    config = {**SIZES, "truncated_vocab_size": 3}
    heads = MedusaHeads.from_folder(write(tmp_path, config, {**original_tensors(), "token_map": token_map}))
    whole = by_hand(original_tensors(), states())
    torch.testing.assert_close(heads(states())[..., token_map], whole[..., token_map])


def test_a_token_map_that_is_not_switched_on_is_left_alone(tmp_path: Path):
    tensors = {**original_tensors(), "token_map": torch.tensor([7, 2, 5])}
    heads = MedusaHeads.from_folder(write(tmp_path, SIZES, tensors))
    torch.testing.assert_close(heads(states()), by_hand(original_tensors(), states()))


@pytest.mark.parametrize("stored", ["lm_head.weight", "lm_heads.0.weight", "all"])
def test_one_output_embedding_for_all_heads(tmp_path: Path, stored: str):
    tensors = renamed_tensors()
    lm_head = tensors["lm_heads.0.weight"]
    for head in range(NUM_HEADS):
        tensors[f"lm_heads.{head}.weight"] = lm_head.clone()
        if stored != "all":
            del tensors[f"lm_heads.{head}.weight"]
    if stored != "all":
        tensors[stored] = lm_head
    heads = MedusaHeads.from_folder(write(tmp_path, {**SIZES, "original_lm_head": True}, tensors))
    by_hand_tensors = {name: tensor for name, tensor in original_tensors(has_bias=False).items() if "linear" in name}
    by_hand_tensors |= {f"{head}.1.weight": lm_head for head in range(NUM_HEADS)}
    torch.testing.assert_close(heads(states()), by_hand(by_hand_tensors, states()))


def test_the_targets_output_embedding_is_borrowed_where_none_is_stored(tmp_path: Path):
    tensors = {name: tensor for name, tensor in renamed_tensors().items() if name.startswith("blocks.")}
    target_lm_head = torch.randn(VOCAB_SIZE, HIDDEN_SIZE)
    folder = write(tmp_path, {"original_lm_head": True, "num_heads": NUM_HEADS}, tensors)
    heads = MedusaHeads.from_folder(folder, target_lm_head=target_lm_head)
    assert torch.equal(heads.lm_heads[0].weight, target_lm_head)
    with pytest.raises(ValueError, match="vocab_size is missing"):
        MedusaHeads.from_folder(folder)
    write(tmp_path, {**SIZES, "original_lm_head": True}, tensors)
    with pytest.raises(ValueError, match=r"tensor 'lm_head\.weight' is missing, and the target's was not given"):
        MedusaHeads.from_folder(folder)
    with pytest.raises(ValueError, match=r"target's lm_head has shape \(11, 5\), expected \(11, 6\)"):
        MedusaHeads.from_folder(folder, target_lm_head=target_lm_head[:, :5])


def test_a_borrowed_output_embedding_is_cut_to_the_truncated_vocabulary(tmp_path: Path):
    token_map = torch.tensor([7, 2, 5])
    tensors = {name: tensor for name, tensor in renamed_tensors().items() if name.startswith("blocks.")}
    config = {**SIZES, "original_lm_head": True, "truncated_vocab_size": 3}
    target_lm_head = torch.randn(VOCAB_SIZE, HIDDEN_SIZE)
    folder = write(tmp_path, config, {**tensors, "token_map": token_map})
    heads = MedusaHeads.from_folder(folder, target_lm_head=target_lm_head)
    assert torch.equal(heads.lm_heads[0].weight, target_lm_head[token_map])


def without(name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in original_tensors().items() if key != name}


@pytest.mark.parametrize(
    ("config", "tensors", "problem"),
    [
        ({}, without("1.0.linear.weight"), "tensor '1.0.linear.weight' is missing"),
        ({}, without("1.0.linear.bias"), "tensor '1.0.linear.bias' is missing"),
        ({}, without("2.1.weight"), "tensor '2.1.weight' is missing"),
        ({"medusa_num_heads": 4}, original_tensors(), "tensor '3.0.linear.weight' is missing"),
        ({"medusa_num_layers": 2}, original_tensors(), "2 residual layers, the tensors .* have 1"),
        ({"medusa_fc_bias": False}, original_tensors(), "tensor '0.0.linear.bias' has no place"),
        ({"medusa_num_layers": "one"}, original_tensors(), "medusa_num_layers must be an integer"),
        ({"hidden_size": 8}, original_tensors(), r"'0.0.linear.weight' has shape \(6, 6\), expected \(8, 8\)"),
        ({"vocab_size": 12}, original_tensors(), r"'0.1.weight' has shape \(11, 6\), expected \(12, 6\)"),
        ({}, {**original_tensors(), "fc.weight": torch.ones(2)}, "tensor 'fc.weight' has no place"),
        ({}, {"fc.weight": torch.ones(2)}, "no Medusa heads: expected tensors such as"),
        ({"num_heads": 2}, renamed_tensors(), r"tensor 'blocks.2.layers.0.weight' has no place"),
        ({"num_heads": 4}, renamed_tensors(), r"tensor 'blocks.3.layers.0.weight' is missing"),
        ({"original_lm_head": True}, original_tensors(), "'1.1.weight' differs from '0.1.weight'"),
        ({"truncated_vocab_size": 3}, original_tensors(), "tensor 'token_map' is missing"),
        (
            {"truncated_vocab_size": 2},
            {**original_tensors(), "token_map": torch.tensor([1, 11])},
            r"'token_map' must hold different ids in \[0, 11\)",
        ),
        (
            {"truncated_vocab_size": 2},
            {**original_tensors(), "token_map": torch.tensor([1, 1])},
            "'token_map' must hold different ids",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=problem) as caught:
        MedusaHeads.from_folder(write(tmp_path, config, tensors))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "num_heads"])
def test_sizes_must_be_positive(name: str):
    with pytest.raises(ValueError, match=name):
        MedusaHeads(**{**SIZES, name: 0})
