from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outrider.drafter_service.heads.head_layer import HeadError
from outrider.drafter_service.heads.mtp import DEEPSEEK, QWEN, SPECULATORS, Layout, MtpHead
from outrider.verifier_service.formats.checkpoint import StateDictSource
from outrider.verifier_service.messages.draft import FINAL_TAP
from tiny.heads import HIDDEN_SIZE, llama_layer, mtp_head, qwen2_layer, qwen3_layer

TOKENS = torch.tensor([[5, 9, 2, 44, 31, 8]])
STATES = torch.randn(1, 6, HIDDEN_SIZE, generator=torch.Generator().manual_seed(3))
SHARED = ("embed_tokens.weight", "lm_head.weight")
TARGET_LAYERS = 4


@torch.no_grad()
def outputs(head: MtpHead) -> torch.Tensor:
    output, feedback = head(TOKENS, head.combine(STATES), torch.arange(6)[None])
    assert torch.equal(output, feedback)
    return head.logits(output)


def layer_tensors(head: MtpHead, prefix: str, layout: Layout) -> dict[str, torch.Tensor]:
    """Name a head's tensors, but for the embeddings, as a checkpoint of some layout does."""
    named = {}
    for name, tensor in head.state_dict().items():
        if name in SHARED:
            continue
        for pattern, new in layout:
            if re.search(pattern, name):
                name = re.sub(pattern, new, name)
                break
        named[prefix + name] = tensor.clone()
    return named


def target_tensors(head: MtpHead) -> dict[str, torch.Tensor]:
    return {
        "model.embed_tokens.weight": head.embed_tokens.weight.data.clone(),
        "lm_head.weight": head.lm_head.weight.data.clone(),
        "model.norm.weight": torch.ones(HIDDEN_SIZE),
        "model.layers.0.mlp.up_proj.weight": torch.zeros(3),
    }


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def target_config(family: Any) -> dict[str, Any]:
    described = family(num_hidden_layers=TARGET_LAYERS)
    return {**described.to_diff_dict(), "model_type": described.model_type}


CASES = [
    (llama_layer, f"model.layers.{TARGET_LAYERS}.", DEEPSEEK),
    (qwen3_layer, f"model.layers.{TARGET_LAYERS}.", DEEPSEEK),
    (qwen3_layer, "mtp.", QWEN),
    (llama_layer, "model.mtp.", QWEN),
]


@pytest.mark.parametrize(("family", "prefix", "layout"), CASES)
def test_the_layer_is_found_in_the_targets_checkpoint(tmp_path: Path, family: Any, prefix: str, layout: Layout) -> None:
    head = mtp_head(layer=family(num_hidden_layers=TARGET_LAYERS))
    tensors = layer_tensors(head, prefix, layout) | target_tensors(head)
    again = MtpHead.from_folder(write(tmp_path, target_config(family), tensors))
    assert torch.equal(outputs(again), outputs(head))
    assert again.taps == (FINAL_TAP,)
    assert again.borrowed == set(SHARED)


def test_deepseeks_names_are_these(tmp_path: Path) -> None:
    names = layer_tensors(mtp_head(), "model.layers.61.", DEEPSEEK)
    parts = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "input_layernorm", "self_attn.q_proj", "mlp.up_proj")
    assert {f"model.layers.61.{part}.weight" for part in parts} <= names.keys()
    names = layer_tensors(mtp_head(), "mtp.", QWEN)
    parts = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0.input_layernorm")
    assert {f"mtp.{part}.weight" for part in parts} <= names.keys()
    names = layer_tensors(mtp_head(), "mtp_layers.0.", SPECULATORS)
    parts = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "input_layernorm")
    assert {f"mtp_layers.0.{part}.weight" for part in parts} <= names.keys()


def test_copies_of_the_embeddings_in_the_layer_are_preferred(tmp_path: Path) -> None:
    head = mtp_head()
    prefix = f"model.layers.{TARGET_LAYERS}."
    tensors = layer_tensors(head, prefix, DEEPSEEK) | {
        **{name: torch.zeros_like(tensor) for name, tensor in target_tensors(head).items()},
        f"{prefix}embed_tokens.weight": head.embed_tokens.weight.data.clone(),
        f"{prefix}shared_head.head.weight": head.lm_head.weight.data.clone(),
    }
    again = MtpHead.from_folder(write(tmp_path, target_config(qwen3_layer), tensors))
    assert torch.equal(outputs(again), outputs(head))
    assert not again.borrowed


def test_a_speculators_checkpoint_borrows_both_embeddings(tmp_path: Path) -> None:
    head = mtp_head()
    config = {"speculators_model_type": "mtp", "transformer_layer_config": target_config(qwen3_layer)}
    write(tmp_path, config, layer_tensors(head, "mtp_layers.0.", SPECULATORS))
    again = MtpHead.from_folder(tmp_path, target=StateDictSource(target_tensors(head)))
    assert torch.equal(outputs(again), outputs(head))
    with pytest.raises(ValueError, match=r"'embed_tokens.weight' is missing"):
        MtpHead.from_folder(tmp_path)


def test_of_several_layers_the_first_is_used(tmp_path: Path) -> None:
    head, later = mtp_head(0), mtp_head(1)
    tensors = layer_tensors(head, f"model.layers.{TARGET_LAYERS}.", DEEPSEEK) | target_tensors(head)
    tensors |= layer_tensors(later, f"model.layers.{TARGET_LAYERS + 1}.", DEEPSEEK)
    assert torch.equal(
        outputs(MtpHead.from_folder(write(tmp_path, target_config(qwen3_layer), tensors))), outputs(head)
    )
    tensors = layer_tensors(head, "mtp.", QWEN) | target_tensors(head) | {"mtp.layers.1.mlp.x.weight": torch.ones(1)}
    assert torch.equal(
        outputs(MtpHead.from_folder(write(tmp_path, target_config(qwen3_layer), tensors))), outputs(head)
    )


def test_other_blocks_are_refused_by_name(tmp_path: Path) -> None:
    head = mtp_head()
    tensors = layer_tensors(head, f"model.layers.{TARGET_LAYERS}.", DEEPSEEK) | target_tensors(head)
    config = {**target_config(qwen3_layer), "model_type": "qwen3_next"}
    with pytest.raises(HeadError, match="a head with a layer of 'qwen3_next' is not served"):
        MtpHead.from_folder(write(tmp_path, config, tensors))
    tensors[f"model.layers.{TARGET_LAYERS}.mlp.experts.0.up_proj.weight"] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"mlp.experts.0.up_proj.weight' has no place"):
        MtpHead.from_folder(write(tmp_path, target_config(qwen3_layer), tensors))


def test_a_checkpoint_without_such_a_layer_says_where_it_looked(tmp_path: Path) -> None:
    head = mtp_head()
    with pytest.raises(HeadError, match=r"no MTP layer, looked for 'model.layers.4.eh_proj.weight', .*'mtp.fc.weight'"):
        MtpHead.from_folder(write(tmp_path, target_config(qwen3_layer), target_tensors(head)))


def test_embedding_and_state_have_their_own_halves_of_the_projection() -> None:
    head = mtp_head()
    with torch.no_grad():
        head.eh_proj.weight[:, HIDDEN_SIZE:] = 0.0
        again, _ = head(TOKENS, STATES.flip(1), torch.arange(6)[None])
    torch.testing.assert_close(head.logits(again), outputs(head))


def test_mimos_projection_reads_the_state_first(tmp_path: Path) -> None:
    head = mtp_head(layer=qwen2_layer(num_hidden_layers=TARGET_LAYERS))
    tensors = layer_tensors(head, "model.mtp_layers.0.", SPECULATORS) | target_tensors(head)
    projection = tensors["model.mtp_layers.0.input_proj.weight"]
    tensors["model.mtp_layers.0.input_proj.weight"] = projection.roll(HIDDEN_SIZE, dims=1)
    again = MtpHead.from_folder(write(tmp_path, target_config(qwen2_layer), tensors))
    assert torch.equal(outputs(again), outputs(head))
