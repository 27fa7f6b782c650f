from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outrider.drafter_service.heads.dflash import DFlashHead, parse_config
from outrider.verifier_service.formats.checkpoint import StateDictSource
from tiny.dflash import BLOCK_SIZE, MASK_ID, dflash_head, slow_block
from tiny.heads import HIDDEN_SIZE, SHAPE, VOCAB_SIZE

LAYER = {**SHAPE, "num_hidden_layers": 2, "model_type": "qwen3"}
ORIGINAL = {
    **LAYER,
    "architectures": ["DFlashDraftModel"],
    "block_size": BLOCK_SIZE,
    "num_target_layers": 4,
    "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": [0, 1]},
}
SPECULATORS = {
    "speculators_model_type": "dflash",
    "transformer_layer_config": LAYER,
    "aux_hidden_state_layer_ids": [1, 2],
    "block_size": BLOCK_SIZE,
    "mask_token_id": MASK_ID,
    "draft_vocab_size": VOCAB_SIZE,
}
SHARED = ("embed_tokens.weight", "lm_head.weight")
TOKENS = [5, 17, 3, 40, 22, 9, 31]


def tensors_of(head: DFlashHead) -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous() for name, tensor in head.state_dict().items()}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("config", [ORIGINAL, SPECULATORS], ids=["original", "speculators"])
def test_both_formats_are_read_and_embeddings_borrowed(tmp_path: Path, config: dict[str, Any]) -> None:
    head = dflash_head()
    tensors = tensors_of(head)
    shared = {f"model.{name}".replace("model.lm_head", "lm_head"): tensors.pop(name) for name in SHARED}
    folder = write(tmp_path, config, tensors)
    loaded = DFlashHead.from_folder(folder, target=StateDictSource(shared), num_target_layers=4)
    assert loaded.taps == (1, 2), "layer l's output is layer l + 1's input"
    assert loaded.config.num_guesses == BLOCK_SIZE - 1
    assert loaded.borrowed == set(SHARED)
    states = torch.randn(6, 2 * HIDDEN_SIZE, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(slow_block(loaded, TOKENS, states), slow_block(head, TOKENS, states))


def test_a_vocabulary_of_its_own_is_spread_over_the_targets(tmp_path: Path) -> None:
    head = dflash_head(num_ids=24)
    tensors = {**tensors_of(head), "d2t": torch.arange(24), "t2d": torch.zeros(VOCAB_SIZE, dtype=torch.bool)}
    folder = write(tmp_path, {**SPECULATORS, "draft_vocab_size": 24}, tensors)
    loaded = DFlashHead.from_folder(folder)
    assert loaded.target_ids is not None
    assert loaded.target_ids.tolist() == list(range(0, 48, 2))
    logits = loaded.in_target_ids(torch.ones(1, 24))
    assert logits[0].isfinite().nonzero().flatten().tolist() == list(range(0, 48, 2))


def test_context_and_block_see_each_other_as_in_one_attention() -> None:
    """Context keys and values made apart are those that the same attention would make of the features."""
    head = dflash_head()
    features = torch.randn(5, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([3, 4, 9, 10, 20])
    found = head.context_kv(features, positions)
    assert len(found) == 2
    for layer, (key, value) in zip(head.layers, found, strict=True):
        seen: list[torch.Tensor] = []

        def note(query: torch.Tensor, *rest: torch.Tensor, seen: list[torch.Tensor] = seen) -> torch.Tensor:
            seen.extend(rest)
            return query.transpose(1, 2)

        layer.self_attn(features[None], head.rotary(features, positions[None]), note)
        torch.testing.assert_close(key.transpose(0, 1), seen[0][0])
        torch.testing.assert_close(value.transpose(0, 1), seen[1][0])


def changed(config: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    copy = json.loads(json.dumps(config))
    *parents, name = path.split(".")
    owner = copy
    for parent in parents:
        owner = owner[parent]
    owner[name] = value
    return copy


@pytest.mark.parametrize(
    ("config", "path", "value", "message"),
    [
        (SPECULATORS, "speculators_model_type", "peagle", "speculators_model_type: 'peagle'"),
        (SPECULATORS, "aux_hidden_state_layer_ids", None, "aux_hidden_state_layer_ids: not in the config"),
        (SPECULATORS, "aux_hidden_state_layer_ids", [1, 4], r"aux_hidden_state_layer_ids: \[1, 4\].* 4 layers"),
        (SPECULATORS, "aux_hidden_state_layer_ids", [1, 1], "not different layers"),
        (SPECULATORS, "aux_hidden_state_layer_ids", ["1"], "are no layers"),
        (SPECULATORS, "mask_token_id", None, "mask_token_id: not in the config"),
        (SPECULATORS, "mask_token_id", VOCAB_SIZE, f"mask_token_id: {VOCAB_SIZE} of a vocabulary of {VOCAB_SIZE}"),
        (SPECULATORS, "block_size", 1, "block_size: 1"),
        (SPECULATORS, "block_size", "six", "block_size: 'six'"),
        (SPECULATORS, "draft_vocab_size", VOCAB_SIZE + 1, "draft_vocab_size: 62"),
        (SPECULATORS, "transformer_layer_config.model_type", "gemma3", "model_type: .*'gemma3'"),
        (SPECULATORS, "transformer_layer_config.hidden_act", "gelu", "hidden_act"),
        (ORIGINAL, "layer_types", ["full_attention", "sliding_attention"], "layer_types: .*sliding window"),
        (ORIGINAL, "dflash_config", None, "dflash_config: not in the config"),
        (ORIGINAL, "dflash_config.use_swa", True, "dflash_config.use_swa: True is not served"),
        (ORIGINAL, "dflash_config.causal", True, "dflash_config.causal: True is not served"),
        (ORIGINAL, "dflash_config.target_layer_ids", [0, 3], r"target_layer_ids \+ 1: \[1, 4\].* 4 layers"),
        (ORIGINAL, "dflash_config.mask_token_id", -1, "mask_token_id: -1"),
        (ORIGINAL, "block_size", None, "block_size: not in the config"),
        (ORIGINAL, "is_causal", True, "is_causal: True"),
    ],
)
def test_what_is_not_served_is_refused_by_name(config: dict[str, Any], path: str, value: object, message: str) -> None:
    parse_config(config, 4)
    with pytest.raises(ValueError, match=message):
        parse_config(changed(config, path, value), 4)


def test_fields_in_other_places_are_found() -> None:
    newer = changed(changed(ORIGINAL, "block_size", None), "dflash_config.block_size", 4)
    assert parse_config(newer).block_size == 4
    assert parse_config(changed(ORIGINAL, "dflash_config.causal", False)).taps == (1, 2)
    llama = {name: value for name, value in LAYER.items() if name != "head_dim"} | {"model_type": "llama"}
    described = parse_config({**SPECULATORS, "transformer_layer_config": llama}).layer
    assert (described.model_type, described.head_dim) == ("qwen3", HIDDEN_SIZE // 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc.weight": torch.zeros(16, 16)}, r"'fc.weight' has shape \(16, 16\), expected \(16, 32\)"),
        ({"hidden_norm.weight": None}, "'hidden_norm.weight' is missing"),
        ({"layers.2.mlp.up_proj.weight": torch.zeros(1)}, "'layers.2.mlp.up_proj.weight' has no place"),
        ({"embed_tokens.weight": None}, "'embed_tokens.weight' is missing, and no target"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    tensors: dict[str, Any] = {**tensors_of(dflash_head()), **change}
    folder = write(tmp_path, ORIGINAL, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    with pytest.raises(ValueError, match=message):
        DFlashHead.from_folder(folder)


def test_target_ids_that_are_none_are_refused(tmp_path: Path) -> None:
    tensors = {**tensors_of(dflash_head(num_ids=24)), "d2t": -torch.arange(24)}
    folder = write(tmp_path, {**SPECULATORS, "draft_vocab_size": 24}, tensors)
    with pytest.raises(ValueError, match="'d2t': not 24 different ids"):
        DFlashHead.from_folder(folder)


def test_a_mask_outside_of_the_embedding_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, ORIGINAL, tensors_of(dflash_head()))
    DFlashHead.from_folder(folder)
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"mask_embedding\.pt"):
        DFlashHead.from_folder(folder)
