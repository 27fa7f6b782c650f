"""/v1/messages: bodies as Anthropic's clients send them, answers and events as they read them."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx
import pytest

from outrider.cluster.api.authentication import ApiKeyMiddleware
from outrider.cluster.common.api_keys import ApiKeys, hash_api_key
from outrider.cluster.replies.reader import ReplySyntax
from outrider.verifier_service.messages.request import FinishReason, StructuredKind
from support.stack import Stack, shared_tokenizer

TEMPLATE = (
    "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.arguments }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant{{ enable_thinking if enable_thinking is defined else '' }}]{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "d", "input_schema": SCHEMA}
HI: dict[str, Any] = {"model": "tiny", "max_tokens": 64, "messages": [{"role": "user", "content": "fox"}]}


class Door(Stack):
    """The API before a model that says a text, or plays a script, and what the model was given."""

    def __init__(self, text: str, *, script: Any = None, **options: Any) -> None:
        options = {"finish_reason": FinishReason.STOP, "max_model_len": 4096, **options}
        syntax = ReplySyntax(tool_call_parser="hermes", reasoning_parser="qwen3")
        tokenizer = shared_tokenizer(TEMPLATE)
        super().__init__(
            script or text, tokenizer=tokenizer, adapters=("poet",), api={"reply_syntax": syntax}, **options
        )

    async def ask(self, body: Any, path: str = "/v1/messages", **headers: str) -> httpx.Response:
        return await self.post(path, body, **headers)

    async def message(self, **fields: Any) -> dict[str, Any]:
        response = await self.ask({**HI, **fields})
        assert response.status_code == 200, response.text
        answered: dict[str, Any] = response.json()
        return answered


def events_of(body: str) -> list[dict[str, Any]]:
    events = [event.split("\n") for event in body.removesuffix("\n\n").split("\n\n")]
    read = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in events]
    assert all(name == data["type"] for name, data in read)
    return [data for _, data in read]


async def test_text_in_text_out() -> None:
    door = Door("größer")
    answer = await door.message(system="be short", temperature=0.5, top_k=3, top_p=0.9, metadata={"user_id": "u"})
    assert answer["content"] == [{"type": "text", "text": "größer"}]
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert answer["id"].startswith("msg_")
    assert door.prompts == ["[system]be short[user]fox[assistant]"]
    (request,) = door.backend.requests
    num_prompt, num_output = len(request.prompt_token_ids), len(door.tokenizer.encode("größer"))
    assert answer["usage"] == {
        "input_tokens": num_prompt - 2,  # the backend says that two were cached
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": num_output,
    }
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (64, 0.5, 3, 0.9)
    assert "warnings" not in answer
    assert "speculative_decoding" in answer["metrics"]


async def test_thoughts_and_calls_are_blocks() -> None:
    door = Door(f"<think>hm</think>See.{CALL}")
    answer = await door.message(tools=[TOOL], thinking={"type": "enabled", "budget_tokens": 1024})
    thought, text, call = answer["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "hm")
    assert thought["signature"]
    assert text == {"type": "text", "text": "See."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Rom"})
    assert call["id"].startswith("toolu_")
    assert answer["stop_reason"] == "tool_use"
    assert answer["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    assert door.prompts == ["<weather>[user]fox[assistantTrue]"]
    assert door.backend.requests[0].sampling.structured.kind is StructuredKind.GRAMMAR

    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "dog"}]}
    history = [*HI["messages"], {"role": "assistant", "content": answer["content"]}]
    await door.message(messages=[*history, {"role": "user", "content": [result]}], thinking={"type": "disabled"})
    assert door.prompts[1] == '[user]fox[assistant]See.!{"city": "Rom"}[tool]dog[assistantFalse]'


async def test_every_step_of_a_stream_is_named() -> None:
    door = Door(f"<think>hm</think>See.{CALL}")
    response = await door.ask({**HI, "tools": [TOOL], "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    kinds = [event["type"] for event in events]
    once = [kind for kind, _ in itertools.groupby(kinds)]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert once == ["message_start", "ping", *block, *block, *block, "message_delta", "message_stop"]
    start = events[0]["message"]
    num_prompt = len(door.backend.requests[0].prompt_token_ids)
    assert (start["content"], start["stop_reason"], start["usage"]["input_tokens"]) == ([], None, num_prompt)
    pieces = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    arguments = [piece["partial_json"] for piece in pieces if piece["type"] == "input_json_delta"]
    assert len(arguments) > 5
    assert json.loads("".join(arguments)) == {"city": "Rom"}
    assert "".join(piece.get("text", "") for piece in pieces) == "See."
    delta = events[-2]
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert (delta["usage"]["input_tokens"], delta["usage"]["cache_read_input_tokens"]) == (num_prompt - 2, 2)


async def test_a_stop_sequence_is_named() -> None:
    answer = await Door("one two three").message(stop_sequences=["two", "x"])
    assert answer["content"] == [{"type": "text", "text": "one "}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "two")


async def test_an_answer_may_reach_its_limit_or_that_of_the_context() -> None:
    door = Door("", script=lambda _: [[5], [6]], finish_reason=FinishReason.LENGTH, max_model_len=64)
    assert (await door.message(max_tokens=2))["stop_reason"] == "max_tokens"
    assert (await door.message(max_tokens=32_000))["stop_reason"] == "model_context_window_exceeded"
    bounded = Door(
        "", script=lambda _: [[5], [6]], finish_reason=FinishReason.LENGTH, sampling_defaults={"max_tokens": 2}
    )
    assert (await bounded.message(max_tokens=32_000))["stop_reason"] == "max_tokens"
    first, second = door.backend.requests
    assert first.sampling.max_tokens == 2
    assert second.sampling.max_tokens == 64 - len(second.prompt_token_ids)


async def test_a_prompt_beyond_the_context_is_refused_in_the_words_that_agents_know() -> None:
    response = await Door("ok", max_model_len=8).ask({**HI, "messages": [{"role": "user", "content": "fox " * 40}]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"].startswith("prompt is too long: ")
    assert "maximum context length is 8 tokens" in error["message"]


async def test_a_call_that_is_cut_off_is_no_call_to_answer() -> None:
    answer = await Door(f"See.{CALL[:55]}", finish_reason=FinishReason.LENGTH).message(tools=[TOOL])
    assert answer["content"][1]["input"] == {"INVALID_JSON": '{"city": "'}
    assert answer["stop_reason"] != "tool_use"


@pytest.mark.parametrize(
    ("choice", "is_forced", "is_parallel"),
    [
        ({"type": "auto"}, False, True),
        ({"type": "any"}, True, True),
        ({"type": "tool", "name": "weather"}, True, True),
        ({"type": "tool", "name": "weather", "disable_parallel_tool_use": True}, True, False),
    ],
)
async def test_a_choice_of_tools_makes_the_grammar(choice: Any, is_forced: bool, is_parallel: bool) -> None:
    door = Door(CALL)
    await door.message(tools=[TOOL], tool_choice=choice)
    grammar = door.backend.requests[0].sampling.structured.text
    assert ("TEXT" not in grammar, "call)" in grammar) == (is_forced, is_parallel)


async def test_no_tool_may_be_called() -> None:
    door = Door("ok")
    await door.message(tools=[TOOL], tool_choice={"type": "none"})
    assert door.backend.requests[0].sampling.structured is None


async def test_an_answer_may_have_a_form() -> None:
    door = Door("{}")
    await door.message(output_config={"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}})
    assert door.backend.requests[0].sampling.structured.kind is StructuredKind.JSON_SCHEMA


async def test_an_answer_goes_on_with_the_assistants_last_words() -> None:
    door = Door("Sie")
    await door.message(messages=[*HI["messages"], {"role": "assistant", "content": "The best is ("}])
    assert door.prompts == ["[user]fox[assistant]The best is ("]


async def test_what_has_no_meaning_here_is_left_out_with_a_warning() -> None:
    door = Door("ok")
    search = {"type": "web_search_20250305", "name": "web_search"}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    history = [*HI["messages"], {"role": "assistant", "content": [found]}, {"role": "user", "content": "so?"}]
    fields = {"tools": [search, TOOL], "messages": history, "mcp_servers": [{"name": "m"}], "stream": True}
    events = events_of((await door.ask({**HI, **fields})).text)
    assert events[0]["message"]["warnings"] == [
        "mcp_servers: unknown here, passed over",
        "tools: left out: web_search_20250305 is run by Anthropic's servers",
        "messages: left out: a block of type web_search_tool_result",
    ]
    assert door.prompts == ["<weather>[user]fox[assistant][user]so?[assistant]"]


def claude_code_body() -> dict[str, Any]:
    """Return a body of the shape of Claude Code's first (2.1.332), with 24 tools of 60 KiB."""
    cached = {"cache_control": {"type": "ephemeral"}}
    properties = {f"p{number}": {"type": "string", "description": "x" * 240} for number in range(8)}
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": properties}
    closed = {**schema, "required": ["p0"], "additionalProperties": False}
    tools = [{"name": f"Tool{number}", "description": "d" * 400, "input_schema": closed} for number in range(23)]
    return {
        "model": "tiny",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>r</system-reminder>"}]},
            {"role": "system", "content": [{"type": "text", "text": "# Environment", **cached}]},
        ],
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.0b8; cc_entrypoint=sdk-cli;"},
            {"type": "text", "text": "You are an agent.", **cached},
            {"type": "text", "text": "\nYou work. " * 400, **cached},
        ],
        "tools": [*tools, {**tools[0], "name": "Deferred", "defer_loading": True, **cached}],
        "metadata": {"user_id": '{"device_id":"7","session_id":"f"}'},
        "max_tokens": 32_000,
        "temperature": 1,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }


async def test_the_first_request_of_claude_code_is_taken() -> None:
    door = Door("Hello.", max_model_len=1 << 17)
    response = await door.ask(
        claude_code_body(),
        "/v1/messages?beta=true",
        **{"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,effort-2025-11-24"},
    )
    assert response.status_code == 200, response.text
    events = events_of(response.text)
    assert events[-1]["type"] == "message_stop"
    assert "warnings" not in events[0]["message"]
    prompt = door.prompts[0]
    assert prompt.endswith("[user]<system-reminder>r</system-reminder>\n# Environment[assistantTrue]")
    assert "billing" not in prompt


async def test_tokens_are_counted_as_the_model_gets_them() -> None:
    door = Door("ok")
    body = {**HI, "system": [{"type": "text", "text": "be short"}], "tools": [TOOL], "thinking": {"type": "disabled"}}
    counted = await door.ask(body, "/v1/messages/count_tokens")
    await door.ask(body)
    assert counted.json() == {"input_tokens": len(door.backend.requests[0].prompt_token_ids)}
    del body["max_tokens"]
    assert (await door.ask(body, "/v1/messages/count_tokens")).json() == counted.json()


async def test_models_are_listed_for_both_kinds_of_clients() -> None:
    async with Door("ok").client() as client:
        listed = (await client.get("/v1/models?limit=1000")).json()
        assert (listed["object"], listed["has_more"], listed["first_id"], listed["last_id"]) == (
            *("list", False),
            *("tiny", "poet"),
        )
        model = (await client.get("/v1/models/tiny")).json()
        assert (model["type"], model["display_name"], model["object"]) == ("model", "tiny", "model")
        assert model["created_at"] == "2023-11-14T22:13:20+00:00"
        assert (await client.head("/")).status_code == 200


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


@pytest.mark.parametrize(
    ("fields", "status", "kind", "named"),
    [
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "bad", "content": "a"}]}, 400, "invalid_request_error", "role"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "invalid_request_error", "messages[0].content: a"),
        ({"messages": [{"role": "system", "content": ""}]}, 400, "invalid_request_error", "messages"),
        ({"chat_template_kwargs": [1]}, 400, "invalid_request_error", "chat_template_kwargs"),
        ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, 400, "invalid_request_error", "thinking"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"temprature": 1}, 400, "invalid_request_error", "temprature"),
        ({"temperature": "hot"}, 400, "invalid_request_error", "temperature"),
        ({"tools": [{"name": "x"}]}, 400, "invalid_request_error", "input_schema"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        ({"thinking": {"type": "on"}}, 400, "invalid_request_error", "thinking"),
        ({"model": "claude-opus-4-5"}, 404, "not_found_error", "claude-opus-4-5"),
    ],
)
async def test_what_is_wrong_is_named_in_anthropics_form(fields: Any, status: int, kind: str, named: str) -> None:
    response = await Door("ok").ask({**HI, **fields})
    answered = response.json()
    assert (response.status_code, answered["type"], answered["error"]["type"]) == (status, "error", kind)
    assert named in answered["error"]["message"]
    assert answered.keys() == {"type", "error", "request_id"}


async def test_an_aborted_answer_is_an_error() -> None:
    response = await Door("one", finish_reason=FinishReason.ABORT).ask(HI)
    assert (response.status_code, response.json()["error"]["type"]) == (500, "api_error")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "secret"}, 200),
        ({"Authorization": "Bearer secret"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({}, 401),
    ],
)
async def test_either_header_shows_a_key(headers: dict[str, str], status: int) -> None:
    keys = ApiKeys([hash_api_key("secret")])
    async with Door("ok").client(lambda app: ApiKeyMiddleware(app, keys)) as client:
        response = await client.post("/v1/messages", json=HI, headers=headers)
    assert response.status_code == status
    if status == 401:
        assert response.json()["error"]["type"] == "authentication_error"


async def test_what_is_not_there_is_said_in_anthropics_form() -> None:
    async with Door("ok").client() as client:
        assert (await client.get("/v1/messages")).json()["error"]["type"] == "invalid_request_error"
        unknown = await client.post("/v1/messages/batches", json={})
        broken = await client.post("/v1/messages", content=b"{")
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    assert broken.json()["error"]["message"].startswith("the body is not JSON")
