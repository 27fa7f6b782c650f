"""A quantised checkpoint serves the library's logits of its dequantised weights, through our decoder and the library's.

A start compares them as well; its comparison is left on.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from exactness import small_engines
from exactness.small_engines import Limits, RandomDrafts, generate, make_engine
from outrider.verifier_service.formats.quantized import open_checkpoint
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan
from tiny.formats.runners import make_runner, require_equal
from tiny.formats.schemes import MXFP4_EXPERTS, SCHEMES, Scheme, write_quantized
from tiny.models import random_sequences

NUM_NEW_TOKENS = 12
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_the_decoders_logits_are_the_librarys(tmp_path: Path, scheme: str) -> None:
    model = write_quantized(tmp_path, SCHEMES[scheme])
    require_equal(make_runner(tmp_path), model)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "phi3", "gpt_neox", "starcoder2"])
@pytest.mark.parametrize("scheme", ["fp8-blocks", "compressed-int4"])
def test_so_are_those_of_experts_fused_projections_and_the_librarys_modules(
    tmp_path: Path, model_type: str, scheme: str
) -> None:
    model = write_quantized(tmp_path, SCHEMES[scheme], model_type)
    require_equal(make_runner(tmp_path), model)


def test_so_are_those_of_gpt_oss(tmp_path: Path) -> None:
    model = write_quantized(tmp_path, MXFP4_EXPERTS, "gpt_oss", **GPT_OSS)
    require_equal(make_runner(tmp_path), model)


@pytest.mark.parametrize(
    ("scheme", "model_type", "options"),
    [
        (SCHEMES["fp8-blocks"], "llama", {}),
        (SCHEMES["fp8-static"], "llama", {}),
        (MXFP4_EXPERTS, "gpt_oss", GPT_OSS),
    ],
)
def test_the_library_dequantises_the_same_files_to_the_same_weights(
    tmp_path: Path, scheme: Scheme, model_type: str, options: dict[str, Any]
) -> None:
    expected = write_quantized(tmp_path, scheme, model_type, **options).state_dict()
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert all(torch.equal(read[name], weight) for name, weight in expected.items())


def test_a_start_says_what_was_dequantised_and_its_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"num_hidden_layers": 1, "intermediate_size": 32768, "hidden_size": 64}
    write_quantized(tmp_path, SCHEMES["fp8-blocks"], **sizes)
    with caplog.at_level(logging.WARNING):
        make_runner(tmp_path, dtype="bfloat16", check_logits=False)
    # 3 x 32768 x 64 weights and a few: 2 bytes each, in the files 1 and a scale for each 512
    assert "FP8 weights are dequantised at load: 0.0126 GB of bfloat16, 0.00635 GB in the files" in caplog.text


@pytest.mark.parametrize("scheme", ["fp8-blocks", "gptq-shuffled", "compressed-int8"])
def test_greedy_tokens_are_the_librarys_whatever_is_drafted(tmp_path: Path, scheme: str) -> None:
    model = write_quantized(tmp_path, SCHEMES[scheme])
    prompt = random_sequences((14,))[0]
    token_ids, options = torch.tensor([prompt]), {"do_sample": False, "max_new_tokens": NUM_NEW_TOKENS}
    expected = model.generate(token_ids, attention_mask=torch.ones_like(token_ids), **options)[0, len(prompt) :]
    runner = make_runner(tmp_path, num_kv_blocks=small_engines.NUM_BLOCKS)
    drafts = RandomDrafts(runner.vocab_size)
    request = GenerationRequest(
        request_id="0",
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS),
        plan=SpeculationPlan(draft_length=4),
    )
    generated = generate(make_engine(runner, drafts, Limits()), drafts, [request])
    assert generated.token_ids["0"] == expected.tolist()
    assert generated.num_draft_tokens > 0


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_a_device_dequantises_to_the_same_weights(tmp_path: Path, scheme: str) -> None:
    expected = write_quantized(tmp_path, SCHEMES[scheme]).state_dict()
    with open_checkpoint(tmp_path, device=torch.device("cuda")) as source:
        for name, weight in expected.items():
            torch.testing.assert_close(source.read(name).cpu(), weight, rtol=1e-6, atol=1e-7)
