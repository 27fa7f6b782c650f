"""What agents send back and beside: histories with other servers' fields, a first turn of Codex, fields of vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from fakes.backend import build_tokenizer
from outrider.cluster.replies.reader import ReplySyntax
from support.stack import Stack

TEMPLATE = (
    "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "[{{ m.role }}]{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}!{{ call.function.name }}:{{ call.function.arguments|tojson }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
ASKED = {"role": "user", "content": "fox"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


class Service:
    def __init__(self, text: str = "ok", **syntax: str) -> None:
        options = {"tokenizer": build_tokenizer(TEMPLATE), "max_model_len": 2048}
        stack = Stack(text, api={"reply_syntax": ReplySyntax(**syntax)}, **options)
        self.tokenizer, self.backend, self.http = stack.tokenizer, stack.backend, stack.client()

    async def ask(self, path: str, **body: Any) -> dict[str, Any]:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def chat(self, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
        return await self.ask("/v1/chat/completions", messages=list(messages), **fields)

    async def respond(self, **fields: Any) -> dict[str, Any]:
        return await self.ask("/v1/responses", **{"input": "fox", **fields})

    async def refusal(self, path: str, **body: Any) -> dict[str, Any]:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]

    @property
    def prompt(self) -> str:
        return self.tokenizer.decode(self.backend.requests[-1].prompt_token_ids)


@pytest.fixture
def service():
    return Service()


PASSED_OVER = {
    "reasoning_details": [{"type": "reasoning.text", "text": "x"}],
    "thinking_blocks": [{"type": "thinking", "thinking": "x"}],
    "cache_control": {"type": "ephemeral"},
    "provider_specific_fields": {"a": 1},
    "id": "m",
    "annotations": [{"type": "url_citation"}],
    "anything_else": True,
}


@pytest.mark.parametrize("name", PASSED_OVER)
async def test_what_a_message_has_besides_is_passed_over_and_named(service, name):
    answer = await service.chat({"role": "assistant", "content": "a", name: PASSED_OVER[name]}, ASKED)
    assert service.prompt == "[assistant]a[user]fox[assistant]"
    assert answer["warnings"] == [f"messages: passed over: {name}"]


@pytest.mark.parametrize(
    "name", ["audio", "refusal", "annotations", "function_call", "tool_calls", "reasoning", "name"]
)
@pytest.mark.parametrize("value", [None, [], {}, ""])
async def test_what_says_nothing_is_taken_without_a_word(service, name, value):
    if name in ("name", "tool_calls") and value != ([] if name == "tool_calls" else ""):
        value = None
    answer = await service.chat({"role": "assistant", "content": "a", name: value}, ASKED)
    assert "warnings" not in answer


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": "a", "reasoning": "x"}, "(x)a"),
        ({"content": "a", "reasoning_content": "x"}, "(x)a"),
        ({"content": "a", "reasoning_content": "x", "reasoning": "x"}, "(x)a"),
        ({"content": [{"type": "thinking", "thinking": "x", "signature": "s"}, {"type": "text", "text": "a"}]}, "(x)a"),
        ({"content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}]}, "a"),
        ({"content": None}, ""),
        ({"content": ""}, ""),
        ({"content": []}, ""),
        ({}, ""),
        ({"content": ["a", "b"]}, "ab"),
        ({"content": None, "refusal": "no"}, "no"),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        ({"content": [{"type": "output_text", "text": "a", "annotations": []}]}, "a"),
        ({"content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}, "a"),
        ({"content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}, '!f:{"a": 1}'),
        ({"tool_calls": [{"id": "c", "index": 0, "function": {"name": "f", "arguments": {"a": 1}}}]}, '!f:{"a": 1}'),
        ({"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": ""}}]}, "!f:{}"),
        ({"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": None}}]}, "!f:{}"),
        ({"tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "p", "input": "x"}}]}, '!p:{"input": "x"}'),
    ],
)
async def test_an_earlier_answer_reaches_the_template_whatever_its_form(service, message, text):
    await service.chat({"role": "assistant", **message}, ASKED)
    assert service.prompt == f"[assistant]{text}[user]fox[assistant]"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "a"}], "name": "f"}, "[tool]a"),
        ({"role": "tool", "tool_call_id": "c", "content": None}, "[tool]"),
        ({"role": "function", "name": "f", "content": "a"}, "[tool]a"),
        ({"role": "developer", "content": "a"}, "[system]a"),
    ],
)
async def test_other_messages_reach_it_too(service, message, text):
    await service.chat(message, ASKED)
    assert service.prompt == f"{text}[user]fox[assistant]"


@pytest.mark.parametrize(
    "kind", ["image_url", "input_audio", "file", "video_url", "tool_use", None, ["text"], {"text": 1}]
)
async def test_a_part_that_the_model_would_miss_is_refused_by_name(service, kind):
    error = await service.refusal("/v1/chat/completions", messages=[{"role": "user", "content": [{"type": kind}]}])
    assert error["param"] == "messages"
    assert repr(kind) in error["message"]


@pytest.mark.parametrize("kind", [["reasoning"], {"a": 1}, 7])
async def test_an_item_whose_type_is_no_text_is_refused_by_name(service, kind):
    error = await service.refusal("/v1/responses", input=[{"type": kind, "content": "a"}])
    assert error["param"] == "input"
    assert f"input[0].type {kind!r}" in error["message"]


UNKNOWN = {
    "reasoning": {"effort": "low"},
    "enable_thinking": True,
    "provider": {"order": ["a"]},
    "extra_headers": {"a": 1},
}


@pytest.mark.parametrize("name", UNKNOWN)
async def test_a_field_that_is_unknown_is_passed_over_and_named(service, name):
    answer = await service.chat(ASKED, **{name: UNKNOWN[name]})
    assert answer["warnings"] == [f"{name}: unknown here, passed over"]


HARMLESS = {
    "top_logprobs": 0,
    "client_metadata": {"a": "b"},
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "service_tier": "auto",
    "verbosity": "low",
    "store": False,
    "parallel_tool_calls": True,
    "stream_options": {"include_obfuscation": False, "something_new": 1},
    "spaces_between_special_tokens": False,
    "vllm_xargs": {"a": 1},
    "add_special_tokens": False,
}


@pytest.mark.parametrize("name", HARMLESS)
async def test_a_field_that_changes_nothing_is_taken_without_a_word(service, name):
    assert "warnings" not in await service.chat(ASKED, **{name: HARMLESS[name]})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temprature", 1),
        ("top_a", 0.5),
        ("max_new_tokens", 5),
        ("ebnf", "x"),
        ("prompt", "a"),
        ("typical_p", 0.5),
        ("speculative_prefill", True),
    ],
)
async def test_what_would_change_the_answer_is_refused_by_name(service, name, value):
    assert (await service.refusal("/v1/chat/completions", messages=[ASKED], **{name: value}))["param"] == name


@pytest.mark.parametrize(
    ("path", "body", "default"),
    [("/v1/chat/completions", {"messages": [ASKED]}, False), ("/v1/completions", {"prompt": "fox"}, True)],
)
async def test_special_tokens_are_added_where_they_are_asked_for(service, path, body, default):
    processor = TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 0)])
    service.tokenizer._tokenizer.post_processor = processor
    for asked in (None, True, False):
        await service.ask(path, **body, add_special_tokens=asked)
        assert service.prompt.startswith("<|start|>") == (default if asked is None else asked)


async def test_a_context_that_is_too_short_is_told_in_the_words_that_agents_look_for(service):
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "fox " * 3000}]}),
        ("/v1/completions", {"prompt": "fox " * 3000}),
        ("/v1/completions", {"prompt": [5] * 2048}),
        ("/v1/responses", {"input": "fox " * 200_000}),
    ):
        error = await service.refusal(path, **body)
        assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
        assert "maximum context length is 2048 tokens" in error["message"]
        assert error["param"] == ("input" if "input" in body else "prompt" if "prompt" in body else "messages")
        assert error["message"].startswith(error["param"])


async def test_an_answer_may_be_as_long_as_the_context_has_room(service):
    answer = await service.chat(ASKED, max_tokens=32_000)
    (request,) = service.backend.requests
    num_free = 2048 - len(request.prompt_token_ids)
    assert request.sampling.max_tokens == num_free
    assert answer["warnings"] == [f"max_tokens: the context has room for {num_free} tokens after this prompt"]
    answer = await service.respond(max_output_tokens=32_000)
    assert answer["warnings"] == [f"max_output_tokens: the context has room for {num_free} tokens after this prompt"]


async def test_tokens_may_be_the_only_ones_allowed(service):
    await service.chat(ASKED, allowed_token_ids=[7, 9])
    assert service.backend.requests[0].sampling.allowed_token_ids == (7, 9)
    for wrong in ([], [10_000], [-1]):
        error = await service.refusal("/v1/chat/completions", messages=[ASKED], allowed_token_ids=wrong)
        assert error["param"] == "allowed_token_ids"


async def test_sixteen_stops_are_taken_and_no_more(service):
    stops = [f"s{index}" for index in range(17)]
    await service.chat(ASKED, stop=stops[:16])
    assert (await service.refusal("/v1/chat/completions", messages=[ASKED], stop=stops))["param"] == "stop"


CODEX = {
    "instructions": "X",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Y"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    ],
    "tools": [
        {"type": "function", "name": "f", "strict": False, "parameters": {"type": "object", "properties": {}}},
        {"type": "web_search", "external_web_access": True},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "text": {"verbosity": "low"},
    "client_metadata": {"a": "b"},
}


async def test_a_first_turn_of_codex_is_taken():
    service = Service(tool_call_parser="hermes")
    answer = await service.respond(**CODEX)
    assert answer["status"] in ("completed", "incomplete")
    assert service.prompt == "<f>[system]X\n\nY[user]hi[assistant]"
    assert answer["warnings"] == [
        "include: not served here: reasoning.encrypted_content",
        "tools: left out, since only functions are served here: web_search, custom",
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"include": ["message.output_text.logprobs"]},
        {"tools": [{"type": "web_search"}]},
        {"truncation": "auto"},
        {"truncation": "disabled"},
        {"client_metadata": {}},
        {"stream_options": {"include_obfuscation": False}},
        {"top_logprobs": 0},
        {"max_tool_calls": 3},
        {"metadata": {"a": 1}},
        {"text": {"verbosity": "low", "something": 1}},
        {"reasoning": {"effort": None, "context": "auto"}},
        {"something_new": {"a": 1}},
        {"prompt_cache_retention": "24h", "safety_identifier": "s", "service_tier": "auto", "user": "u"},
    ],
)
async def test_each_field_of_a_first_turn_is_taken_alone(service, fields):
    await service.respond(**fields)
    assert service.prompt == "[user]fox[assistant]"


CALLS: list[tuple[dict[str, Any], str]] = [
    ({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, "[assistant]!f:{}"),
    ({"type": "function_call", "call_id": "c", "name": "f", "arguments": ""}, "[assistant]!f:{}"),
    ({"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "x"}, '[assistant]!p:{"input": "x"}'),
    (
        {
            "type": "local_shell_call",
            "call_id": "c",
            "action": {"type": "exec", "command": ["ls"]},
            "status": "completed",
        },
        '[assistant]!local_shell:{"type": "exec", "command": ["ls"]}',
    ),
    ({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a"}]}, "[tool]a"),
    ({"type": "custom_tool_call_output", "call_id": "c", "output": "a"}, "[tool]a"),
    ({"type": "local_shell_call_output", "id": "c", "output": "a"}, "[tool]a"),
    ({"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a"}]}, '[tool][{"stdout": "a"}]'),
    (
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "x"}], "encrypted_content": "e"},
        "",
    ),
    ({"type": "web_search_call", "id": "w", "status": "completed"}, ""),
    ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "[assistant]no"),
    ({"role": "assistant", "content": None, "phase": "commentary"}, "[assistant]"),
    ({"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": "a"}, "[assistant]a"),
]


@pytest.mark.parametrize(("item", "text"), CALLS)
async def test_items_of_an_earlier_turn_are_read(service, item, text):
    answer = await service.respond(input=[ASKED, item, {"role": "user", "content": "dog"}])
    assert service.prompt == f"[user]fox{text}[user]dog[assistant]"
    passed_over = [warning for warning in answer.get("warnings", ()) if warning.startswith("input: passed over")]
    assert len(passed_over) == (item.get("type") == "web_search_call")


@pytest.mark.parametrize(
    "part", [{"type": "input_image", "image_url": "data:x"}, {"type": "input_file"}, {"type": "input_audio"}]
)
@pytest.mark.parametrize("place", ["content", "output"])
async def test_an_item_that_the_model_would_miss_is_refused_by_name(service, part, place):
    item = {"role": "user", "content": [part]}
    if place == "output":
        item = {"type": "function_call_output", "call_id": "c", "output": [part]}
    error = await service.refusal("/v1/responses", input=[item])
    assert error["param"] == "input"
    assert repr(part["type"]) in error["message"]


async def test_a_reference_stands_for_an_item_that_was_answered(service):
    first = await service.respond()
    (item,) = first["output"]
    reference = {"type": "item_reference", "id": item["id"]}
    await service.respond(input=[ASKED, reference, {"role": "user", "content": "dog"}])
    assert service.prompt == "[user]fox[assistant]ok[user]dog[assistant]"
    await service.http.delete(f"/v1/responses/{first['id']}")
    missing = await service.http.post("/v1/responses", json={"input": [reference]})
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "input")
