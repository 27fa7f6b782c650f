"""Answers as blocks: what each part of an answer becomes, and the events of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from outrider.cluster.api.anthropic.blocks import ContentBlocks, usage_object
from outrider.cluster.gateway.choice import Usage
from outrider.cluster.replies.reader import ReplyPart
from outrider.cluster.replies.tools import ToolCall


def written(parts: Sequence[ReplyPart]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    content = ContentBlocks(signature="s")
    events = [event for part in parts for event in content.add(part)]
    return content.blocks, [*events, *content.close(), *content.close()]


def test_a_thought_a_text_and_two_calls_are_blocks_in_their_order() -> None:
    first = ToolCall(name="look", arguments='{"at"', id="call_1")
    second = ToolCall(name="go", arguments="{}", id="call_2")
    blocks, events = written(
        [
            *(ReplyPart(reasoning="h"), ReplyPart(reasoning="m", content="See")),
            *(ReplyPart(content=".", calls=(first,)), ReplyPart(calls=(ToolCall(arguments=": 1}"), second))),
        ]
    )
    assert blocks == [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "See."},
        {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": 1}},
        {"type": "tool_use", "id": "toolu_2", "name": "go", "input": {}},
    ]
    shown = [(event["index"], event.get("delta") or event.get("content_block") or "stop") for event in events]
    assert shown == [
        (0, {"type": "thinking", "thinking": "", "signature": ""}),
        (0, {"type": "thinking_delta", "thinking": "h"}),
        (0, {"type": "thinking_delta", "thinking": "m"}),
        (0, {"type": "signature_delta", "signature": "s"}),
        (0, "stop"),
        (1, {"type": "text", "text": ""}),
        (1, {"type": "text_delta", "text": "See"}),
        (1, {"type": "text_delta", "text": "."}),
        (1, "stop"),
        (2, {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}),
        (2, {"type": "input_json_delta", "partial_json": '{"at"'}),
        (2, {"type": "input_json_delta", "partial_json": ": 1}"}),
        (2, "stop"),
        (3, {"type": "tool_use", "id": "toolu_2", "name": "go", "input": {}}),
        (3, {"type": "input_json_delta", "partial_json": "{}"}),
        (3, "stop"),
    ]


@pytest.mark.parametrize("arguments", ['{"at": ', "[1]", "[" * 100_000])
def test_arguments_that_are_no_object_are_kept_as_text(arguments: str) -> None:
    (block,), _ = written([ReplyPart(calls=(ToolCall(name="look", arguments=arguments, id="call_1"),))])
    assert block["input"] == {"INVALID_JSON": arguments}


def test_cached_tokens_are_counted_beside_the_inputs() -> None:
    usage = Usage(num_prompt_tokens=10, num_completion_tokens=3, num_cached_tokens=8)
    counts = {"input_tokens": 2, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 8, "output_tokens": 3}
    assert usage_object(usage) == counts
    details = {"output_tokens_details": {"thinking_tokens": 2}}
    assert usage_object(usage, num_reasoning_tokens=2) == {**counts, **details}
