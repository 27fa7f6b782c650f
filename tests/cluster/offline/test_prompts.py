"""Prompts: what each may be, what a line of a file may carry besides, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.cluster.offline.prompts import Prompt, PromptError, parse_line, parse_prompt, read_prompt_lines
from outrider.cluster.offline.sampling_params import SamplingParams
from outrider.verifier_service.messages.request import StructuredKind, StructuredOutput

MESSAGES = [{"role": "user", "content": "hello"}]


def parse(line: dict[str, Any]) -> SamplingParams:
    return parse_line({"prompt": "a", **line}, "prompt-0", SamplingParams(max_tokens=9)).sampling


@pytest.mark.parametrize(
    ("value", "prompt"),
    [
        ("hello", Prompt(text="hello")),
        ({"prompt": "hello"}, Prompt(text="hello")),
        ({"prompt_token_ids": [1, 2]}, Prompt(token_ids=(1, 2))),
        ({"messages": MESSAGES}, Prompt(messages=tuple(MESSAGES))),
        (Prompt(token_ids=(3,)), Prompt(token_ids=(3,))),
    ],
)
def test_a_prompt_is_text_token_ids_or_a_conversation(value: Any, prompt: Prompt):
    assert parse_prompt(value, "prompts") == prompt


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "give one of prompt"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "give one of prompt, prompt_token_ids"),
        ({"prompt": 3}, "prompt must be a string"),
        ({"prompt_token_ids": [1.5]}, "list of integers"),
        ({"promt": "a"}, "unknown field 'promt'; did you mean 'prompt'"),
        ({"messages": []}, "messages must be a list of messages"),
        ({"messages": ["hello"]}, "messages must be a list of messages"),
        (3, "must be a text"),
    ],
)
def test_what_is_no_prompt_is_named(value: Any, message: str):
    with pytest.raises(PromptError, match=r"^prompts\[4\].*" + message):
        parse_prompt(value, "prompts[4]")


def test_a_line_may_carry_its_own_sampling():
    line = {"prompt_token_ids": [1, 2], "temperature": 0.5, "seed": 3, "stop_token_ids": [4], "stop": "x", "n": 2}
    parsed = parse_line(line, "prompt-0", SamplingParams(max_tokens=9))
    assert parsed.prompt == Prompt(token_ids=(1, 2))
    assert parsed.sampling == SamplingParams(max_tokens=9, temperature=0.5, seed=3, stop_token_ids=[4], stop="x", n=2)


@pytest.mark.parametrize("biases", [{"7": 1.5}, [{"token_id": 7, "bias": 1.5}]])
def test_biases_come_as_an_object_or_as_a_list(biases: Any):
    assert parse({"logit_bias": biases}).logit_bias == {7: 1.5}


def test_structured_output_and_the_acceptance_rule_are_spelled_as_over_http():
    sampling = parse({"guided_choice": ["a", "b"], "rejection_sample_method": "block"})
    assert sampling.structured_outputs == StructuredOutput(kind=StructuredKind.CHOICE, choices=("a", "b"))
    assert sampling.rejection_sample_method == "block"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temprature": 1}, "unknown field 'temprature'; did you mean 'temperature'"),
        ({"structured": {"kind": "regex"}}, "unknown field 'structured'"),
        ({"top_p": 2}, "top_p must be"),
        ({"temperature": "hot"}, "temperature must be"),
        ({"rejection_sample_method": "blocks"}, "blocks"),
        ({"guided_regex": 3}, "guided_regex"),
        ({"logit_bias": [{"token_id": 7}]}, "logit_bias must be"),
        ({"logit_bias": {"x": 1}}, "logit_bias must be"),
    ],
)
def test_what_is_wrong_with_a_line_is_named(fields: dict[str, Any], message: str):
    with pytest.raises(PromptError, match=f"^prompt-0: .*{message}"):
        parse(fields)


def test_a_line_may_have_unicodes_line_separators_in_its_text(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\u2028\x85b"}\r\n{"prompt": "c"}', encoding="utf-8")
    assert read_prompt_lines(path) == [{"prompt": "a\u2028\x85b"}, {"prompt": "c"}]


def test_bad_file_names_the_line(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n\nnot json\n')
    with pytest.raises(PromptError, match=r"prompts.jsonl:3"):
        read_prompt_lines(path)
    path.write_text('{"prompt": "a"}\n\n[]\n')
    with pytest.raises(PromptError, match=r"prompts.jsonl:3: expected an object"):
        read_prompt_lines(path)
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert read_prompt_lines(path) == [{"prompt": "a"}, {"prompt": "b"}]
