"""What cannot be served is refused at start, by name and with the reason."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, PreTrainedTokenizerFast

from outrider.verifier_service.messages.expert_shape import ExpertShape
from outrider.verifier_service.model.architectures import (
    ARCHITECTURES,
    UnsupportedModelError,
    expert_shape,
    load_model_description,
    read_description,
    read_eos_token_ids,
    read_sampling_defaults,
    require_supported,
    resolve_description,
    resolve_folder,
)
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.empty_model import text_model
from outrider.verifier_service.model.settled import limit_to_pool, own_limit, resolve_max_model_len
from tiny.hub.families import FAMILIES, family_config
from tiny.models import COMMON, TINY_ARCHITECTURES


def describe(model_type: str, **fields):
    return AutoConfig.for_model(model_type, **{**COMMON, **fields})


REFUSED = "bailing_hybrid codegen deepseek_v4 gptj inkling_mm_model kimi_linear mamba minimax nemotron_h"
REFUSED += " qwen3_5 qwen3_5_moe qwen3_next"


@pytest.mark.parametrize("name", REFUSED.split())
def test_refused_by_name(name):
    description = AutoConfig.for_model(name).get_text_config()
    with pytest.raises(UnsupportedModelError, match=rf"^{description.model_type}: its? "):
        require_supported(description, 1)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    ],
)
def test_rope_that_depends_on_the_batch_is_refused(rope):
    with pytest.raises(UnsupportedModelError, match=f"llama: .*{rope['rope_type']}"):
        require_supported(describe("llama", rope_parameters=rope), 1)


def test_rope_of_one_layer_type_is_enough_to_refuse():
    rope = {
        "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    with pytest.raises(UnsupportedModelError, match=r"gemma3_text: .*dynamic"):
        require_supported(describe("gemma3_text", rope_parameters=rope), 1)


@pytest.mark.parametrize("name", ["deepseek-v3.2", "dots3-note", "glm-5", "llama-4", "minimax-m3"])
def test_sparse_attention_is_served_where_it_reads_every_key(tmp_path, name):
    family_config(name).save_pretrained(tmp_path)
    load_model_description(tmp_path, ModelConfig(path=str(tmp_path), max_model_len=160))
    for max_model_len in (161, None):
        with pytest.raises(UnsupportedModelError, match=r"(sparse|chunked) attention .* max_model_len up to 160"):
            load_model_description(tmp_path, ModelConfig(path=str(tmp_path), max_model_len=max_model_len))


def test_scaled_rope_that_is_fixed_is_served():
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    assert require_supported(describe("llama", rope_parameters=rope), 1) is ARCHITECTURES["llama"]


@pytest.mark.parametrize("name", sorted([*TINY_ARCHITECTURES, *FAMILIES]))
def test_the_shape_of_the_experts_is_that_of_the_model(name):
    description = family_config(name) if name in FAMILIES else describe(name, **TINY_ARCHITECTURES[name])
    description = description.get_text_config()
    with torch.device("meta"):
        model = text_model(description)
    stacked = {parameter.shape[0] for parameter in model.parameters() if parameter.ndim == 3}  # all experts in one
    if not stacked:
        assert expert_shape(description) is None
        return
    (num_experts,) = stacked
    assert expert_shape(description) == ExpertShape(num_experts=num_experts, num_active=2)


def test_experts_are_counted_by_the_description():
    assert expert_shape(describe("mixtral", num_local_experts=8, num_experts_per_tok=3)) == ExpertShape(
        num_experts=8, num_active=3
    )
    assert expert_shape(describe("qwen2_moe", num_experts=0)) is None


def test_an_unknown_format_is_refused_by_name(tmp_path):
    describe("llama", quantization_config={"quant_method": "hqq", "bits": 4}).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"llama: quantization_config.quant_method: 'hqq' is not read"):
        load_model_description(tmp_path, ModelConfig(path=str(tmp_path)))


def test_they_are_of_a_model_with_other_parts_whose_text_part_does_not_say_so(tmp_path):
    whole = AutoConfig.for_model("gemma3", text_config={**COMMON}).to_dict()
    whole["quantization_config"] = {"quant_method": "hqq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(UnsupportedModelError, match=r"gemma3: .*'hqq'"):
        load_model_description(tmp_path, ModelConfig(path=str(tmp_path)))


def test_what_another_engine_serves_is_described_too(tmp_path):
    whole = AutoConfig.for_model("llava", text_config={"model_type": "llama", "vocab_size": 96}).to_dict()
    whole["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert read_description(tmp_path, ModelConfig(path=str(tmp_path))).vocab_size == 96


def test_the_description_is_read_and_checked(tmp_path):
    describe("llama").save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    assert load_model_description(resolve_folder(config), config).model_type == "llama"
    rewritten = {**json.loads((tmp_path / "config.json").read_text()), "model_type": "gptj"}
    (tmp_path / "config.json").write_text(json.dumps(rewritten))
    with pytest.raises(UnsupportedModelError, match="gptj"):
        load_model_description(Path(config.path), config)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"path": ""}, "path"),
        ({"dtype": "int8"}, "dtype"),
        ({"device": "tpu"}, "device"),
        ({"block_size": 0}, "block_size"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size"),
        ({"max_model_len": -1}, "max_model_len"),
        ({"num_kv_blocks": 1.5}, "num_kv_blocks"),
        ({"num_threads": 0}, "num_threads"),
    ],
)
def test_a_bad_config_names_its_field(fields, name):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        ModelConfig(**{"path": "x", **fields})


def test_code_that_comes_with_a_checkpoint_is_not_run_unless_asked_for(tmp_path):
    """A known architecture is read with the library's own code; an unknown one is refused, naming the flag."""
    trace = tmp_path / "it_ran"
    code = f"from pathlib import Path\nfrom transformers import PreTrainedConfig\nPath({str(trace)!r}).touch()\n"
    (tmp_path / "configuration_own.py").write_text(
        f"{code}class OwnConfig(PreTrainedConfig):\n    model_type = 'own'\n"
    )
    for model_type, refusal in (("own", pytest.raises(ValueError, match="trust_remote_code")), ("llama", None)):
        description = {"model_type": model_type, "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
        (tmp_path / "config.json").write_text(json.dumps(description))
        with refusal or contextlib.nullcontext():
            load_model_description(tmp_path, ModelConfig(path=str(tmp_path)))
        assert not trace.exists()


def test_who_reads_no_tensor_downloads_none(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **options: asked.append((name, options)) or str(tmp_path)
    )
    config = ModelConfig(path="maker/model", revision="main")
    assert resolve_description(config) == resolve_folder(config) == tmp_path
    (name, small), (_, whole) = asked
    assert (name, small["revision"]) == ("maker/model", "main")
    assert {*whole["allow_patterns"]} - {*small["allow_patterns"]} == {"*.safetensors"}
    assert {"*.jinja", "*.tiktoken", "tokenizer*"} <= {*small["allow_patterns"]}
    for resolve in (resolve_description, resolve_folder):
        assert "*.py" not in asked[-1][1]["allow_patterns"]
        resolve(dataclasses.replace(config, trust_remote_code=True))
        assert "*.py" in asked.pop()[1]["allow_patterns"]


END_FILES = {
    "generation": ("generation_config.json", {"eos_token_id": [4, 5]}),
    "tokenizer": ("tokenizer_config.json", {"eos_token": "<six>"}),
    "config": ("config.json", {"eos_token_id": 7}),
    "text part": ("config.json", {"text_config": {"eos_token_id": [8]}}),
    "beyond": ("generation_config.json", {"eos_token_id": [4, 400]}),
    "no token": ("tokenizer_config.json", {"eos_token": None}),
}


@pytest.mark.parametrize(
    ("named", "ids"),
    [
        ((), (2,)),  # the architecture's own
        (("config",), (7,)),
        (("generation",), (4, 5)),
        (("tokenizer",), (6,)),
        (("generation", "tokenizer", "config"), (4, 5, 6, 7)),
        (("text part", "tokenizer"), (6, 8)),
        (("beyond", "no token", "config"), (4, 7)),
    ],
)
def test_a_text_ends_at_every_token_that_any_file_names(tmp_path, named, ids):
    files = {"config.json": {"model_type": "llama", "vocab_size": 256}}
    for file, content in (END_FILES[name] for name in named):
        files[file] = {**files.get(file, {}), **content}
    if any(file == "tokenizer_config.json" for file in files):
        words = {f"w{id_}": id_ for id_ in range(6)} | {"<six>": 6}
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "w0"))).save_pretrained(tmp_path)
        written = json.loads((tmp_path / "tokenizer_config.json").read_text())
        files["tokenizer_config.json"] = {**written, **files["tokenizer_config.json"]}
    for file, content in files.items():
        (tmp_path / file).write_text(json.dumps(content))
    config = ModelConfig(path=str(tmp_path))
    assert read_eos_token_ids(tmp_path, AutoConfig.for_model("llama", vocab_size=256), config) == ids


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (None, {}),
        ({"eos_token_id": 1, "do_sample": False, "temperature": None, "num_beams": 4}, {}),
        ({"temperature": 0.6, "top_k": -1, "top_p": 0.95}, {"temperature": 0.6, "top_k": 0, "top_p": 0.95}),
        (
            {"min_p": 0.1, "repetition_penalty": 1.05, "max_new_tokens": 2048},
            {"min_p": 0.1, "repetition_penalty": 1.05, "max_tokens": 2048},
        ),
    ],
)
def test_sampling_is_read_as_vllm_reads_it(tmp_path, written, read):
    if written is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(written))
    assert read_sampling_defaults(tmp_path) == read


@pytest.mark.parametrize("written", [{"temperature": -1.0}, {"top_p": "high"}, {"max_new_tokens": 0}])
def test_bad_sampling_in_a_file_is_named(tmp_path, written):
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match=r"^generation_config\.json: .*generation_config: vllm"):
        read_sampling_defaults(tmp_path)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10_000.0}


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, 256),
        ({"max_position_embeddings": 64, "rope_parameters": YARN}, 256),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "yarn", **YARN}}, 256),
        ({"max_position_embeddings": 256, "rope_parameters": YARN}, 256),  # scaled already
        ({"max_position_embeddings": 80, "rope_parameters": YARN}, 256),
        ({"max_position_embeddings": 512, "rope_parameters": YARN}, 512),
        ({"rope_parameters": {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}}, 256),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}}, 256),
    ],
)
def test_yarns_context_is_its_factor_times_what_was_before_it(fields, limit):
    description = describe("llama", **fields)
    assert own_limit(description) == limit
    assert resolve_max_model_len(ModelConfig(path="p", max_model_len=limit), description) == limit
    with pytest.raises(ValueError, match=f"limit of {limit}"):
        resolve_max_model_len(ModelConfig(path="p", max_model_len=limit + 1), description)


def test_yarn_of_one_layer_type_counts():
    description = describe("llama", max_position_embeddings=64)
    description.rope_parameters = {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}
    assert own_limit(description) == 256


def test_a_drafters_model_may_be_shorter():
    description = describe("llama")
    for asked, settled in ((None, 256), (100, 100), (1000, 256)):
        config = ModelConfig(path="p", max_model_len=asked, may_be_shorter=True)
        assert resolve_max_model_len(config, description) == settled
        assert limit_to_pool(config, settled, 64) == 64


@pytest.mark.parametrize("path", ["/nowhere/model", "./model", "../model", "~/model", "a/b/c", "my model"])
def test_a_folder_that_is_missing_is_said_to_be(path: str):
    with pytest.raises(FileNotFoundError, match="model: there is no folder"):
        resolve_folder(ModelConfig(path=path))
