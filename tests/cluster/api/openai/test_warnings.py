"""What an answer is not held to is said with it, once, and in the words of the body; where strict, it is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from fakes.backend import FakeBackend
from outrider.cluster.replies.reader import ReplySyntax
from support.stack import Stack

SAYS = "the answer may break what the grammar lacks and leaves out: uniqueItems"
MESSAGES = [{"role": "user", "content": "fox"}]


class Animal(BaseModel):
    legs: set[str]


SCHEMA = Animal.model_json_schema()
STRICT = {"name": "f", "strict": True}
PLAIN = {"name": "f", "strict": False}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": MESSAGES, **fields}


def form(**described: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": SCHEMA, **described}}


def tool(**described: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"parameters": SCHEMA, **described}}


LENIENT = {
    "response_format": (*chat(response_format=form(name="f")), "response_format"),
    "not strict": (*chat(response_format=form(**PLAIN)), "response_format"),
    "guided_json": ("/v1/completions", {"prompt": "a", "guided_json": SCHEMA}, "guided_json"),
    "vllm": ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
    "several": ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "guided_json": SCHEMA}, "guided_json"),
    "tools": (*chat(tools=[tool(**PLAIN)]), "tools"),
    "tools must": (*chat(tools=[tool(name="f")], tool_choice="required"), "tools"),
    "responses": (
        "/v1/responses",
        {"input": "a", "text": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "text",
    ),
}


@pytest.fixture
def backend(tokenizer):
    return FakeBackend(lambda _: [[id_] for id_ in tokenizer.encode("the fox")])


def client_of(backend, tokenizer, parser="hermes"):
    syntax = ReplySyntax(tool_call_parser=parser)
    return Stack(backend, tokenizer=tokenizer, api={"reply_syntax": syntax}).client()


@pytest.mark.parametrize("name", LENIENT)
async def test_what_is_left_out_is_named_in_the_answer(tokenizer, backend, name):
    path, body, field = LENIENT[name]
    async with client_of(backend, tokenizer) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["warnings"] == [f"{field}: {SAYS}"]


@pytest.mark.parametrize("name", LENIENT)
async def test_a_stream_says_it_at_its_beginning(tokenizer, backend, name):
    path, body, field = LENIENT[name]
    async with client_of(backend, tokenizer) as client:
        answer = await client.post(path, json={**body, "stream": True})
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    objects = [json.loads(event) for event in events]
    assert len(objects) > 1
    if path == "/v1/responses":  # whoever shows a response shows all of it
        objects = [event["response"] for event in objects if "response" in event]
        assert all(response["warnings"] == [f"{field}: {SAYS}"] for response in objects)
    else:
        assert objects[0]["warnings"] == [f"{field}: {SAYS}"]
        assert not any("warnings" in chunk for chunk in objects[1:])


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (*chat(response_format=form(**STRICT)), "response_format"),
        (*chat(tools=[tool(**STRICT)]), "tools"),
        (*chat(tools=[tool(name="g"), tool(**STRICT)], tool_choice="required"), "tools"),
        (
            "/v1/responses",
            {"input": "a", "text": {"format": {"type": "json_schema", "schema": SCHEMA, "strict": True}}},
            "text",
        ),
        ("/v1/responses", {"input": "a", "tools": [{"type": "function", "parameters": SCHEMA, **STRICT}]}, "tools"),
    ],
)
async def test_where_strict_it_is_refused_by_name(tokenizer, backend, path, body, field):
    async with client_of(backend, tokenizer) as client:
        answer = await client.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert 'Unimplemented keys: ["uniqueItems"]' in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (*chat(response_format=form(name="f", strict="yes")), "response_format"),
        (*chat(tools=[tool(name="f", strict=1)]), "tools"),
        (
            *chat(response_format={"type": "json_schema", "json_schema": {"schema": {"$dynamicRef": "#a"}}}),
            "response_format",
        ),
    ],
)
async def test_what_is_wrong_is_named(tokenizer, backend, path, body, field):
    async with client_of(backend, tokenizer) as client:
        answer = await client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "pythonic", None])
async def test_tools_and_a_form_are_told_apart_and_so_are_parameters_that_come_one_by_one(tokenizer, backend, parser):
    schema = {"type": "object", "properties": {"a": {"type": "array", "contains": {}}}, "dependentRequired": {}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    _, body = chat(tools=tools, tool_choice="required")
    async with client_of(backend, tokenizer, parser) as client:
        answer = await client.post("/v1/chat/completions", json=body)
        both = await client.post("/v1/chat/completions", json=chat(tools=tools, response_format=form(name="f"))[1])
    told = answer.json()["warnings"]
    assert len(told) == 1
    assert told[0].startswith("tools: ")
    assert "contains" in told[0]
    assert "dependentRequired" in told[0]
    fields = [warning.partition(":")[0] for warning in both.json()["warnings"]]
    assert fields == (["response_format", "tools"] if parser in ("hermes", "qwen3_coder") else ["response_format"])


async def test_an_answer_that_is_held_to_all_has_no_warnings(tokenizer, backend):
    async with client_of(backend, tokenizer) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a", "guided_json": {"type": "object"}})
    assert "warnings" not in answer.json()
