"""Tools and thoughts over HTTP: a scripted model that calls, read by OpenAI's own client."""

from __future__ import annotations

import json

import openai
import pytest

from fakes.backend import (
    BRACKETS,
    CALL_ARGUMENTS,
    CALL_TEMPLATES,
    FakeBackend,
    build_tokenizer,
    calls_template,
    chat_of_call,
    says,
)
from outrider.cluster.replies.reader import ReplySyntax
from outrider.verifier_service.messages.request import FinishReason, StructuredKind
from support.stack import Stack

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "größer"}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASKED = [{"role": "user", "content": "fox"}]
TEMPLATE = (
    "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}!{{ call.function.name }}:{{ call.function.arguments.city }}{% endfor %}"
    "{% endfor %}{{ effort_mark }}{{ reasoning_effort }}{% if add_generation_prompt %}[assistant]{% endif %}"
)
HERMES = ReplySyntax(tool_call_parser="hermes", reasoning_parser="qwen3")


@pytest.fixture
def tokenizer():
    return build_tokenizer(TEMPLATE)


def backend_that_says(tokenizer, text, finish_reason=FinishReason.STOP):
    return FakeBackend(lambda _: says(tokenizer, text), finish_reason=finish_reason)


def client_to(backend, tokenizer, syntax=HERMES):
    return Stack(backend, tokenizer=tokenizer, max_model_len=512, api={"reply_syntax": syntax}).openai()


async def test_a_call_is_no_content(tokenizer):
    backend = backend_that_says(tokenizer, f"<think>\nhm\n</think>\nSee.\n{CALL}")
    async with client_to(backend, tokenizer) as client:
        answer = await client.chat.completions.create(model="tiny", messages=ASKED, tools=[TOOL])
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content, choice.message.model_extra["reasoning_content"]) == ("See.", "hm")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "größer"}
    assert call.id.startswith("call_")
    num_thought = answer.usage.completion_tokens_details.reasoning_tokens
    assert len(tokenizer.encode("\nhm\n")) < num_thought < len(tokenizer.encode("<think>\nhm\n</think>"))


async def test_a_stream_brings_the_same(tokenizer):
    backend = backend_that_says(tokenizer, f"<think>\nhm\n</think>\nSee.\n{CALL}\n{CALL}")
    async with client_to(backend, tokenizer) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=ASKED, tools=[TOOL], stream=True, stream_options={"include_usage": True}
        )
        events = [event async for event in stream]
    deltas = [event.choices[0].delta for event in events if event.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "See."
    assert "".join((delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas) == "hm"
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    named = [call for call in calls if call.function.name is not None]
    assert [(call.index, call.type, call.function.name) for call in named] == [
        (index, "function", "weather") for index in (0, 1)
    ]
    assert len({call.id for call in named}) == 2
    for index, first in enumerate(named):
        pieces = [call for call in calls if call.index == index]
        assert pieces[0] is first
        assert len(pieces) > 5
        assert "".join(call.function.arguments for call in pieces) == '{"city": "größer"}'
    assert events[-2].choices[0].finish_reason == "tool_calls"
    assert events[-1].usage.completion_tokens_details.reasoning_tokens > 0
    # nothing is sent for what is held back: marks and what stands around arguments
    assert len(events) < len(tokenizer.encode(f"<think>\nhm\n</think>\nSee.\n{CALL}"))


async def test_tools_reach_the_template_and_answers_go_back_into_it(tokenizer):
    backend = backend_that_says(tokenizer, "ok")
    async with client_to(backend, tokenizer) as client:
        await client.chat.completions.create(
            model="tiny",
            messages=[
                *ASKED,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "call_1",
                            "type": "function",
                            "function": {"name": "weather", "arguments": '{"city": "Rom"}'},
                        }
                    ],
                },
                {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
            ],
            tools=[TOOL],
            reasoning_effort="low",
            extra_body={"chat_template_kwargs": {"effort_mark": "#"}},
        )
    prompt = tokenizer.decode(backend.requests[0].prompt_token_ids)
    assert prompt == "<weather>[user]fox[assistant]!weather:Rom[tool]sunny#low[assistant]"


@pytest.mark.parametrize("kind", CALL_TEMPLATES)
@pytest.mark.parametrize("arguments", [CALL_ARGUMENTS, json.loads(CALL_ARGUMENTS)])
async def test_calls_made_before_are_written_in_whichever_form_they_come(kind, arguments):
    body, written = CALL_TEMPLATES[kind]
    tokenizer = build_tokenizer(calls_template(body))
    backend = backend_that_says(tokenizer, "ok")
    async with client_to(backend, tokenizer) as client:
        fields = {"messages": chat_of_call(arguments)}
        await client.post("/chat/completions", body=fields, cast_to=object)
        tokenized = await client.post("http://gateway/tokenize", body=fields, cast_to=dict)
    prompts = [tokenizer.decode(ids) for ids in (backend.requests[0].prompt_token_ids, tokenized["tokens"])]
    assert prompts == [f"[user]fox[assistant]{written}[assistant]"] * 2


@pytest.mark.parametrize("arguments", ['{"city', "[1]", [1], '{"city": "\\ud800"}'])
async def test_arguments_that_are_no_object_are_named_where_the_template_walks_them(arguments):
    tokenizer = build_tokenizer(calls_template(CALL_TEMPLATES["walks"][0]))
    async with client_to(backend_that_says(tokenizer, "ok"), tokenizer) as client:
        named = r"messages: tool_calls: function.arguments of 'weather' \(c1\) must be a JSON object"
        with pytest.raises(openai.BadRequestError, match=named) as refused:
            await client.post("/chat/completions", body={"messages": chat_of_call(arguments)}, cast_to=object)
    assert refused.value.param == "messages"


async def test_arguments_that_are_joined_as_text_stay_as_they_are():
    tokenizer = build_tokenizer(calls_template(CALL_TEMPLATES["joins"][0]))
    backend = backend_that_says(tokenizer, "ok")
    async with client_to(backend, tokenizer) as client:
        for arguments in ('{"city', '{ "city":"Rom"}', "", None, [1]):
            await client.post("/chat/completions", body={"messages": chat_of_call(arguments)}, cast_to=object)
    prompts = [tokenizer.decode(request.prompt_token_ids) for request in backend.requests]
    written = ['{"city', '{ "city":"Rom"}', "", "{}", "[1]"]
    assert prompts == [f"[user]fox[assistant]!{text}[assistant]" for text in written]


async def test_what_must_be_called_is_held_to_its_form(tokenizer):
    backend = backend_that_says(tokenizer, '[{"name": "weather", "arguments": {"city": "Rom"}}]')
    async with client_to(backend, tokenizer, syntax=None) as client:
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            answer = await client.chat.completions.create(
                model="tiny", messages=ASKED, tools=[TOOL], tool_choice=choice
            )
            assert answer.choices[0].message.tool_calls[0].function.arguments == '{"city": "Rom"}'
    for request in backend.requests:
        assert request.sampling.structured.kind is StructuredKind.GRAMMAR
        assert "%json" in request.sampling.structured.text


@pytest.mark.parametrize("tool_choice", ["none", "auto"])
async def test_without_a_parser_text_stays_text(tokenizer, tool_choice):
    backend = backend_that_says(tokenizer, CALL)
    async with client_to(backend, tokenizer, syntax=None) as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=ASKED, tools=[TOOL], tool_choice=tool_choice
        )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (CALL, "stop")
    assert backend.requests[0].sampling.structured is None


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("finish_reason", [FinishReason.LENGTH, FinishReason.STOP])
@pytest.mark.parametrize("cut", [30, 47, 55, 68, 72])
async def test_a_call_that_is_cut_off_keeps_its_arguments_so_far(tokenizer, cut, finish_reason, is_streamed):
    backend = backend_that_says(tokenizer, CALL[:cut], finish_reason)
    begin = CALL.index('{"city"')
    async with client_to(backend, tokenizer) as client:
        if is_streamed:
            async with client.chat.completions.stream(model="tiny", messages=ASKED, tools=[TOOL]) as stream:
                events = [event.chunk.choices[0] async for event in stream if event.type == "chunk"]
            content = "".join(event.delta.content or "" for event in events)
            calls = [call for event in events for call in event.delta.tool_calls or []]
            reason = events[-1].finish_reason
        else:
            answer = await client.chat.completions.create(model="tiny", messages=ASKED, tools=[TOOL])
            (choice,) = answer.choices
            content, calls = choice.message.content or "", choice.message.tool_calls or []
            reason = choice.finish_reason
    if cut <= begin:  # it is not certain yet that this is a call
        assert (content, calls, reason) == (CALL[:cut], [], finish_reason.value)
        return
    arguments = CALL[begin : min(cut, CALL.index("}\n<"))]
    assert ("".join(call.function.arguments for call in calls), content) == (arguments, "")
    is_whole = arguments.endswith("}")
    assert reason == ("tool_calls" if is_whole and finish_reason is FinishReason.STOP else finish_reason.value)


async def test_the_clients_own_stream_gathers_the_arguments(tokenizer):
    backend = backend_that_says(tokenizer, f"{CALL}\n{CALL}")
    async with (
        client_to(backend, tokenizer) as client,
        client.chat.completions.stream(model="tiny", messages=ASKED, tools=[TOOL]) as stream,
    ):
        done = [event async for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = await stream.get_final_completion()
    assert [(event.name, event.index, event.arguments) for event in done] == [
        ("weather", index, '{"city": "größer"}') for index in (0, 1)
    ]
    calls = final.choices[0].message.tool_calls
    assert [call.function.arguments for call in calls] == ['{"city": "größer"}'] * 2


async def test_special_tokens_are_read_and_never_shown(tokenizer):
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    backend = backend_that_says(tokenizer, '[TOOL_CALLS][{"name": "weather", "arguments": {}}]')
    async with client_to(backend, tokenizer, ReplySyntax(tool_call_parser="mistral")) as client:
        answer = await client.chat.completions.create(model="tiny", messages=ASKED, tools=[TOOL])
    assert answer.choices[0].message.tool_calls[0].function.name == "weather"
    assert answer.choices[0].message.content is None
    assert "<[" in backend.requests[0].sampling.structured.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": [TOOL | {"type": 3}]}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages"),
    ],
)
async def test_what_is_wrong_is_named(tokenizer, fields, param):
    backend = backend_that_says(tokenizer, "ok")
    async with client_to(backend, tokenizer) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.post("/chat/completions", body={"messages": ASKED, **fields}, cast_to=object)
    assert refused.value.param == param


@pytest.mark.parametrize("family", ["hermes", "pythonic", "qwen3_coder"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": "strnig"}}},
        {"properties": {"a": 3}},
        {"properties": ["a"]},
        {"properties": {"a": {}}, "required": 3},
        {"properties": {"a": {"anyOf": 3}}, "required": ["a"]},
        {"properties": {"a": {"enum": 3}}, "required": ["a"]},
        {"properties": {"a": {"type": ["string", 3]}}, "required": ["a"]},
        {"properties": {"a": {"type": "string", "minLength": "x"}}, "required": ["a"]},
        {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": 3}, "required": ["a"]},
    ],
)
async def test_parameters_that_no_grammar_can_follow_are_left_out_unless_they_are_strict(tokenizer, family, parameters):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    asked = {"model": "tiny", "messages": ASKED, "tool_choice": "required"}
    async with client_to(backend_that_says(tokenizer, "ok"), tokenizer, ReplySyntax(tool_call_parser=family)) as client:
        answer = await client.chat.completions.create(**asked, tools=[tool])
        tool["function"]["strict"] = True
        with pytest.raises(openai.BadRequestError, match=r"no answer can follow: f: .+ of /.*: .+") as refused:
            await client.chat.completions.create(**asked, tools=[tool])
    assert answer.model_extra["warnings"][0].startswith("tools: the answer may break ")
    assert refused.value.param == "tools"


async def test_parameters_of_any_sense_cost_no_answer(tokenizer):
    syntax = ReplySyntax(tool_call_parser="qwen3_coder")
    schemas = [
        {"enum": []},
        {"type": []},
        {"anyOf": []},
        {"$ref": "#"},
        {"type": "string", "maxLength": -1},
        {"const": None},
    ]
    async with client_to(backend_that_says(tokenizer, "ok"), tokenizer, syntax) as client:
        for schema in schemas:
            tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
            answer = await client.chat.completions.create(model="tiny", messages=ASKED, tools=[tool])
            assert answer.choices[0].message.content == "ok"


async def test_a_message_may_be_continued():
    tokenizer = build_tokenizer(BRACKETS)
    backend = backend_that_says(tokenizer, "ok")
    messages = [*ASKED, {"role": "assistant", "content": "the"}]
    async with client_to(backend, tokenizer) as client:
        await client.chat.completions.create(
            model="tiny", messages=messages, extra_body={"continue_final_message": True}
        )
    assert tokenizer.decode(backend.requests[0].prompt_token_ids) == "[user]fox[assistant]the"
