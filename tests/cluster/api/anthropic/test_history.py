"""Histories of content blocks: the chats that they stand for."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.cluster.api.anthropic.history import ChatHistory
from outrider.cluster.common.errors import InvalidRequest

CACHED = {"cache_control": {"type": "ephemeral"}}


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def chat_of(messages: list[Any], system: object = None) -> ChatHistory:
    history = ChatHistory()
    history.add_system(system)
    for index, message in enumerate(messages):
        history.add(message, f"messages[{index}]")
    history.end()
    return history


def said(role: str, content: object) -> dict[str, Any]:
    return {"role": role, "content": content}


USE = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "größer"}}
CALL = {"id": "toolu_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "größer"}'}}


def result(content: object, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **fields}


@pytest.mark.parametrize(
    "system",
    ["be short\nand kind", [text("be short", **CACHED), text("and kind")]],
)
def test_a_system_prompt_is_text_or_blocks(system: object) -> None:
    assert chat_of([said("user", "hi")], system).messages == [
        said("system", "be short\nand kind"),
        said("user", "hi"),
    ]


def test_what_an_agent_says_of_its_billing_is_no_text_for_a_model() -> None:
    billing = text("x-anthropic-billing-header: cc_version=2.1.332.0b8; cc_entrypoint=sdk-cli;")
    assert chat_of([said("user", "hi")], [billing, text("be short")]).messages[0]["content"] == "be short"


def test_calls_results_and_thoughts_take_their_places() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    history = chat_of(
        [
            said("user", [text("a", **CACHED), text("b")]),
            said("assistant", [thought, {"type": "redacted_thinking", "data": "x"}, text("See."), USE]),
            said("user", [result([text("c"), text("d")], **CACHED), text("and now?")]),
        ]
    )
    assert history.messages == [
        said("user", "a\nb"),
        {"role": "assistant", "content": "See.", "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "c\nd"},
        said("user", "and now?"),
    ]
    assert history.left_out == []


@pytest.mark.parametrize(
    ("content", "fields", "shown"),
    [
        ("found", {}, "found"),
        ("found", {"is_error": False}, "found"),
        ("no such file", {"is_error": True}, "Error: no such file"),
        (None, {}, ""),
        ([], {}, ""),
        ([{"type": "tool_reference", "tool_name": "WebFetch"}], {}, "WebFetch"),
        ([{"type": "search_result", "source": "s", "title": "T", "content": [text("c")]}], {}, "T\nc"),
    ],
)
def test_a_tools_result_is_text(content: object, fields: dict[str, Any], shown: str) -> None:
    messages = [said("user", "a"), said("assistant", [USE]), said("user", [result(content, **fields)])]
    assert chat_of(messages).messages[2:] == [{"role": "tool", "tool_call_id": "toolu_1", "content": shown}]


def test_a_document_that_is_text_is_read() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "once"}
    document = {"type": "document", "source": source, "title": "Tale"}
    assert chat_of([said("user", [document, text("sum it up")])]).messages == [said("user", "Tale\nonce\nsum it up")]


def test_turns_of_one_role_are_one() -> None:
    history = chat_of([said("user", "a"), said("user", "b"), said("assistant", "c"), said("assistant", [USE])])
    assert history.messages == [
        said("user", "a\nb"),
        {"role": "assistant", "content": "c", "tool_calls": [CALL]},
    ]


def test_a_system_message_joins_the_turn_before_it_and_leaves_the_head_alone() -> None:
    first = said("system", "head")
    assert chat_of([first, said("user", "a")], "be short").messages[0] == said("system", "be short\nhead")
    history = chat_of(
        [
            *(said("user", "a"), said("system", [text("one")])),
            *(said("assistant", [USE]), said("user", [result("r")]), said("system", "two")),
            *(said("assistant", "b"), said("system", "three"), said("user", "c")),
            *(said("assistant", "d"), said("system", "four")),
        ],
        "be short",
    )
    assert [(message["role"], message["content"]) for message in history.messages] == [
        *(("system", "be short"), ("user", "a\none"), ("assistant", ""), ("tool", "r\ntwo")),
        *(("assistant", "b"), ("user", "three\nc"), ("assistant", "d"), ("user", "four")),
    ]


def test_a_system_message_before_a_tools_result_stands_behind_it() -> None:
    messages = [said("user", "a"), said("assistant", [USE]), said("system", "s"), said("user", [result("r")])]
    roles = [message["role"] for message in chat_of(messages).messages]
    assert roles == ["user", "assistant", "tool", "user"]


def test_what_anthropics_servers_did_is_left_out_and_named() -> None:
    blocks = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        text("It rains."),
    ]
    history = chat_of([said("user", "a"), said("assistant", blocks)])
    assert history.messages[1] == said("assistant", "It rains.")
    assert history.left_out == ["server_tool_use", "web_search_tool_result"]


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("hi", r"messages\[0\] must be an object"),
        (said("bad", "hi"), r"messages\[0\].role must be user, assistant or system, not 'bad'"),
        (said("user", 3), r"messages\[0\].content must be text or a list of blocks"),
        (said("user", [{"text": "a"}]), r"messages\[0\].content must be text or a list of blocks"),
        (said("user", [{"type": "text"}]), r"messages\[0\].content: text must be a string"),
        (said("user", [{"type": "image", "source": {}}]), r"messages\[0\].content: a block of type 'image' is not"),
        (said("user", [{"type": "document", "source": {"type": "base64"}}]), "a block of type 'document' is not"),
        (said("user", [result([{"type": "image"}])]), r"messages\[0\].content\[0\].content: a block of type 'image'"),
        (said("assistant", [{**USE, "input": "{}"}]), r"messages\[0\].content\[0\].input must be an object"),
        (said("assistant", [{"type": "thinking"}]), r"messages\[0\].content\[0\]: thinking must be a string"),
    ],
)
def test_what_is_wrong_is_named(message: object, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named) as refused:
        chat_of([message])
    assert refused.value.field == "messages"
    with pytest.raises(InvalidRequest, match="system: a block of type 'image'") as refused:
        chat_of([], [{"type": "image"}])
    assert refused.value.field == "system"
