"""/v1/responses with OpenAI's own client: items, events, tools, and what is remembered."""

from __future__ import annotations

import json

import openai
import pytest

from fakes.backend import (
    BRACKETS,
    CALL_ARGUMENTS,
    CALL_TEMPLATES,
    build_tokenizer,
    calls_template,
)
from outrider.cluster.api.openai.response_store import ResponseStore
from outrider.cluster.common.errors import ResponseNotFound
from outrider.cluster.replies.reader import ReplySyntax
from outrider.verifier_service.messages.request import FinishReason, StructuredKind
from support.stack import Stack

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "weather", "parameters": PARAMETERS}


@pytest.fixture
def tokenizer():
    return build_tokenizer(BRACKETS)


def client_to(tokenizer, text, *, finish_reason=FinishReason.STOP, script=None):
    syntax = ReplySyntax(tool_call_parser="hermes", reasoning_parser="qwen3")
    options = {"tokenizer": tokenizer, "finish_reason": finish_reason, "max_model_len": 512}
    stack = Stack(script or text, api={"reply_syntax": syntax}, **options)
    return stack.openai(), stack


def prompt_of(tokenizer, request):
    return tokenizer.decode(request.prompt_token_ids)


async def test_text_in_text_out(tokenizer):
    client, backend = client_to(tokenizer, "größer")
    answer = await client.responses.create(
        model="tiny", input="fox", instructions="be short", max_output_tokens=40, temperature=0.5, metadata={"a": "b"}
    )
    assert answer.output_text == "größer"
    assert (answer.status, answer.object, answer.created_at) == ("completed", "response", 1_700_000_000)
    assert answer.id.startswith("resp_")
    assert answer.usage.output_tokens == len(tokenizer.encode("größer"))
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.metadata == {"a": "b"}
    (request,) = backend.requests
    assert prompt_of(tokenizer, request) == "[system]be short[user]fox[assistant]"
    assert (request.sampling.max_tokens, request.sampling.temperature) == (40, 0.5)


async def test_items_become_the_chat_that_they_stand_for(tokenizer):
    client, backend = client_to(tokenizer, "ok")
    await client.responses.create(
        model="tiny",
        input=[
            {"role": "developer", "content": "rules"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fox"}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"role": "assistant", "content": [{"type": "output_text", "text": "the"}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "dog"},
        ],
    )
    assert prompt_of(tokenizer, backend.requests[0]) == "[system]rules[user]fox[assistant]the[tool]dog[assistant]"


ITEMS_OF_CALL = [
    {"role": "user", "content": "fox"},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": CALL_ARGUMENTS},
]


@pytest.mark.parametrize("kind", CALL_TEMPLATES)
async def test_calls_made_before_are_written_in_the_templates_form(kind):
    body, written = CALL_TEMPLATES[kind]
    tokenizer = build_tokenizer(calls_template(body))
    client, backend = client_to(tokenizer, "ok")
    await client.responses.create(model="tiny", input=ITEMS_OF_CALL)
    assert prompt_of(tokenizer, backend.requests[0]) == f"[user]fox[assistant]{written}[assistant]"


async def test_arguments_that_no_template_can_walk_are_named():
    tokenizer = build_tokenizer(calls_template(CALL_TEMPLATES["walks"][0]))
    client, _ = client_to(tokenizer, "ok")
    user, call = ITEMS_OF_CALL
    named = r"input: tool_calls: function.arguments of 'weather' \(c1\) must be a JSON object"
    with pytest.raises(openai.BadRequestError, match=named) as refused:
        await client.responses.create(model="tiny", input=[user, call | {"arguments": "{"}])
    assert refused.value.param == "input"


async def test_calls_and_thoughts_are_items(tokenizer):
    client, backend = client_to(tokenizer, f"<think>hm</think>See.{CALL}")
    answer = await client.responses.create(model="tiny", input="fox", tools=[TOOL])
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    reasoning, message, call = answer.output
    assert reasoning.content[0].text == "hm"
    assert message.content[0].text == "See."
    assert (call.name, json.loads(call.arguments), call.status) == ("weather", {"city": "Rom"}, "completed")
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    assert backend.requests[0].sampling.structured.kind is StructuredKind.GRAMMAR


async def test_a_named_function_must_be_called(tokenizer):
    client, backend = client_to(tokenizer, CALL)
    choice = {"type": "function", "name": "weather"}
    await client.responses.create(model="tiny", input="fox", tools=[TOOL], tool_choice=choice)
    assert "TEXT" not in backend.requests[0].sampling.structured.text


async def test_the_answer_may_have_a_form(tokenizer):
    client, backend = client_to(tokenizer, "{}")
    form = {"type": "json_schema", "name": "n", "schema": PARAMETERS}
    await client.responses.create(model="tiny", input="fox", text={"format": form, "verbosity": "low"})
    await client.responses.create(model="tiny", input="fox", text={"format": {"type": "json_object"}})
    kinds = [request.sampling.structured.kind for request in backend.requests]
    assert kinds == [StructuredKind.JSON_SCHEMA, StructuredKind.JSON_OBJECT]


async def test_every_step_of_a_stream_is_named(tokenizer):
    client, _ = client_to(tokenizer, f"<think>hm</think>See.{CALL}")
    stream = await client.responses.create(model="tiny", input="fox", tools=[TOOL], stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    once = [kind for index, kind in enumerate(kinds) if index == 0 or kind != kinds[index - 1]]
    assert once == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == "See."
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(pieces) > 5
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    response = events[-1].response
    assert "".join(pieces) == done.arguments == response.output[-1].arguments == '{"city": "Rom"}'
    assert response.output_text == "See."
    assert response.output[-1].name == "weather"
    assert events[0].response.output == []


async def test_a_stream_can_be_gathered_by_the_client(tokenizer):
    client, _ = client_to(tokenizer, "one two")
    async with client.responses.stream(model="tiny", input="fox") as stream:
        final = await stream.get_final_response()
    assert final.output_text == "one two"


async def test_an_answer_goes_on_where_the_last_one_ended(tokenizer):
    client, backend = client_to(tokenizer, CALL)
    first = await client.responses.create(model="tiny", input="fox", instructions="be short", tools=[TOOL])
    outputs = [{"type": "function_call_output", "call_id": first.output[0].call_id, "output": "dog"}]
    second = await client.responses.create(model="tiny", input=outputs, previous_response_id=first.id)
    assert prompt_of(tokenizer, backend.requests[1]) == "[user]fox[assistant][tool]dog[assistant]"
    assert (await client.responses.retrieve(second.id)).previous_response_id == first.id
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as refused:
        await client.responses.create(model="tiny", input="a", previous_response_id=first.id)
    assert refused.value.param == "previous_response_id"


async def test_what_shall_not_be_stored_is_not(tokenizer):
    client, _ = client_to(tokenizer, "ok")
    answer = await client.responses.create(model="tiny", input="fox", store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(answer.id)


async def test_an_answer_that_is_cut_off_says_so(tokenizer):
    client, _ = client_to(tokenizer, "ok", finish_reason=FinishReason.LENGTH)
    answer = await client.responses.create(model="tiny", input="fox")
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_a_call_that_is_cut_off_is_incomplete_and_no_part_of_the_chat(tokenizer):
    client, backend = client_to(tokenizer, f"See.{CALL[:60]}", finish_reason=FinishReason.LENGTH)
    answer = await client.responses.create(model="tiny", input="fox", tools=[TOOL])
    assert answer.status == "incomplete"
    message, call = answer.output
    assert (message.status, call.status, call.arguments) == ("completed", "incomplete", CALL[45:60])
    await client.responses.create(model="tiny", input="go on", previous_response_id=answer.id)
    assert prompt_of(tokenizer, backend.requests[1]) == "[user]fox[assistant]See.[user]go on[assistant]"


async def test_several_calls_are_items_of_their_own(tokenizer):
    client, _ = client_to(tokenizer, f"{CALL}\n{CALL}")
    async with client.responses.stream(model="tiny", input="fox", tools=[TOOL]) as stream:
        done = [event async for event in stream if event.type == "response.function_call_arguments.done"]
        final = await stream.get_final_response()
    assert [(event.output_index, event.arguments) for event in done] == [(0, '{"city": "Rom"}'), (1, '{"city": "Rom"}')]
    assert [(item.status, item.arguments) for item in final.output] == [("completed", '{"city": "Rom"}')] * 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "message"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"type": "compaction"}]}, "input"),
        ({"input": [{"role": "bad", "content": 3}]}, "input"),
        ({"tools": [{"type": 3}]}, "tools"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"form": {}}}, "text"),
        ({"text": {"format": {"type": "x"}}}, "text"),
        ({"reasoning": {"efort": "low"}}, "reasoning"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "some"}, "truncation"),
        ({"top_k": "x"}, "top_k"),
        ({"temprature": 1}, "temprature"),
    ],
)
async def test_what_is_wrong_is_named(tokenizer, fields, param):
    client, _ = client_to(tokenizer, "ok")
    with pytest.raises(openai.BadRequestError) as refused:
        await client.post("/responses", body={"input": "fox", **fields}, cast_to=object)
    assert refused.value.param == param


def test_the_store_forgets_the_oldest():
    store = ResponseStore(max_responses=2)
    for name in ("a", "b"):
        store.put({"id": name}, [])
    store.get("a")
    store.put({"id": "c"}, [])
    assert len(store) == 2
    with pytest.raises(ResponseNotFound):
        store.get("b")
    assert store.get("a").response == {"id": "a"}


def test_the_store_is_bounded_in_bytes():
    store = ResponseStore(max_bytes=1000)
    for number in range(10):
        store.put({"id": str(number)}, [{"content": "x" * 300}])
    assert len(store) == 3
    store.put({"id": "huge"}, [{"content": "x" * 2000}])
    assert len(store) == 0
    store.put({"id": "again"}, [])
    store.remove("again")
    assert len(store) == 0
