"""What holds at every door: fields reach the engine, answers and streams say the same, errors name their field."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from typing import Any

import pytest

from fakes.backend import EOS, FakeBackend
from outrider.cluster.common.api_keys import ApiKeys, hash_api_key
from outrider.cluster.common.errors import Overloaded, RequestFailed, Unavailable
from outrider.cluster.gateway.rollout_memory import RolloutMemory
from outrider.verifier_service.messages.request import (
    AcceptanceRule,
    FinishReason,
    LogitBias,
    RequestOutput,
    SamplingParams,
    StructuredKind,
    StructuredOutput,
)
from support.doors import DOORS, HTTP_DOORS, SERVED_DOORS, Call, Door, GrpcDoor, Refused, Sglang
from support.stack import Stack
from support.waiting import until

TEXT = "größer 日本"
STREAM, WHOLE = Call(stream=True), Call()
CALLS = {"stream": STREAM, "whole": WHOLE}
# exact in single precision
SAME = {
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.75,
    "min_p": 0.25,
    "seed": 7,
    "ignore_eos": True,
    "min_tokens": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "max_tokens": 9,
    "logprobs": 1,
    "prompt_logprobs": 2,
    "num_speculative_tokens": 3,
    "logprobs_mode": "processed_logprobs",
}
TRANSLATED = {  # a field, and what the engine gets
    "logit_bias": ({7: 2.0}, (LogitBias(token_id=7, bias=2.0),)),
    "stop_token_ids": ([9], (9,)),
    "allowed_token_ids": ([5, 6, 7, 9], (5, 6, 7, 9)),
    "bad_words": (["dog"], None),
}
MESSAGE = {"priority": -3, "target_inter_token_ms": 20.5, "session_id": "s", "cache_salt": "salt"}
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}}
FORMS = {
    "json_schema": (SCHEMA, StructuredOutput(kind=StructuredKind.JSON_SCHEMA, text=json.dumps(SCHEMA))),
    "json_object": (True, StructuredOutput(kind=StructuredKind.JSON_OBJECT)),
    "regex": ("a+", StructuredOutput(kind=StructuredKind.REGEX, text="a+")),
    "grammar": ('start: "a"', StructuredOutput(kind=StructuredKind.GRAMMAR, text='start: "a"')),
    "choice": (["a", "b"], StructuredOutput(kind=StructuredKind.CHOICE, choices=("a", "b"))),
}
LENIENT = {"type": "array", "uniqueItems": True}
KEYS = ApiKeys([hash_api_key("plain"), f"{hash_api_key('salted')}:salted"])

every_door = pytest.mark.parametrize("door", DOORS, ids=repr)
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def of_doors(*needs: str, doors: tuple[Door, ...] = DOORS, shows: str = "") -> Any:
    """Parametrize over the doors that have these fields and show this."""
    fitting = [door for door in doors if door.has(*needs) and (not shows or shows in door.shows)]
    return pytest.mark.parametrize("door", fitting, ids=repr)


def rollout_stack(door: Door, *played: Any, **options: Any) -> Stack:
    """Return a stack that has the door: some are for rollouts alone."""
    return in_rollouts(*played, **options) if door.name in ("sglang", "vllm-http") else Stack(*played, **options)


def in_rollouts(*played: Any, **options: Any) -> Stack:
    return Stack(*played, rollouts=True, memory=RolloutMemory(), **options)


# --- what goes in ---


@every_door
async def test_every_sampling_field_reaches_the_engine(door: Door):
    stack = rollout_stack(door)
    same = {name: value for name, value in SAME.items() if door.has(name)}
    same |= {"prompt_logprobs": 1} if isinstance(door, Sglang) else {}  # it has one number for both
    own = {name: value for name, (value, _) in TRANSLATED.items() if door.has(name)}
    await door.send(stack, **same, **own)
    words = tuple(tuple(stack.tokenizer.encode(text)) for text in ("dog", " dog"))
    expected = {name: words if name == "bad_words" else TRANSLATED[name][1] for name in own}
    assert stack.requests[0].sampling == SamplingParams(**same, **expected)


@pytest.mark.parametrize(
    ("door", "name"),
    [(door, name) for door in SERVED_DOORS for name in MESSAGE if door.has(name)],
    ids=lambda value: repr(value) if isinstance(value, Door) else value,
)
async def test_every_field_of_a_request_reaches_the_engine(door: Door, name: str):
    stack = rollout_stack(door)
    await door.send(stack, **{name: MESSAGE[name]})
    await door.send(stack)
    given, plain = stack.requests
    assert getattr(given, name) == MESSAGE[name]
    assert getattr(plain, name) == {"priority": 0, "cache_salt": ""}.get(name)


@every_door
async def test_what_is_not_given_takes_the_defaults(door: Door):
    stack = rollout_stack(door)
    await door.send(stack)
    (request,) = stack.requests
    sampling = dataclasses.replace(request.sampling, max_tokens=16)
    assert sampling == SamplingParams()
    fixed = {"completions": 16, "LLM": 16, "grpc": 16, "messages": 40}.get(door.name)  # of Messages: must be given
    rest = 64 - len(request.prompt_token_ids)
    assert request.sampling.max_tokens == (fixed or rest)


@of_doors("temperature", "seed")
async def test_a_given_zero_is_no_default(door: Door):
    stack = rollout_stack(door)
    await door.send(stack, temperature=0.0, seed=0)
    assert (stack.requests[0].sampling.temperature, stack.requests[0].sampling.seed) == (0.0, 0)


@pytest.mark.parametrize(
    ("door", "kind"),
    [(door, kind) for door in DOORS for kind in FORMS if kind in door.forms],
    ids=lambda value: repr(value) if isinstance(value, Door) else value,
)
async def test_structured_output_reaches_the_engine(door: Door, kind: str):
    described, expected = FORMS[kind]
    stack = rollout_stack(door)
    await door.send(stack, form=(kind, described))
    await door.send(stack)
    formed, free = (request.sampling.structured for request in stack.requests)
    assert (formed.kind, formed.choices, free) == (expected.kind, expected.choices, None)
    assert formed.text == expected.text or json.loads(formed.text) == SCHEMA


@of_doors("prediction")
async def test_a_prediction_reaches_the_engine(door: Door):
    stack = Stack()
    await door.send(stack, prediction="the fox")
    assert stack.requests[0].prediction_token_ids == tuple(stack.tokenizer.encode("the fox"))


@of_doors("rejection_sample_method")
async def test_a_rule_reaches_the_engine(door: Door):
    stack = rollout_stack(door)
    await door.send(stack, rejection_sample_method="block")
    assert stack.requests[0].sampling.acceptance is AcceptanceRule.BLOCK


@of_doors("history_key", "store", doors=SERVED_DOORS)
async def test_in_rollouts_a_history_is_named_and_can_be_declined(door: Door):
    stack = in_rollouts()
    for fields in ({}, {"history_key": "k"}, {"history_key": "k", "store": True}, {"store": False}):
        await door.send(stack, **fields)
    assert [request.history_key for request in stack.requests] == [None, "k", "k", ""]
    with pytest.raises(Refused) as refused:
        await door.send(stack, history_key="k" * 129)
    assert (refused.value.status, refused.value.text.split()[0]) == (400, "history_key")


@of_doors("history_key", doors=tuple(door for door in SERVED_DOORS if door.name not in ("sglang", "vllm-http")))
async def test_out_of_rollouts_a_history_is_refused(door: Door):
    with pytest.raises(Refused) as refused:
        await door.send(Stack(), history_key="k")
    assert (refused.value.status, refused.value.text.split()[0]) == (400, "history_key")


# --- what comes out ---


@every_call
@every_door
async def test_tokens_text_and_usage_are_those_of_the_engine(door: Door, call: Call):
    stack = rollout_stack(door, TEXT, tells_cached=True)
    message = await door.send(stack, call, max_tokens=40)
    (shown,) = message.choices
    ids, num_prompt = stack.tokenizer.encode(TEXT), len(stack.requests[0].prompt_token_ids)
    assert shown.text == (TEXT if "text" in door.shows else None)
    assert shown.token_ids == (ids if "token_ids" in door.shows else None)
    assert message.usage in ((num_prompt, len(ids)), None)
    assert call.stream or message.usage is not None
    assert shown.finish in ("length", "incomplete", "max_tokens", "model_context_window_exceeded")


class LateFirstChoice(FakeBackend):
    """Play the first choice only once another has ended."""

    async def generate(self, request: Any, hear: Any) -> None:
        if request.sampling.choice_index == 0:
            await self.until_waiting(1)
        await FakeBackend.generate(self, request, hear)
        self.num_waiting += 1
        self.waiting.set()


@every_call
@of_doors("n")
async def test_choices_come_in_order_with_ids_and_noise_of_their_own(door: Door, call: Call):
    ids = {index: [5 + index, 6 + index] for index in range(3)}
    late = LateFirstChoice(lambda request: [[id_] for id_ in ids[request.sampling.choice_index]])
    stack = rollout_stack(door, late)
    message = await door.send(stack, call, n=3, seed=7)
    assert [shown.token_ids for shown in message.choices] == list(ids.values())
    assert message.usage in ((len(stack.requests[0].prompt_token_ids), 6), None)
    assert len({request.request_id for request in stack.requests}) == 3
    assert {request.sampling.seed for request in stack.requests} == {7}


SHAPES: list[tuple[dict[str, Any], str, int]] = [  # fields, the text, and how many tokens of it and EOS
    ({}, "ab=b=", 6),
    ({"stop": "b="}, "a", 3),
    ({"stop": ["b=", "zz"], "include_stop": True}, "ab=", 3),
    ({"stop": "b=", "min_tokens": 3}, "ab=", 5),
    ({"skip_special_tokens": False}, f"ab=b={EOS}", 6),
    ({"echo": True}, "theab=b=", 6),
    ({"echo": True, "stop": "b="}, "thea", 3),
]


@every_call
@pytest.mark.parametrize(
    ("door", "fields", "text", "num_tokens"),
    [(door, *shape) for door in DOORS for shape in SHAPES if door.has(*shape[0])],
)
async def test_what_is_shown_of_the_text(door: Door, fields: dict[str, Any], text: str, num_tokens: int, call: Call):
    stack = rollout_stack(door)
    ids = [*stack.tokenizer.encode("ab=b="), stack.tokenizer.eos_token_id]
    stack.backend.script = lambda _: [ids[:2], ids[2:]]
    (shown,) = (await door.send(stack, call, **fields)).choices
    assert shown.text == (text if "text" in door.shows else None)
    assert shown.token_ids == (ids[:num_tokens] if "token_ids" in door.shows else None)


@every_call
@of_doors("logprobs", "prompt_logprobs", shows="logprobs")
async def test_log_probabilities_stand_beside_their_tokens(door: Door, call: Call):
    stack = rollout_stack(door, [[5, 6], [7]])
    (shown,) = (await door.send(stack, call, logprobs=1, prompt_logprobs=1)).choices
    assert (shown.token_ids, shown.logprobs) == ([5, 6, 7], [-1.5] * 3)
    (plain,) = (await door.send(stack, call)).choices
    assert plain.logprobs == []


class TwoPolicies(FakeBackend):
    """A backend whose weights change after the first step."""

    async def generate(self, request: Any, hear: Any) -> None:
        hear(RequestOutput(request_id=request.request_id, token_ids=(5, 6), weight_version="1"))
        last = {"finish_reason": FinishReason.LENGTH, "weight_version": "2"}
        hear(RequestOutput(request_id=request.request_id, token_ids=(7, 8, 9), **last))


@every_call
@of_doors(shows="spans")
async def test_an_answer_says_which_weights_drew_which_tokens(door: Door, call: Call):
    (shown,) = (await door.send(rollout_stack(door, TwoPolicies(lambda _: [])), call)).choices
    assert shown.spans == [("1", 0, 2), ("2", 2, 5)]


@every_call
@of_doors(shows="warnings")
async def test_what_the_output_is_not_held_to_is_said(door: Door, call: Call):
    message = await door.send(Stack(TEXT), call, form=("json_schema", LENIENT))
    assert [warning.partition(": ")[2] for warning in message.warnings] == [
        "the answer may break what the grammar lacks and leaves out: uniqueItems"
    ]
    assert (await door.send(Stack(), call)).warnings == []


# --- what is refused ---

WRONG = {  # a field, and values that no door takes
    "max_tokens": (0,),
    "temperature": (-1.0, float("nan")),
    "top_p": (1.5,),
    "min_p": (1.5,),
    "n": (129, 0),
    "seed": (1 << 63,),
    "logprobs": (21,),
    "prompt_logprobs": (21,),
    "presence_penalty": (3.0,),
    "frequency_penalty": (-2.5,),
    "repetition_penalty": (0.0,),
    "stop": ([""],),
    "stop_token_ids": ([9999],),
    "logit_bias": ({9999: 1.0}, {5: 101.0}),
    "bad_words": ([""],),
    "priority": (1001,),
    "target_inter_token_ms": (-1.0,),
    "session_id": ("s" * 257,),
    "cache_salt": ("s" * 257,),
    "logprobs_mode": ("cooked",),
    "rejection_sample_method": ("blocks",),
    "request_id": ("two\nlines",),
}
KNOWN_OTHERWISE = [  # proto3's zero is "not given", its integers have bounds; of LLM, the engine knows the vocabulary
    *(("grpc", "seed", 1 << 63), ("vllm-grpc", "seed", 1 << 63), ("vllm-grpc", "repetition_penalty", 0.0)),
    *(("vllm-grpc", "n", 0), ("grpc", "n", 0), ("LLM", "stop_token_ids", [9999]), ("LLM", "n", 129)),
    *(("LLM", "logit_bias", {9999: 1.0}), ("sglang", "max_tokens", 0)),  # SGLang's zero scores the prompt alone
]
TOLD_AS = {
    ("chat", "logprobs"): "top_logprobs",
    ("sglang", "logprobs"): "top_logprobs_num",
    ("sglang", "prompt_logprobs"): "top_logprobs_num",
    ("sglang", "max_tokens"): "max_new_tokens",
    ("sglang", "seed"): "seed",
    ("sglang", "request_id"): "request_id",
    ("responses", "max_tokens"): "max_output_tokens",
    ("messages", "stop"): "stop_sequences",
}


@pytest.mark.parametrize(
    ("door", "name", "value"),
    [
        (door, name, value)
        for door in DOORS
        for name, values in WRONG.items()
        for value in values
        if door.has(name)
        and (door.name, name, value) not in KNOWN_OTHERWISE
        and not (value != value and door in HTTP_DOORS)  # JSON has no word for it
    ],
    ids=lambda value: repr(value)[:20],
)
async def test_a_wrong_value_names_its_field_and_reaches_nobody(door: Door, name: str, value: Any):
    stack = rollout_stack(door)
    with pytest.raises(Refused) as refused:
        await door.send(stack, **{name: value})
    told = TOLD_AS.get((door.name, name), name)
    assert refused.value.status == 400
    if door.name != "messages":  # Anthropic's form has no place for it
        assert refused.value.field == told
    assert told in refused.value.text
    assert stack.requests == []


@every_call
@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (Overloaded("full", 2.5), 429, "3"),
        (Unavailable("no verifier"), 503, "1"),
        (RequestFailed("broken"), 500, None),
        (KeyError("a fault"), 500, None),
    ],
)
@pytest.mark.parametrize("door", SERVED_DOORS, ids=repr)
async def test_an_early_error_has_its_status(
    door: Door, error: Exception, status: int, retry_after: str | None, call: Call
):
    with pytest.raises(Refused) as refused:
        await door.send(rollout_stack(door, [error]), call)
    assert (refused.value.status, refused.value.retry_after) == (status, retry_after)
    assert "fault" not in refused.value.text
    assert isinstance(error, KeyError) or str(error) in refused.value.text


@pytest.mark.parametrize("door", SERVED_DOORS, ids=repr)
async def test_an_error_in_mid_stream_ends_it_with_the_error(door: Door):
    with pytest.raises(Refused) as refused:
        await door.send(rollout_stack(door, [[5], RequestFailed("lost")]), STREAM)
    assert "lost" in refused.value.text
    assert refused.value.status == (500 if isinstance(door, GrpcDoor) else 200)


@pytest.mark.parametrize("door", SERVED_DOORS, ids=repr)
async def test_without_a_key_nothing_is_answered(door: Door):
    stack = rollout_stack(door)
    for key in ("", "wrong"):
        with pytest.raises(Refused) as refused:
            await door.send(stack, Call(keys=KEYS, key=key))
        assert refused.value.status == 401
    assert stack.requests == []
    await door.send(stack, Call(keys=KEYS, key="plain"))
    assert len(stack.requests) == 1


@of_doors("cache_salt", doors=SERVED_DOORS)
async def test_a_keys_prompts_share_prefixes_with_its_own_alone(door: Door):
    stack = rollout_stack(door)
    for call in (Call(keys=KEYS, key="salted"), Call(keys=KEYS, key="plain"), Call(keys=KEYS, key="plain"), Call()):
        await door.send(stack, call, cache_salt="salt")
    salted, plain, again, without = (request.cache_salt for request in stack.requests)
    assert (without, plain) == ("salt", again)
    assert len({salted, plain, without}) == 3
    assert all(salt.endswith("salt") for salt in (salted, plain))


@pytest.mark.parametrize("door", SERVED_DOORS, ids=repr)
async def test_a_draining_gateway_answers_what_still_reaches_it(door: Door):
    stack = rollout_stack(door)
    stack.gateway.drain()
    assert len((await door.send(stack)).choices) == 1


@of_doors("model", doors=HTTP_DOORS)
async def test_an_adapter_goes_by_its_name_as_a_model(door: Door):
    stack = rollout_stack(door, adapters=("poet",))
    for model in ("poet", "tiny"):
        await door.send(stack, model=model)
    assert [request.adapter for request in stack.requests] == ["poet", None]
    with pytest.raises(Refused) as refused:
        await door.send(stack, model="other")
    assert refused.value.status == 404


# --- how it ends ---


@every_call
@pytest.mark.parametrize("door", SERVED_DOORS, ids=repr)
async def test_a_client_that_goes_away_cancels_its_generation(door: Door, call: Call):
    stack = rollout_stack(door, [[5], None])
    num = 2 if door.has("n") else 1
    fields = {"n": 2} if door.has("n") else {}
    asking = asyncio.create_task(door.send(stack, dataclasses.replace(call, on_port=True), **fields))
    await stack.backend.until_waiting(num)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    await until(lambda: len(stack.backend.cancelled) == num)
    assert sorted(stack.backend.cancelled) == sorted(request.request_id for request in stack.requests)


@every_call
@pytest.mark.parametrize("door", [door for door in DOORS if isinstance(door, GrpcDoor)], ids=repr)
async def test_a_deadline_stops_the_generation(door: Door, call: Call):
    stack = Stack([[5], None])
    with pytest.raises(Refused) as refused:
        await door.send(stack, dataclasses.replace(call, deadline_s=0.2), request_id="late")
    assert refused.value.status == 504
    await until(lambda: stack.backend.cancelled == ["late"])


@of_doors("request_id", doors=SERVED_DOORS)
async def test_a_clients_name_for_a_request_reaches_the_engine(door: Door):
    stack = rollout_stack(door)
    await door.send(stack, request_id="mine")
    assert stack.requests[0].request_id == "mine"
