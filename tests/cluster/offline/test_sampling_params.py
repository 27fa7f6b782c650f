"""The public sampling parameters: vLLM's names and defaults, what is refused, and what the engine is told."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from outrider.cluster.offline.beam_search import BeamSearchParams
from outrider.cluster.offline.sampling_params import SamplingParams
from outrider.verifier_service.messages.beam_search import BeamSearch
from outrider.verifier_service.messages.request import (
    AcceptanceRule,
    LogitBias,
    LogprobsMode,
    StructuredKind,
    StructuredOutput,
)
from outrider.verifier_service.messages.request import SamplingParams as EngineSamplingParams

# vLLM's, of the fields that we have
DEFAULTS: dict[str, Any] = {
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "seed": None,
    "max_tokens": 16,
    "min_tokens": 0,
    "stop": None,
    "stop_token_ids": None,
    "bad_words": None,
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "detokenize": True,
    "logprobs": None,
    "prompt_logprobs": None,
    "structured_outputs": None,
}


def for_engine(**fields: Any) -> EngineSamplingParams:
    return SamplingParams(**fields).for_engine(
        max_model_len=100, acceptance=AcceptanceRule.BLOCK, logprobs_mode=LogprobsMode.PROCESSED
    )


def test_the_defaults_are_vllms():
    given = {field.name: getattr(SamplingParams(), field.name) for field in dataclasses.fields(SamplingParams)}
    assert given | DEFAULTS == given


def test_every_field_of_the_engines_has_a_public_one():
    own = {field.name for field in dataclasses.fields(SamplingParams)}
    renamed = {"structured": "structured_outputs", "acceptance": "rejection_sample_method"}
    asked = {renamed.get(field.name, field.name) for field in dataclasses.fields(EngineSamplingParams)}
    assert asked - {"thought", "beams"} <= own, "thoughts are a chat's: their marks come with a template"
    renamed = {"width": "beam_width"}  # beams are asked for by a call of their own
    asked = {renamed.get(field.name, field.name) for field in dataclasses.fields(BeamSearch)}
    assert asked <= {field.name for field in dataclasses.fields(BeamSearchParams)}


def test_the_engine_is_told_what_was_asked_for():
    assert for_engine() == EngineSamplingParams(acceptance=AcceptanceRule.BLOCK)
    asked = for_engine(
        temperature=0,
        top_k=-1,
        logit_bias={7: -2.0},
        stop_token_ids=[3],
        allowed_token_ids=[5, 6],
        rejection_sample_method="typical",
        n=3,
    )
    assert asked == EngineSamplingParams(
        temperature=0,
        logit_bias=(LogitBias(token_id=7, bias=-2.0),),
        stop_token_ids=(3,),
        allowed_token_ids=(5, 6),
        acceptance=AcceptanceRule.TYPICAL,
    )


def test_the_default_mode_is_for_prompts_with_logprobs():
    """Others may be judged by a lossy rule, which has no log probabilities of the law that tokens are drawn from."""
    assert for_engine().logprobs_mode is LogprobsMode.RAW
    assert for_engine(logprobs=0).logprobs_mode is for_engine(prompt_logprobs=0).logprobs_mode is LogprobsMode.PROCESSED
    assert for_engine(logprobs=0, logprobs_mode="raw_logprobs").logprobs_mode is LogprobsMode.RAW
    with pytest.raises(ValueError, match=r"logprobs_mode must be raw_logprobs with rejection_sample_method typical"):
        for_engine(logprobs=0, rejection_sample_method="typical")


def test_without_a_limit_the_models_own_holds():
    assert for_engine(max_tokens=None).max_tokens == 100
    assert for_engine(max_tokens=None, min_tokens=200).max_tokens == 200  # the engine ends it at the model's


def test_a_form_is_described_as_over_http():
    choice = StructuredOutput(kind=StructuredKind.CHOICE, choices=("a", "b"))
    assert for_engine(structured_outputs={"choice": ["a", "b"]}).structured == choice
    assert for_engine(structured_outputs=choice).structured == choice


@pytest.mark.parametrize(("stop", "strings"), [(None, ()), ("x", ("x",)), (["x", "y"], ("x", "y"))])
def test_stop_is_one_text_or_several(stop: Any, strings: tuple[str, ...]):
    assert SamplingParams(stop=stop).stop_strings == strings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 1.0),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_k", -2),
        ("top_k", 2.5),
        ("logit_bias", [1]),
        ("logit_bias", {"7": 1}),
        ("max_tokens", True),
        ("min_tokens", 17),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", 3),
        ("bad_words", "dog"),
        ("bad_words", [3]),
        ("bad_words", ["a"] * 129),
        ("stop_token_ids", 3),
        ("stop_token_ids", [-1]),
        ("ignore_eos", 1),
        ("skip_special_tokens", None),
        ("detokenize", 0),
        ("logprobs", -1),
        ("logprobs_mode", "processed"),
        ("logprobs_mode", 1),
        ("structured_outputs", {"choices": ["a"]}),
        ("structured_outputs", {"regex": "("}),
        ("num_speculative_tokens", -1),
        ("typical_delta", 0),
        ("choice_index", -1),
    ],
)
def test_a_wrong_value_names_its_field(field: str, value: Any):
    with pytest.raises(ValueError, match=f"^{field}"):
        SamplingParams(**{field: value})


def test_stop_strings_need_the_text():
    with pytest.raises(ValueError, match=r"^detokenize must be True where there are stop strings"):
        SamplingParams(stop="x", detokenize=False)


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)
