"""A GGUF file is converted once, whoever asks first, and then served like any checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from transformers import LlamaForCausalLM

from outrider.verifier_service.cache import CACHE_VARIABLE
from outrider.verifier_service.formats import gguf
from outrider.verifier_service.model.architectures import resolve_folder
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.runner import ModelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from outrider.verifier_service.model.tokenizer import load_tokenizer
from tiny.models import VOCAB_SIZE, make_model

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    name = name.replace("model.layers.", "blk.")
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp turns neighbours where the library turns halves."""
    return weight.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def write_gguf(path: Path) -> LlamaForCausalLM:
    """Write a tiny llama with a vocabulary of its own, and return it."""
    model = make_model("llama")
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(VOCAB_SIZE)
    writer.add_tokenizer_model("gpt2")
    tokens = [chr(33 + index) if index < 90 else f"token{index}" for index in range(VOCAB_SIZE)]
    tokens[-1] = "!!"
    writer.add_token_list(tokens)
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        part = gguf_name(name)
        count = next((count for key, count in heads.items() if f".{key}." in part), None)
        writer.add_tensor(part, (weight if count is None else interleaved(weight, count)).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_it_is_served_like_a_checkpoint(tmp_path, cache, caplog):
    reference = write_gguf(tmp_path / "tiny.gguf")
    config = ModelConfig(path=str(tmp_path / "tiny.gguf"), device="cpu", dtype="float32", num_kv_blocks=8)
    runner = ModelRunner(config, TensorParallelGroup.single())
    assert "GB of bfloat16" in caplog.text
    folder = resolve_folder(config)
    assert folder.parent == cache / "gguf"
    assert folder.name.startswith("tiny-")
    saved = LlamaForCausalLM.from_pretrained(folder)
    assert saved.dtype == torch.bfloat16
    for name, weight in saved.state_dict().items():
        assert torch.equal(weight, reference.state_dict()[name].bfloat16()), name
    assert runner.eos_token_ids == (2,)
    assert load_tokenizer(config).convert_tokens_to_ids("token200") == 200


def test_it_is_converted_once_and_again_when_it_has_changed(tmp_path, cache):
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    assert ModelConfig(path=str(path)).has_code, "torch converts it"
    first = gguf.convert_once(path)
    assert not ModelConfig(path=str(path)).has_code
    made_ns = (first / "config.json").stat().st_mtime_ns
    assert gguf.convert_once(path) == first
    assert (first / "config.json").stat().st_mtime_ns == made_ns
    assert list(first.parent.iterdir()) == [first], "nothing else is left of a conversion"
    os.utime(path, ns=(1, 1))
    assert gguf.convert_once(path) != first


def test_another_process_may_have_been_faster(tmp_path):
    late, folder = tmp_path / "late", tmp_path / "folder"
    for made in (late, folder):
        made.mkdir()
        (made / "config.json").write_text(made.name)
    gguf._move(late, folder)
    assert (folder / "config.json").read_text() == "folder"
    with pytest.raises(OSError, match="gone"):
        gguf._move(tmp_path / "gone", tmp_path / "nowhere")


def test_what_cannot_be_read_is_told(tmp_path, cache, monkeypatch):
    with pytest.raises(ValueError, match=r"missing\.gguf: there is no such file"):
        gguf.convert_once(tmp_path / "missing.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"gguf|GGUF"):
        gguf.convert_once(tmp_path / "bad.gguf")
    monkeypatch.setattr(gguf, "PACKAGES", ("no_such_package",))
    with pytest.raises(ValueError, match=r"pip install 'outrider\[gguf\]'"):
        gguf.convert_once(tmp_path / "bad.gguf")
    assert not list((cache / "gguf").iterdir())
