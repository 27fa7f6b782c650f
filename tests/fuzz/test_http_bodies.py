"""Every HTTP route against arbitrary requests: no 500, no exception, errors in their API's form that name the field."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn
from urllib.parse import quote

import httpx
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import example, given
from hypothesis import strategies as st
from schemathesis import GenerationMode

from fuzz.budget import examples
from fuzz.json_bodies import (
    BASE_BODIES,
    BODY_KINDS,
    KNOWN_NAMES,
    PATHS,
    TOOL_BODIES,
    VALUES,
    bodies_with_one_wrong_place,
    plausible_bodies,
    spoilt_bodies,
    text_of,
)
from fuzz.tally import TALLY
from outrider.cluster.api.openai.messages import OWN_NAMES
from outrider.cluster.api.request_ids import RequestIdMiddleware
from outrider.cluster.replies.reader import ReplySyntax
from outrider.verifier_service.messages.request import GenerationRequest
from support.stack import Stack

STATUSES = frozenset({200, 400, 404, 405, 413})
ALIASES = {"disable_spec_decode": "disable_speculative_decoding"}


def few_tokens(request: GenerationRequest) -> list[list[int]]:
    return [[5]] * min(request.sampling.max_tokens, 3)


def build_app() -> FastAPI:
    syntax = ReplySyntax(tool_call_parser="hermes", reasoning_parser="qwen3")
    return Stack(few_tokens, api={"reply_syntax": syntax}).app


APP = build_app()


def refuse_constant(name: str) -> NoReturn:
    raise AssertionError(f"{name} is not JSON")


def check_answer(status: int, content: bytes, content_type: str, target: str) -> dict[str, Any] | None:
    """Check status and form of an answer, and count it; return the error where it is one."""
    assert status in STATUSES, (status, content)
    TALLY.count(target, str(status))
    if content_type == "application/json":
        answer = json.loads(content, parse_constant=refuse_constant)
    if status == 200:
        return None
    assert content_type == "application/json", content_type
    error = answer["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    if "type" in answer:  # Anthropic's, whose text names the field
        assert answer.keys() == {"type", "error", "request_id"}
        assert error.keys() == {"message", "type"}
        return error
    assert answer.keys() == {"error"}
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["param"], str | None)
    return error


async def send(method: str, path: str, *, target: str, **request: Any) -> dict[str, Any] | None:
    """Make a request of the application as the gateway mounts it, exceptions included."""
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(RequestIdMiddleware(APP)), base_url="http://g"
    ) as client:
        answer = await client.request(method, path, **request)
    content_type = answer.headers.get("content-type", "").partition(";")[0]
    return check_answer(answer.status_code, answer.content, content_type, target)


def test_the_document_describes_every_body() -> None:
    document = APP.openapi()
    for path, kind in BODY_KINDS.items():
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["properties"].keys() == kind.model_fields.keys()


OPERATIONS = [result.ok() for result in schemathesis.openapi.from_asgi("/openapi.json", APP).get_all_operations()]


CASES = [
    pytest.param(operation, mode, id=f"{operation.label}, {mode.value}")
    for operation in OPERATIONS
    for mode in GenerationMode
    if mode is GenerationMode.POSITIVE or operation.body  # without a body there is nothing to get wrong
]


@pytest.mark.parametrize(("operation", "mode"), CASES)
@examples(12)
@given(data=st.data())
def test_what_the_document_allows_and_what_it_does_not(
    operation: Any, mode: GenerationMode, data: st.DataObject
) -> None:
    case = data.draw(operation.as_strategy(generation_mode=mode))
    response = case.call()
    content_type = response.headers.get("content-type", [""])[0].partition(";")[0]
    check_answer(response.status_code, response.content, content_type, f"HTTP: schemathesis, {mode.value}")


BODIES = st.sampled_from(PATHS).flatmap(lambda path: st.tuples(st.just(path), plausible_bodies(path)))
SPOILT_BODIES = st.sampled_from(PATHS).flatmap(
    lambda path: st.tuples(st.just(path), spoilt_bodies(path) | st.binary(max_size=60))
)


@examples(300)
@given(BODIES)
def test_plausible_bodies(request: tuple[str, bytes]) -> None:
    path, content = request
    asyncio.run(send("POST", path, content=content, target="HTTP: plausible bodies"))


@examples(300)
@given(st.sampled_from(sorted(TOOL_BODIES)).flatmap(lambda p: st.tuples(st.just(p), bodies_with_one_wrong_place(p))))
def test_tools_with_one_wrong_place(request: tuple[str, bytes]) -> None:
    path, content = request
    asyncio.run(send("POST", path, content=content, target="HTTP: tools, one wrong place"))


@examples(200)
@given(SPOILT_BODIES)
@example(("/v1/completions", b'{"prompt": "\xed\xa0\x80"}'))
@example(("/v1/completions", '{"prompt": "\\ud800"}'.encode("utf-16")))
def test_spoilt_bodies(request: tuple[str, bytes]) -> None:
    path, content = request
    asyncio.run(send("POST", path, content=content, target="HTTP: spoilt bodies"))


@examples(300)
@given(st.sampled_from(PATHS), st.sampled_from(KNOWN_NAMES), VALUES)
def test_the_one_wrong_field_is_named(path: str, name: str, value: Any) -> None:
    content = text_of(BASE_BODIES[path] | {name: value}).encode()
    error = asyncio.run(send("POST", path, content=content, target="HTTP: one wrong field"))
    if error is not None and "param" not in error:
        own = OWN_NAMES.get(name, name)  # /v1/messages names its own fields
        assert any(known in error["message"] for known in (name, ALIASES.get(name, name), own)), error
    elif error is not None:
        assert error["param"] in (name, ALIASES.get(name)), error


@examples(60)
@given(
    st.sampled_from(("GET", "POST", "PUT", "DELETE", "OPTIONS", "NOBODY")),
    st.sampled_from((*PATHS, "/v1/models", "/health", "/load", "/metrics", "/openapi.json", "/nobody"))
    | st.text(st.characters(codec="utf-8"), max_size=30).map(lambda name: f"/v1/models/{quote(name)}"),
    st.dictionaries(
        st.sampled_from(("x-request-id", "content-type", "accept", "expect", "traceparent", "authorization", "x-huge")),
        st.binary(max_size=60) | st.just(b"a" * 1_000_000),
        max_size=3,
    ),
)
def test_methods_paths_and_headers(method: str, path: str, headers: dict[str, bytes]) -> None:
    body = {"content": text_of(BASE_BODIES.get(path, {})).encode()}
    asyncio.run(send(method, path, headers=headers, target="HTTP: headers", **body))
