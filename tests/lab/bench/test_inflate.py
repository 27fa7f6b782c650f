"""An inflated checkpoint is the same function at a larger price."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.lab.bench import inflate as inflate_module
from outrider.lab.bench.inflate import inflate

TOKENS = torch.arange(24).reshape(2, 12) % 50
OLD_WIDTH = 40


def llama(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    settings = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": OLD_WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,  # large enough that every weight matters to the logits
        "tie_word_embeddings": False,
    }
    return LlamaForCausalLM(LlamaConfig(**settings | changes)).eval()


def size(model: LlamaForCausalLM) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def logits(model: LlamaForCausalLM) -> torch.Tensor:
    with torch.inference_mode():
        return model(TOKENS).logits


def inflated(model: LlamaForCausalLM, folder: Path, num_parameters: int) -> LlamaForCausalLM:
    model.save_pretrained(folder / "small")
    inflate(folder / "small", folder / "large", num_parameters)
    return LlamaForCausalLM.from_pretrained(folder / "large").eval()


@pytest.mark.parametrize("tie", [False, True])
def test_the_function_stays_and_the_size_comes_as_wished(tie: bool, tmp_path: Path) -> None:
    small = llama(tie_word_embeddings=tie)
    large = inflated(small, tmp_path, 1_000_000)
    assert size(large) == pytest.approx(1_000_000, rel=0.02)
    assert large.config.intermediate_size % 64 == 0
    torch.testing.assert_close(logits(large), logits(small), atol=1e-5, rtol=0)


def test_the_added_units_work_and_only_their_output_is_zero(tmp_path: Path) -> None:
    mlp = inflated(llama(), tmp_path, 200_000).model.layers[-1].mlp
    for matrix in (mlp.gate_proj, mlp.up_proj):
        assert matrix.weight[OLD_WIDTH:].std().item() == pytest.approx(0.3, rel=0.1)
    assert mlp.down_proj.weight[:, OLD_WIDTH:].count_nonzero() == 0
    assert mlp.down_proj.weight[:, :OLD_WIDTH].count_nonzero() > 0


def test_weights_come_in_shards_when_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflate_module, "SHARD_BYTES", 100_000)
    small = llama()
    large = inflated(small, tmp_path, 200_000)
    files = sorted(path.name for path in (tmp_path / "large").glob("*.safetensors"))
    index = json.loads((tmp_path / "large" / "model.safetensors.index.json").read_text())
    assert len(files) > 1
    assert sorted(set(index["weight_map"].values())) == files
    torch.testing.assert_close(logits(large), logits(small), atol=1e-5, rtol=0)


def test_what_cannot_be_inflated_is_refused(tmp_path: Path) -> None:
    small = llama()
    with pytest.raises(ValueError, match="parameters already"):
        inflated(small, tmp_path, size(small) - 1)
    config = tmp_path / "small" / "config.json"
    original = json.loads(config.read_text())
    for change, complaint in (({"model_type": "gpt2"}, "gpt2"), ({"mlp_bias": True}, "biases")):
        config.write_text(json.dumps(original | change))
        with pytest.raises(ValueError, match=complaint):
            inflate(tmp_path / "small", tmp_path / "large", 200_000)
    config.write_text(json.dumps(original))
    (tmp_path / "small" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no safetensors"):
        inflate(tmp_path / "small", tmp_path / "large", 200_000)
