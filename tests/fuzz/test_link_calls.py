"""Both ends of the internal links against hostile frames, behind real servers and in front of real engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes.engine_bench import EngineBench, greedy_tokens, make_request
from fakes.in_process_port import InProcessPort
from fakes.played_fleet import outputs_over
from fakes.runner import FakeRunner
from fuzz.budget import examples
from fuzz.frames import FRAMES, INTEGERS, spoilt_frames, values_of
from fuzz.servers import CALL_TIMEOUT_S, Loop, kept_open, status_of
from outrider.cluster.api.malformed_calls import MalformedCallInterceptor
from outrider.drafter_service.engine.drafter import DraftEngineConfig
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.service.service import DrafterLinkServicer
from outrider.proto import link_pb2, link_pb2_grpc
from outrider.verifier_service.engine.service import RequestTable, VerifierLinkServicer
from outrider.verifier_service.links.control_rules import ControlRules
from outrider.verifier_service.links.control_table import ControlTable
from outrider.verifier_service.messages.draft import Close, Commit, Draft, DraftSampling, Open, States
from outrider.verifier_service.messages.engine import (
    AskState,
    BadRequest,
    Cancel,
    Control,
    ControlResult,
    PauseGeneration,
    PauseMode,
    Published,
    UpdateWeights,
    read_frame,
)
from outrider.verifier_service.messages.link import (
    CHANNEL_OPTIONS,
    DrafterIdentity,
    Hello,
    Ping,
    Welcome,
    frame_of,
)
from outrider.verifier_service.messages.request import FinishReason, GenerationRequest, RequestOutput, SamplingParams
from outrider.verifier_service.messages.wire import decode, encode
from tiny.drafters import model_drafter

VOCAB_SIZE = 97
IDENTITY = DrafterIdentity(
    drafter_id="d", vocab_size=VOCAB_SIZE, vocab_fingerprint="", max_draft_length=8, max_model_len=64
)
STREAM, SERVE = "/outrider.link.v1.DrafterLink/Stream", "/outrider.link.v1.VerifierLink/Serve"
CONTROL = "/outrider.link.v1.VerifierLink/Control"
Server = tuple[Loop, grpc.aio.Channel]

TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1) | st.sampled_from((-1, VOCAB_SIZE, 1 << 62)), max_size=6).map(tuple)
NAMES = st.sampled_from("ab")
PLAUSIBLE = (
    st.builds(Open, request_id=NAMES, sampling=values_of(DraftSampling), token_ids=TOKENS, cache_salt=NAMES)
    | st.builds(
        Commit,
        request_id=NAMES,
        round_id=INTEGERS,
        position=st.integers(-1, 70),
        token_ids=TOKENS,
        max_length=st.integers(-1, 300),
        max_nodes=st.just(0) | INTEGERS,
        predicted_ids=TOKENS,
        forced_ids=TOKENS,
    )
    | st.builds(
        States,
        request_id=NAMES,
        position=st.integers(-1, 6),
        dtype=st.sampled_from(("float32", "float16", "bfloat16", "int8", "")),
        width=st.integers(-1, 3) | INTEGERS,
        data=st.binary(max_size=40),
        tensor=st.sampled_from((0, 0, 1, -1)),
        num_bytes=st.just(0) | INTEGERS,
    )
    | st.builds(Close, request_id=NAMES)
    | values_of(Ping)
).map(encode)
HELLO = encode(Hello(verifier_id="v", epoch=1, vocab_size=VOCAB_SIZE))
PAYLOADS = PLAUSIBLE | spoilt_frames(PLAUSIBLE) | spoilt_frames() | FRAMES | st.binary(max_size=40)
LINK_FRAMES = st.builds(
    frame_of, st.sampled_from(("v", "v", "v", "w", "")), st.sampled_from((1, 1, 1, 0, 2)), PAYLOADS
).map(link_pb2.Frame.SerializeToString)
GREETINGS = st.just(frame_of("v", 1, HELLO).SerializeToString()) | LINK_FRAMES
REQUESTS = st.builds(
    GenerationRequest,
    request_id=NAMES,
    prompt_token_ids=TOKENS,
    sampling=values_of(SamplingParams),
    output_token_ids=st.just(()) | TOKENS,
    group_id=st.none() | NAMES,
    cache_salt=st.just("") | NAMES,
    priority=st.integers(-1000, 1000),
    target_inter_token_ms=st.none() | st.floats(0.0, 60_000.0, exclude_min=True),
    trace_parent=st.none() | st.text(max_size=5),
).map(encode)


@asynccontextmanager
async def serving(servicer: DrafterLinkServicer | VerifierLinkServicer) -> AsyncIterator[grpc.aio.Channel]:
    """Serve one servicer as `EngineHost` does."""
    server = grpc.aio.server(interceptors=(MalformedCallInterceptor(),), options=CHANNEL_OPTIONS)
    if isinstance(servicer, DrafterLinkServicer):
        link_pb2_grpc.add_DrafterLinkServicer_to_server(servicer, server)
    else:
        link_pb2_grpc.add_VerifierLinkServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
        yield channel
    await server.stop(None)


# --- the drafter's end ---


@pytest.fixture(scope="module")
def drafter() -> Iterator[Server]:
    runner = FakeRunner(vocab_size=VOCAB_SIZE, num_blocks=512)
    engine = DraftEngine(
        model_drafter(runner, torch.Generator().manual_seed(0)), clock=lambda: 0.0, config=DraftEngineConfig()
    )
    port = InProcessPort(engine, idle_s=0.05)
    try:
        with kept_open(serving(DrafterLinkServicer(port, IDENTITY))) as served:
            yield served
    finally:
        port.stop()


async def hostile_stream(channel: grpc.aio.Channel, payloads: list[bytes]) -> None:
    async def sent() -> AsyncIterator[bytes]:
        for payload in payloads:
            yield payload

    await status_of(channel.stream_stream(STREAM)(sent(), timeout=CALL_TIMEOUT_S), "drafter link: streams of frames")
    await good_stream(channel)


async def good_stream(channel: grpc.aio.Channel) -> None:
    """Open a session and get the right draft for it."""
    call = link_pb2_grpc.DrafterLinkStub(channel).Stream(timeout=CALL_TIMEOUT_S)
    request = make_request()
    messages = (
        Hello(verifier_id="good", epoch=1, vocab_size=VOCAB_SIZE),
        Open(request_id="r", sampling=DraftSampling(temperature=0.0), token_ids=request.prompt_token_ids),
        Commit(request_id="r", round_id=1, position=len(request.prompt_token_ids), token_ids=(), max_length=3),
    )
    for message in messages:
        await call.write(frame_of("good", 1, encode(message)))
    assert type(decode((await call.read()).payload, (Welcome,))) is Welcome
    assert decode((await call.read()).payload, (Draft,)).token_ids == greedy_tokens(3)
    call.cancel()


@examples(150)
@given(st.tuples(GREETINGS, st.lists(LINK_FRAMES, max_size=8)))
def test_streams_of_hostile_frames(drafter: Server, frames: tuple[bytes, list[bytes]]) -> None:
    loop, channel = drafter
    loop.run(hostile_stream(channel, [frames[0], *frames[1]]))


@examples(40)
@given(st.lists(GREETINGS | st.binary(max_size=60), max_size=4))
def test_streams_of_what_is_no_frame(drafter: Server, payloads: list[bytes]) -> None:
    loop, channel = drafter
    loop.run(hostile_stream(channel, payloads))


def test_a_stream_that_says_hello_and_no_more_ends(drafter: Server) -> None:
    loop, channel = drafter
    for _ in range(20):  # about every second one was never told its end
        loop.run(hostile_stream(channel, [frame_of("v", 1, HELLO).SerializeToString()]))


def test_a_stream_of_garbage_ends(drafter: Server) -> None:
    loop, channel = drafter
    frames = [frame_of("v", 1, payload).SerializeToString() for payload in (HELLO, *[b"garbage"] * 200)]
    loop.run(hostile_stream(channel, frames))


# --- the verifier's end ---


class SteppedEngine:
    """A verifier's engine on the event loop, behind the table of its callers."""

    def __init__(self) -> None:
        self._bench = EngineBench(drafters=())
        self.table, self.control = RequestTable(self._send), ControlTable(self._answer)

    def _answer(self, message: Control) -> None:
        asyncio.get_running_loop().call_soon(self.control.deliver, [ControlResult(call_id=message.call_id)])

    def _send(self, message: bytes | Cancel) -> None:
        read = read_frame(message) if isinstance(message, bytes) else message
        match read:
            case Cancel():
                self._bench.engine.cancel(read.request_id)
            case BadRequest():
                self._publish([RequestOutput.failed(read.request_id, read.error)])
            case GenerationRequest():
                if (refusal := self._bench.engine.add(read)) is not None:
                    self._publish([refusal])

    async def run(self) -> None:
        while True:
            self._publish(self._bench.step() or [])
            await asyncio.sleep(0.001)

    def _publish(self, outputs: list[RequestOutput]) -> None:
        self.table.deliver(map(Published.of, outputs))


@asynccontextmanager
async def serving_engine() -> AsyncIterator[grpc.aio.Channel]:
    engine = SteppedEngine()
    stepping = asyncio.create_task(engine.run())
    async with serving(VerifierLinkServicer(engine.table, engine.control, rules=ControlRules(is_open=True))) as channel:
        yield channel
    assert not stepping.done(), "the step loop has ended"
    stepping.cancel()
    await asyncio.gather(stepping, return_exceptions=True)


@pytest.fixture(scope="module")
def verifier() -> Iterator[Server]:
    with kept_open(serving_engine()) as served:
        yield served


async def generate(channel: grpc.aio.Channel, request: bytes) -> None:
    hostile = channel.stream_stream(SERVE)(iter([request]), timeout=CALL_TIMEOUT_S)
    await status_of(hostile, "verifier link: requests")
    good = outputs_over(link_pb2_grpc.VerifierLinkStub(channel), make_request("good", max_tokens=4))
    async with asyncio.timeout(CALL_TIMEOUT_S):
        accepted, *outputs = [output async for output in good]
    assert accepted is None
    assert tuple(token_id for output in outputs for token_id in output.token_ids) == greedy_tokens(4)
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def hostile(payloads: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Draw a call's bytes: frames of these payloads, of spoilt ones, of others and of anything, and no frame at all."""
    framed = payloads | spoilt_frames(payloads) | FRAMES | st.binary(max_size=40)
    return framed.map(lambda payload: link_pb2.Frame(payload=payload).SerializeToString()) | st.binary(max_size=60)


@examples(150)
@given(hostile(REQUESTS))
def test_hostile_requests(verifier: Server, request_: bytes) -> None:
    loop, channel = verifier
    loop.run(generate(channel, request_))


async def ask_state(channel: grpc.aio.Channel, request: bytes) -> None:
    await status_of(channel.unary_unary(CONTROL)(request, timeout=CALL_TIMEOUT_S), "verifier link: control calls")
    frame = link_pb2.Frame(payload=encode(AskState(call_id="good")))
    answer = await link_pb2_grpc.VerifierLinkStub(channel).Control(frame, timeout=CALL_TIMEOUT_S)
    assert decode(answer.payload, (ControlResult,)) == ControlResult(call_id="good")


CALLS = (
    st.builds(AskState, call_id=st.text(max_size=4))
    | st.builds(PauseGeneration, call_id=st.text(max_size=4), mode=st.sampled_from(PauseMode))
    | st.builds(UpdateWeights, call_id=st.text(max_size=4), folder=st.none() | st.text(max_size=8))
).map(encode)


@examples(100)
@given(hostile(CALLS))
def test_hostile_control_calls(verifier: Server, request_: bytes) -> None:
    loop, channel = verifier
    loop.run(ask_state(channel, request_))
