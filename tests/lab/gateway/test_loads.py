"""What is asked of a server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.lab.gateway.loads import (
    FEWEST_TOKENS,
    MOST_TOKENS,
    NUM_TOOLS,
    Door,
    Load,
    Variant,
    all_loads,
    grpc_request,
    http_request,
    requests,
    streams,
)
from outrider.proto import generation_pb2

USUAL: dict[str, Any] = {
    "num_streams": (1, 16),
    "num_tokens": 128,
    "num_clients": (4,),
    "num_requests": 10,
    "has_variants": False,
}


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


def test_variants_are_those_of_each_door() -> None:
    loads = all_loads(list(Door), **{**USUAL, "has_variants": True})
    variants = [(load.door, load.variant) for load in loads if load.variant is not Variant.PLAIN]
    assert variants == [*((Door.HTTP, variant) for variant in list(Variant)[1:]), (Door.GRPC, Variant.LOGPROBS)]
    assert [load.name for load in all_loads([Door.HTTP], **USUAL)] == [
        *("http, 1 streams", "http, 16 streams", "http, 4 clients")
    ]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_streams": (0,)}, "streams"),
        ({"num_streams": (5000,)}, "streams"),
        ({"num_clients": (1, -1)}, "clients"),
        ({"num_tokens": 0}, "tokens"),
        ({"num_requests": 0}, "requests"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be"):
        all_loads([Door.HTTP], **{**USUAL, **options})


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


def test_a_request_is_not_streamed_and_its_connection_stays() -> None:
    lines, body = sent(requests(Door.HTTP, 1, 1))
    assert "Connection: keep-alive" in lines
    assert "stream" not in body


def test_variants_say_what_they_are() -> None:
    by_variant = {variant: sent(streams(Door.HTTP, 16, 128, variant)) for variant in Variant}
    assert by_variant[Variant.LOGPROBS][1]["logprobs"] == 5
    assert by_variant[Variant.USAGE][1]["stream_options"] == {"include_usage": True}
    lines, chat = by_variant[Variant.CHAT]
    assert lines[0] == "POST /v1/chat/completions HTTP/1.1"
    assert "tools" not in chat
    assert len({tool["function"]["name"] for tool in by_variant[Variant.TOOLS][1]["tools"]}) == NUM_TOOLS


def test_a_call_asks_for_the_same() -> None:
    request = generation_pb2.GenerateRequest.FromString(grpc_request(streams(Door.GRPC, 16, 128, Variant.LOGPROBS), 7))
    assert (request.sampling.max_tokens, request.sampling.ignore_eos, request.sampling.logprobs) == (128, True, 5)
    assert "7" in request.text
