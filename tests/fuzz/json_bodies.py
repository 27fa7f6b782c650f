"""JSON bodies for the HTTP routes: plausible ones, and what is no JSON, no UTF-8 or no body of any route."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from pydantic import BaseModel

from outrider.cluster.api.openai.messages import CountTokensBody, MessagesBody
from outrider.cluster.api.openai.protocol import (
    NEUTRAL_VALUES,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from outrider.cluster.api.openai.responses_protocol import ResponsesBody

BASE_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the fox"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "fox"}]},
    "/v1/responses": {"input": "fox"},
    "/v1/messages": {"messages": [{"role": "user", "content": "fox"}], "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "fox"}]},
    "/tokenize": {"prompt": "the fox"},
    "/detokenize": {"tokens": [5, 6]},
}
BODY_KINDS: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
LISTS = {
    "$defs": {"d": {"type": "string", "pattern": "(?!a)b", "nullable": True}},
    "properties": {
        "a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        "b": {"anyOf": [{"$ref": "#/$defs/d"}, {"type": "any"}]},
    },
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": LISTS, "strict": False}}]
CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
# with all that tools bring, for values to be spoilt in: by path
TOOL_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": "fox"},
            {"role": "developer", "content": "rules"},
            {"role": "assistant", "content": None, "tool_calls": CALLS, "reasoning_content": "hm", "id": "m"},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "fox"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}], "function_call": None},
            {"role": "user", "content": ["fox"]},
        ],
        "thinking_token_budget": 3,
        "include_reasoning": False,
        "allowed_token_ids": [5, 6],
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "chat_template_kwargs": {"a": 1},
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "fox"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "fox"},
            {"type": "reasoning", "summary": []},
            {"type": "custom_tool_call", "call_id": "d", "name": "f", "input": "x"},
            {"type": "shell_call_output", "call_id": "d", "output": [{"stdout": "fox"}]},
            {"type": "web_search_call", "id": "w"},
        ],
        "include": ["reasoning.encrypted_content"],
        "truncation": "auto",
        "tools": [{"type": "function", "name": "f", "parameters": LISTS, "strict": False}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
    },
    "/v1/messages": {
        "max_tokens": 4,
        "system": [{"type": "text", "text": "fox", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "fox"}]},
            {"role": "system", "content": "dog"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": [1]}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "fox"}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object", **LISTS}}, {"type": "web_search_20250305"}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 8},
        "output_config": {"effort": "low"},
        "stop_sequences": ["x"],
    },
}
PATHS = tuple(BASE_BODIES)
KNOWN_NAMES = tuple(sorted({name for kind in BODY_KINDS.values() for name in kind.model_fields}))
UNSERVED_NAMES = tuple(sorted(NEUTRAL_VALUES))

_BIG = st.sampled_from((1 << 31, 1 << 63, -(1 << 63) - 1, 1 << 64, 10**30, -1, 0))
_TEXTS = st.text(max_size=20) | st.sampled_from(("a" * 5000, "\x00", "\u2028", "\U0001f98a", "<|end|>", "{{7*7}}"))
SCALARS = st.none() | st.booleans() | st.integers(-2, 300) | _BIG | st.floats() | _TEXTS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(KNOWN_NAMES) | st.sampled_from(UNSERVED_NAMES) | st.text(max_size=12)


def nested(depth: int, opener: str, closer: str) -> str:
    return opener * depth + closer * depth


def text_of(value: Any) -> str:
    """Write JSON as Python does: infinities and NaN have names, which JSON does not know."""
    return json.dumps(value, ensure_ascii=False)


@st.composite
def plausible_bodies(
    draw: st.DrawFn,
    path: str,
    bodies: Mapping[str, dict[str, Any]] = BASE_BODIES,
    names: st.SearchStrategy[str] = NAMES,
) -> bytes:
    """Draw a good body with some fields of any name and value put in."""
    body = bodies[path] | draw(st.dictionaries(names, VALUES, max_size=4))
    return text_of(body).encode()


@st.composite
def bodies_with_one_wrong_place(
    draw: st.DrawFn, path: str, bodies: Mapping[str, dict[str, Any]] = TOOL_BODIES
) -> bytes:
    """Draw a body, by default of tools, with one of its values, however deep, put in another's place or taken out."""
    body = json.loads(json.dumps(bodies[path]))
    value: Any = body
    while True:
        key = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
        if not isinstance(value[key], dict | list) or not value[key] or draw(st.integers(0, 3)) == 0:
            break
        value = value[key]
    if draw(st.integers(0, 3)) == 0:
        del value[key]
    else:
        value[key] = draw(VALUES)
    return text_of(body).encode()


@st.composite
def spoilt_bodies(draw: st.DrawFn, path: str, bodies: Mapping[str, dict[str, Any]] = BASE_BODIES) -> bytes:
    """Draw a body that is spoilt as text: half a surrogate, other encodings, nesting, numbers without end, cuts."""
    depth = draw(st.sampled_from((10, 500, 990, 5000, 200_000)))
    odd = draw(
        st.sampled_from(
            (
                '"\\ud800"',
                '["\\udfff"]',
                '{"\\ud800": 1}',
                "9" * 5000,
                "-1e400",
                "1" + "0" * 400,
                "NaN",
                nested(depth, "[", "]"),
                nested(depth, '{"a":[', "]}"),
                "[" * depth,
            )
        )
    )
    name = draw(NAMES)
    body = text_of(bodies[path])[:-1] + f", {text_of(name)}: {odd}}}"
    encoded = body.encode(draw(st.sampled_from(("utf-8", "utf-8-sig", "utf-16", "utf-32"))), "surrogatepass")
    start = draw(st.integers(0, len(encoded)))
    inserted = draw(st.sampled_from((b"", b"", b"\xff", b"\xed\xa0\x80", b"\x00", b'"', b"\xc0\xaf")))
    return encoded[:start] + inserted + encoded[start : draw(st.sampled_from((len(encoded), start + 20)))]
