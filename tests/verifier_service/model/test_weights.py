"""Checkpoints reach the model whole, or are refused by the tensor's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.verifier_service.formats.checkpoint import INDEX_NAME, Checkpoint, Shard, StateDictSource, WeightError
from outrider.verifier_service.model.architectures import (
    ARCHITECTURES,
    CHECKPOINT_ALIASES,
    IGNORED_TENSORS,
)
from outrider.verifier_service.model.empty_model import build_empty_model
from outrider.verifier_service.model.weights import load_weights
from tiny.models import TINY_ARCHITECTURES, full_logits, make_checkpoint, make_model

CPU = torch.device("cpu")
TOKENS = [5, 9, 100, 7]


def load(folder: Path, reference: torch.nn.Module, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    model = build_empty_model(reference.config, dtype=dtype, device=CPU)
    aliases = (*ARCHITECTURES[reference.config.model_type].aliases, *CHECKPOINT_ALIASES)
    with Checkpoint(folder) as checkpoint:
        load_weights(model, checkpoint, shards={}, aliases=aliases, ignored=IGNORED_TENSORS, device=CPU, dtype=dtype)
    model.set_attn_implementation("eager")
    return model


def rewrite(folder: Path, change) -> None:
    """Apply `change` to the checkpoint's dictionary of tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("name", sorted(TINY_ARCHITECTURES))
def test_every_parameter_and_buffer_is_the_librarys(tmp_path, name):
    reference = make_checkpoint(tmp_path, name)
    model = load(tmp_path, reference)
    expected, got = dict(reference.named_parameters()), dict(model.named_parameters())
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[key], got[key]) for key in expected)
    buffers = dict(model.named_buffers())
    assert all(torch.equal(buffer, buffers[key]) for key, buffer in reference.named_buffers())


def test_sharded_tied_half_precision(tmp_path):
    reference = make_checkpoint(
        tmp_path, "qwen2", tie_word_embeddings=True, dtype=torch.bfloat16, max_shard_size="30KB"
    )
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = load(tmp_path, reference, torch.bfloat16)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.bfloat16
    assert torch.equal(full_logits(model, TOKENS), full_logits(reference, TOKENS))


def test_dtype_is_converted_while_loading(tmp_path):
    reference = make_checkpoint(tmp_path, dtype=torch.float16)
    model = load(tmp_path, reference, torch.float32)
    assert torch.equal(model.lm_head.weight, reference.lm_head.weight.float())


def test_a_checkpoint_of_the_headless_model(tmp_path):
    reference = make_checkpoint(tmp_path, "gpt2")
    rewrite(tmp_path, strip_transformer_prefix)
    assert torch.equal(full_logits(load(tmp_path, reference), TOKENS), full_logits(reference, TOKENS))


def strip_transformer_prefix(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[name.removeprefix("transformer.")] = tensors.pop(name)
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)  # the causal mask that old checkpoints carry


def test_experts_that_are_fused_already(tmp_path):
    reference = make_checkpoint(tmp_path, "qwen3_moe")
    rewrite(tmp_path, fuse_experts)
    assert torch.equal(full_logits(load(tmp_path, reference), TOKENS), full_logits(reference, TOKENS))


def fuse_experts(tensors: dict[str, torch.Tensor]) -> None:
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        take = [[tensors.pop(f"{prefix}.{e}.{part}_proj.weight") for e in range(4)] for part in ("gate", "up", "down")]
        tensors[f"{prefix}.gate_up_proj"] = torch.cat([torch.stack(take[0]), torch.stack(take[1])], dim=1)
        tensors[f"{prefix}.down_proj"] = torch.stack(take[2])


@pytest.mark.parametrize("start", [0, 16])
def test_fused_and_separate_experts_slice_alike(start):
    reference = make_model("qwen3_moe")
    fused = StateDictSource(reference.state_dict())
    separate: dict[str, torch.Tensor] = {}
    name = "model.layers.0.mlp.experts"
    gate_up = reference.get_submodule(name).gate_up_proj
    for expert in range(4):
        for part, tensor in zip(("gate", "up"), gate_up[expert].chunk(2), strict=True):
            separate[f"{name}.{expert}.{part}_proj.weight"] = tensor
    holder = torch.nn.Module()
    holder.gate_up_proj = torch.nn.Parameter(torch.empty(4, 32, 64, device="meta"), requires_grad=False)
    model = torch.nn.Module()
    model.experts = holder
    shards = {"experts.gate_up_proj": Shard(dim=0, start=start, stop=start + 16)}
    loaded = []
    for source in (fused, StateDictSource(separate)):
        load_weights(
            model,
            source,
            shards=shards,
            aliases=[(r"^experts", name)],
            ignored=[""],
            device=CPU,
            dtype=torch.float32,
        )
        loaded.append(holder.gate_up_proj)
    assert torch.equal(loaded[0], loaded[1])
    assert torch.equal(loaded[0][:, :16], gate_up[:, start : start + 16])


def drop_norm(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def add_stranger(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.secret.weight"] = torch.zeros(2)


def widen_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = torch.zeros(300, 64)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (drop_norm, "model.norm.weight"),
        (add_stranger, "model.layers.0.mlp.secret.weight"),
        (widen_head, "lm_head.weight.*300"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, change, name):
    reference = make_checkpoint(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(WeightError, match=name):
        load(tmp_path, reference)


def test_a_missing_expert_is_named(tmp_path):
    reference = make_checkpoint(tmp_path, "mixtral")
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.1.block_sparse_moe.experts.2.w3.weight"))
    with pytest.raises(WeightError, match=r"layers\.1.*experts\.2\.w3"):
        load(tmp_path, reference)


def test_a_missing_file_is_named(tmp_path):
    make_checkpoint(tmp_path, max_shard_size="30KB")
    next(iter(sorted(tmp_path.glob("*.safetensors")))).unlink()
    with pytest.raises(WeightError, match="model-00001"):
        Checkpoint(tmp_path)


def test_an_index_decides_which_file_has_a_tensor(tmp_path):
    """Also against a file of the index that has it, too: what a download left behind is no weight."""
    reference = make_checkpoint(tmp_path, max_shard_size="30KB")
    index = json.loads((tmp_path / INDEX_NAME).read_text())["weight_map"]
    name, own = next(iter(sorted(index.items())))
    other = next(place for place in index.values() if place > own)
    tensors = load_file(tmp_path / other)
    save_file({**tensors, name: torch.zeros_like(reference.get_parameter(name))}, tmp_path / other)
    stray = {name: torch.zeros_like(reference.get_parameter(name)), "unknown": torch.zeros(1)}
    save_file(stray, tmp_path / "zzz.safetensors")
    assert torch.equal(load(tmp_path, reference).get_parameter(name), reference.get_parameter(name))


def test_without_an_index_no_two_files_may_have_one_tensor(tmp_path):
    reference = make_checkpoint(tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({"own": torch.zeros(1)}, tmp_path / "more.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        assert "own" in checkpoint
    save_file({name: reference.get_parameter(name)}, tmp_path / "zzz.safetensors")
    with pytest.raises(WeightError, match=rf"{name}' is in model.safetensors and in zzz.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": dict.fromkeys("wv", "model.safetensors")}, "'v' is in model.safetensors, which lacks"),
        ({"weight_map": ["w"]}, "no weight_map"),
        ({}, "no weight_map"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path, index, words):
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(WeightError, match=words):
        Checkpoint(tmp_path)


def test_a_folder_without_tensors_is_refused(tmp_path):
    with pytest.raises(WeightError, match="no tensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_slice_reads_only_its_bytes(tmp_path, dim):
    whole = torch.arange(48.0).reshape(6, 8)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        part = checkpoint.read("w", Shard(dim=dim, start=2, stop=4))
        assert torch.equal(part, whole.narrow(dim, 2, 2))
        assert checkpoint.bytes_read == part.nbytes == whole.nbytes * 2 // whole.shape[dim]
