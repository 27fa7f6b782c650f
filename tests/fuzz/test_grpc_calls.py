"""Both public gRPC services against arbitrary requests: the client is told its fault, the next one is served."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2

from fuzz.budget import examples
from fuzz.protobufs import messages_of, spoilt
from fuzz.servers import CALL_TIMEOUT_S, Loop, kept_open, status_of
from outrider.proto import generation_pb2
from outrider.verifier_service.messages.request import GenerationRequest
from support.stack import Stack

SERVICES = (
    generation_pb2.DESCRIPTOR.services_by_name["Inference"],
    vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"],
)
METHODS = {
    f"/{service.full_name}/{method.name}": method.input_type for service in SERVICES for method in service.methods
}
GENERATING = [name for name in METHODS if "Generate" in name]
SWITCHES = ("priority", "num-speculative-tokens", "disable-spec-decode", "cache-salt", "nobody", "session-id-bin")
SWITCHES = (*SWITCHES, "target-inter-token-ms")
METADATA = st.dictionaries(
    st.sampled_from(("x-request-id", "authorization", *(f"x-outrider-{name}" for name in SWITCHES))),
    st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=40).map(str.strip)
    | st.integers(-(1 << 70), 1 << 70).map(str),
    max_size=2,
)
Server = tuple[Loop, grpc.aio.Channel]


def few_tokens(request: GenerationRequest) -> list[list[int]]:
    return [[5]] * min(request.sampling.max_tokens, 3)


@asynccontextmanager
async def serving() -> AsyncIterator[grpc.aio.Channel]:
    async with Stack(few_tokens).rpc() as rpc:
        yield rpc.channel


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with kept_open(serving()) as served:
        yield served


async def call(channel: grpc.aio.Channel, method: str, payload: bytes, target: str, metadata: dict[str, str]) -> None:
    """Make one arbitrary call, then a good one."""
    items = [(name, value.encode() if name.endswith("-bin") else value) for name, value in metadata.items()]
    await status_of(channel.unary_stream(method)(payload, metadata=items, timeout=CALL_TIMEOUT_S), target)
    good = channel.unary_unary("/outrider.v1.Inference/GenerateUnary")
    answer = await good(generation_pb2.GenerateRequest(text="a").SerializeToString(), timeout=CALL_TIMEOUT_S)
    assert generation_pb2.GenerateResponse.FromString(answer).usage.completion_tokens == 3


@st.composite
def good_requests(draw: st.DrawFn, method: str) -> Message:
    """Draw a structured request, more often than not one that names a prompt."""
    message = draw(messages_of(METHODS[method]))
    if "Generate" in method and draw(st.booleans()):
        message.text = "the fox"
    return message


CALLS = st.sampled_from(list(METHODS) + GENERATING * 3).flatmap(
    lambda method: st.tuples(st.just(method), good_requests(method).map(lambda message: message.SerializeToString()))
)
SPOILT_CALLS = st.sampled_from(list(METHODS) + GENERATING * 3).flatmap(
    lambda method: st.tuples(st.just(method), spoilt(good_requests(method)) | st.binary(max_size=100))
)


@examples(150)
@given(request=CALLS, metadata=METADATA)
def test_arbitrary_messages(server: Server, request: tuple[str, bytes], metadata: dict[str, str]) -> None:
    loop, channel = server
    loop.run(call(channel, *request, "gRPC: arbitrary messages", metadata))


@examples(100)
@given(request=SPOILT_CALLS)
def test_bytes_that_may_be_no_message(server: Server, request: tuple[str, bytes]) -> None:
    loop, channel = server
    loop.run(call(channel, *request, "gRPC: spoilt bytes", {}))
