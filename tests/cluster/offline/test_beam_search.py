"""`LLM.beam_search`: the tokens and scores of transformers' own beam search, under vLLM's names."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from outrider.cluster import LLM, BeamSearchOutput, BeamSearchParams, SamplingParams
from outrider.cluster.config.known_models import SMOLLM2, SMOLLM2_HUB_ID, path_of
from outrider.lab.chat_prompts import PROMPTS
from outrider.verifier_service.formats.gguf import convert_once
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.tokenizer import load_tokenizer
from tiny.models import make_checkpoint

TEXTS = ["the quick brown", "fox jumps over", "größer 日本語 and the lazy dog"]
SIZES = {"max_model_len": 96, "kv_cache_memory_bytes": 4 << 20, "device": "cpu", "dtype": "float32"}
MAX_TOKENS = 16
ENDS = list(range(2, 300, 5))
Found = list[tuple[list[int], float]]


def expected(
    model: PreTrainedModel, prompt: list[int], *, width: int, max_tokens: int = MAX_TOKENS, **options
) -> Found:
    """Return the library's own sequences, without the prompt, and their scores."""
    ids = torch.tensor([prompt])
    fixed = {"pad_token_id": 0, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    sizes = {"num_beams": width, "num_return_sequences": width, "max_new_tokens": max_tokens}
    asked = {"eos_token_id": None, **fixed, **sizes, **options}
    written = model.generate(ids, attention_mask=torch.ones_like(ids), **asked)
    lengths = (written.beam_indices >= 0).sum(dim=1).tolist()
    rows = zip(written.sequences[:, len(prompt) :].tolist(), lengths, written.sequences_scores.tolist(), strict=True)
    return [(row[:length], score) for row, length, score in rows]


def check(found: BeamSearchOutput, prompt: list[int], wanted: Found, penalty: float = 1.0) -> None:
    assert [each.tokens for each in found.sequences] == [prompt + ids for ids, _ in wanted]
    for each, (ids, score) in zip(found.sequences, wanted, strict=True):
        assert math.isclose(each.cum_logprob / len(ids) ** penalty, score, rel_tol=1e-4)


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "qwen3_moe"])
def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast
) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(folder, request.param, vocab_size=len(tokenizer), eos_token_id=ENDS)
    tokenizer.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def llm(target):
    with LLM(target[0], speculative_config={"method": "ngram"}, speculation="always", **SIZES) as opened:
        yield opened


@pytest.mark.parametrize("penalty", [1.0, 0.0, -1.5, 4.0])
@pytest.mark.parametrize("width", [2, 5])
def test_sequences_and_scores_are_those_of_transformers(llm, target, tokenizer, width: int, penalty: float):
    params = BeamSearchParams(
        beam_width=width, max_tokens=MAX_TOKENS, length_penalty=penalty, ignore_eos=True, temperature=0.7
    )
    for text, found in zip(TEXTS, llm.beam_search(TEXTS, params), strict=True):
        prompt = tokenizer.encode(text)
        check(found, prompt, expected(target[1], prompt, width=width, length_penalty=penalty), penalty)
        assert {each.finish_reason for each in found.sequences} == {"length"}
        assert all(each.text.startswith(text) for each in found.sequences)


@pytest.mark.parametrize("penalty", [1.0, 0.0, 3.0])
def test_beams_end_at_the_models_end_token(llm, target, tokenizer, penalty: float):
    ends, reasons = sorted(llm._engine.eos_token_ids), set()
    params = BeamSearchParams(beam_width=4, max_tokens=12, length_penalty=penalty)
    for text, found in zip(TEXTS, llm.beam_search(TEXTS, params), strict=True):
        prompt = tokenizer.encode(text)
        options = {"eos_token_id": ends, "length_penalty": penalty, "max_tokens": 12}
        check(found, prompt, expected(target[1], prompt, width=4, **options), penalty)
        reasons |= {each.finish_reason for each in found.sequences}
        assert all((each.tokens[-1] in ends) == (each.finish_reason == "stop") for each in found.sequences)
    assert "stop" in reasons or penalty > 1, "or the test shows nothing"


def test_beams_end_at_a_text(llm, target, tokenizer):
    prompt = tokenizer.encode(TEXTS[0])
    plain = llm.beam_search(TEXTS[:1], BeamSearchParams(beam_width=3, max_tokens=MAX_TOKENS, ignore_eos=True))
    tokens = [tokenizer.decode([id_]).strip() for id_ in plain[0].sequences[0].tokens[len(prompt) + 1 :]]
    stops = [text for text in tokens if text.isascii() and text.isalnum()][:3]
    num_ended = 0
    for stop in stops:
        params = BeamSearchParams(beam_width=3, max_tokens=MAX_TOKENS, ignore_eos=True, stop=stop)
        (found,) = llm.beam_search(TEXTS[:1], params)
        check(found, prompt, expected(target[1], prompt, width=3, stop_strings=[stop], tokenizer=tokenizer))
        ended = [each for each in found.sequences if each.finish_reason == "stop"]
        assert {each.stop_reason for each in ended} <= {stop}
        assert all(stop not in each.text.removeprefix(TEXTS[0]) for each in ended)
        num_ended += len(ended)
    assert num_ended, "or the test shows nothing"


def test_prompts_run_together_and_a_few_at_a_time_alike(llm):
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    together = llm.beam_search([*TEXTS, {"prompt_token_ids": [5, 6, 7]}], params)
    assert llm.beam_search([*TEXTS, {"prompt_token_ids": [5, 6, 7]}], params, concurrency_limit=1) == together
    assert all(len(found.sequences) == 3 for found in together)
    first = together[0].sequences[0]
    assert {len(entry) for entry in first.logprobs} <= {6, 7}, "2 x width, and the token's own"
    assert not llm._engine.engine.has_work()
    assert llm._engine.engine.scheduler.kv_usage == 0.0


def test_a_beam_alone_goes_where_greedy_decoding_goes(llm):
    params = BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True)
    greedy = llm.generate(TEXTS, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    for found, plain in zip(llm.beam_search(TEXTS, params), greedy, strict=True):
        assert found.sequences[0].tokens == plain.prompt_token_ids + plain.outputs[0].token_ids


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"length_penalty": 11.0}, "length_penalty"),
        ({"length_penalty": math.nan}, "length_penalty"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"stop": ["a", ""]}, "stop"),
    ],
)
def test_bad_parameters_are_named(options: dict[str, Any], field: str):
    with pytest.raises(ValueError, match=f"^{field} "):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **options})


def test_what_the_engine_refuses_is_an_error_that_says_so(llm):
    with pytest.raises(ValueError, match=r"^n: 500 beams"):
        llm.beam_search(TEXTS, BeamSearchParams(beam_width=500, max_tokens=4))
    assert not llm._engine.engine.has_work(), "the other prompts are cancelled"


@pytest.mark.skipif(path_of(SMOLLM2) == SMOLLM2_HUB_ID, reason="SmolLM2 is not installed: make smollm2")
def test_a_real_models_beams_are_those_of_transformers():
    width, max_tokens = 4, 24
    folder = convert_once(Path(path_of(SMOLLM2)))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    end = tokenizer.eos_token_id
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()[:2]] + ["What is 2 + 2?"]
    messages = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    options = {"max_model_len": 512, "dtype": "float32", "device": "cpu", "speculation": "off"}
    with contextlib.closing(LLM(SMOLLM2, **options)) as llm:
        params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, length_penalty=0.5)
        for message, found in zip(messages, llm.beam_search(messages, params), strict=True):
            prompt = tokenizer.apply_chat_template(message["messages"], add_generation_prompt=True)["input_ids"]
            asked = {"width": width, "max_tokens": max_tokens, "eos_token_id": end, "length_penalty": 0.5}
            check(found, prompt, expected(model, prompt, **asked), 0.5)
