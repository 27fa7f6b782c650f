"""A request in vLLM's words, and what those cannot say."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from outrider.cluster.vllm_engine.sampling import sampling_of, structured_of
from outrider.verifier_service.messages.beam_search import BeamSearch
from outrider.verifier_service.messages.request import (
    AcceptanceRule,
    GenerationRequest,
    LogitBias,
    LogprobsMode,
    SamplingParams,
    StructuredKind,
    StructuredOutput,
)
from outrider.verifier_service.messages.thought import Thought


def request(published: tuple[int, ...] = (), **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        prompt_token_ids=(1, 2, 3),
        output_token_ids=published,
        sampling=SamplingParams(**sampling),
    )


OPEN = Thought(opening="<think>", closing="</think>", is_open=True)
BOUNDED = replace(OPEN, max_tokens=5)
CALLS = StructuredOutput(kind=StructuredKind.GRAMMAR, text="start: A")  # it knows thoughts itself


def test_what_both_have_keeps_its_name_and_value():
    asked = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "max_tokens": 20, "min_tokens": 4}
    asked |= {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2, "ignore_eos": True}
    asked |= {"logprobs": 3, "prompt_logprobs": 0}
    found = sampling_of(request(**asked, stop_token_ids=(5, 6), allowed_token_ids=(7,)), has_drafts=False)
    assert found["allowed_token_ids"] == [7]
    assert {name: found[name] for name in asked} == asked
    assert (found["stop_token_ids"], found["detokenize"]) == ([5, 6], False)
    assert "logit_bias" not in found
    assert "extra_args" not in found


def test_a_bias_and_a_cap_are_said_in_vllms_way():
    biased = request(logit_bias=(LogitBias(token_id=9, bias=-2.0),), num_speculative_tokens=0)
    found = sampling_of(biased, has_drafts=False)
    assert found["logit_bias"] == {9: -2.0}
    assert found["extra_args"] == {"num_speculative_tokens": 0}


def test_what_was_published_is_counted_off():
    found = sampling_of(request((7, 8), max_tokens=10, min_tokens=1), has_drafts=False)
    assert (found["max_tokens"], found["min_tokens"]) == (8, 0)


def test_choices_have_the_seeds_that_vllm_gives_its_own_and_a_continuation_has_another():
    seeds = [sampling_of(request(seed=40, choice_index=index), has_drafts=False)["seed"] for index in range(3)]
    assert seeds == [40, 41, 42]
    continued = [sampling_of(request(ids, seed=40), has_drafts=False)["seed"] for ids in ((1,), (1,), (1, 2))]
    assert continued[0] == continued[1]
    assert len({40, *continued}) == 3
    last = (1 << 63) - 1
    assert sampling_of(request(seed=last, choice_index=1), has_drafts=False)["seed"] == -(1 << 63)
    assert sampling_of(request((1,)), has_drafts=False)["seed"] is None


@pytest.mark.parametrize(
    ("asked", "has_drafts", "field"),
    [
        (request(acceptance=AcceptanceRule.TYPICAL), False, "acceptance"),
        (request(acceptance=AcceptanceRule.BLOCK), False, "acceptance"),
        (request(min_p=0.1), True, "min_p"),
        (request(bad_words=((5,),)), False, "bad_words"),
        (request(logprobs_mode=LogprobsMode.PROCESSED), False, "logprobs_mode"),
        (request(logit_bias=(LogitBias(token_id=1, bias=1.0),)), True, "logit_bias"),
        (request((4,), presence_penalty=0.1), False, "presence_penalty"),
        (request((4,), frequency_penalty=0.1), False, "frequency_penalty"),
        (request((4,), structured=StructuredOutput(kind=StructuredKind.JSON_OBJECT)), False, "structured"),
        (request(beams=BeamSearch(width=2), num_speculative_tokens=0), False, "use_beam_search"),
        (request(thought=BOUNDED), False, "thinking_token_budget"),
        (request(thought=BOUNDED, structured=CALLS), False, "thinking_token_budget"),
        (request(thought=OPEN, structured=StructuredOutput(kind=StructuredKind.JSON_OBJECT)), False, "structured"),
    ],
)
def test_what_vllm_cannot_do_is_refused_by_name(asked: GenerationRequest, has_drafts: bool, field: str):
    with pytest.raises(ValueError, match=f"^{field}: "):
        sampling_of(asked, has_drafts=has_drafts)
    sampling_of(replace(asked, output_token_ids=(), sampling=SamplingParams()), has_drafts=has_drafts)


def test_a_form_may_begin_where_no_thought_is_open_and_calls_may_follow_one():
    sampling_of(request(thought=OPEN, structured=CALLS), has_drafts=False)
    closed = replace(OPEN, is_open=False)
    sampling_of(request(thought=closed, structured=StructuredOutput(kind=StructuredKind.JSON_OBJECT)), has_drafts=False)


@pytest.mark.parametrize(
    ("structured", "expected"),
    [
        (StructuredOutput(kind=StructuredKind.JSON_SCHEMA, text='{"type": "object"}'), {"json": '{"type": "object"}'}),
        (StructuredOutput(kind=StructuredKind.JSON_OBJECT), {"json_object": True}),
        (StructuredOutput(kind=StructuredKind.REGEX, text="a+"), {"regex": "a+"}),
        (StructuredOutput(kind=StructuredKind.GRAMMAR, text="start: A"), {"grammar": "start: A"}),
        (StructuredOutput(kind=StructuredKind.CHOICE, choices=("a", "b")), {"choice": ["a", "b"]}),
    ],
)
def test_every_form_has_vllms_name(structured: StructuredOutput, expected: dict[str, Any]):
    assert structured_of(structured) == expected


@pytest.mark.parametrize("text", ['{"type": "array", "uniqueItems": true}', '{"type": "string", "format": "path"}'])
def test_vllms_grammar_leaves_out_what_ours_does(text: str):
    wanted = StructuredOutput(kind=StructuredKind.JSON_SCHEMA, text=text)
    told = json.loads(structured_of(wanted)["json"])
    assert told == {**json.loads(text), "x-guidance": {"lenient": True}}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, None),
        ({"may_learn": True}, {"store": True}),
        ({"cache_salt": "s"}, {"cache_salt": "s"}),
        ({"may_learn": True, "cache_salt": "s"}, {"store": True, "cache_salt": "s"}),
        ({"history_key": ""}, {"store": False}),
    ],
)
def test_the_plugin_is_told_what_may_be_kept(fields: dict[str, Any], told: dict[str, Any] | None):
    assert sampling_of(replace(request(), **fields), has_drafts=True).get("extra_args") == told
