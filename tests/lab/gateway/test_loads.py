"""What is asked of a server."""

from __future__ import annotations

import json
from typing import Any

from outrider.lab.gateway.loads import (
    FEWEST_TOKENS,
    MOST_TOKENS,
    NUM_TOOLS,
    Door,
    Load,
    Variant,
    http_request,
    requests,
    streams,
)


def test_few_streams_come_again_and_many_have_fewer_tokens() -> None:
    one, some, many = (streams(Door.HTTP, number, 128) for number in (1, 64, 1024))
    assert (one.num_rounds, one.num_tokens) == (8, 128)
    assert (some.num_rounds, some.num_tokens) == (1, 128)
    assert (many.num_rounds, many.num_tokens) == (1, 64)
    assert one.num_units == FEWEST_TOKENS
    assert many.num_units == MOST_TOKENS


def test_requests_are_divided_among_clients() -> None:
    load = requests(Door.GRPC, 4, 10)
    assert (load.num_rounds, load.num_units, load.num_tokens, load.is_streamed) == (3, 12, 1, False)


def sent(load: Load) -> tuple[list[str], dict[str, Any]]:
    head, _, body = http_request(load, "m", 7).partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert f"Content-Length: {len(body)}" in lines
    return lines, json.loads(body)


def test_a_stream_is_asked_for_over_a_connection_of_its_own() -> None:
    lines, body = sent(streams(Door.HTTP, 16, 128))
    assert lines[0] == "POST /v1/completions HTTP/1.1"
    assert "Connection: close" in lines
    assert (body["model"], body["max_tokens"], body["stream"], body["ignore_eos"]) == ("m", 128, True, True)
    assert "7" in body["prompt"]


def test_variants_say_what_they_are() -> None:
    by_variant = {variant: sent(streams(Door.HTTP, 16, 128, variant)) for variant in Variant}
    assert by_variant[Variant.LOGPROBS][1]["logprobs"] == 5
    assert by_variant[Variant.USAGE][1]["stream_options"] == {"include_usage": True}
    lines, chat = by_variant[Variant.CHAT]
    assert lines[0] == "POST /v1/chat/completions HTTP/1.1"
    assert "tools" not in chat
    assert len({tool["function"]["name"] for tool in by_variant[Variant.TOOLS][1]["tools"]}) == NUM_TOOLS
