"""Two verifiers' loops behind gRPC ports: KV in frames and over a tensor channel; givers end, takers hang up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest

from outrider.proto import link_pb2, link_pb2_grpc
from outrider.verifier_service.engine.service import RequestTable, VerifierLinkServicer
from outrider.verifier_service.links.control_table import ControlTable
from outrider.verifier_service.links.handover_calls import NO_HANDOVERS, HandoverCalls
from outrider.verifier_service.messages.engine import EngineUpdate
from outrider.verifier_service.messages.handover import EndTake, GivenFrame, KVSource, KVTerms, PartsRead, TakeKV
from outrider.verifier_service.messages.request import FinishReason, GenerationRequest, RequestOutput
from outrider.verifier_service.messages.wire import encode
from tiny.handing import HandingEngine, ask, prompts
from tiny.handing_ports import Served

PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def benches() -> dict[bool, tuple[HandingEngine, HandingEngine]]:
    """Engines with and without a tensor channel: they are slow to load, and every test leaves them empty."""
    return {has_channel: (HandingEngine(has_channel=has_channel), HandingEngine()) for has_channel in (False, True)}


@contextlib.asynccontextmanager
async def pair(benches: tuple[HandingEngine, HandingEngine]) -> AsyncIterator[tuple[Served, Served]]:
    """Yield a giver and a taker."""
    taker, giver = map(Served, benches)
    await giver.start()
    await taker.start()
    async with asyncio.timeout(PATIENCE_S):
        yield giver, taker
    await giver.stop()
    await taker.stop()


async def tokens_of(outputs: AsyncIterator[RequestOutput | None], *, until_held: bool = False) -> list[int]:
    tokens: list[int] = []
    async for output in outputs:
        if output is None:
            continue
        assert output.finish_reason is not FinishReason.NOT_TAKEN, output.error
        tokens += output.token_ids
        if until_held and output.is_held:
            break
    return tokens


@pytest.mark.parametrize("has_channel", [False, True], ids=["frames", "gloo"])
async def test_requests_change_hands_between_ports(benches, has_channel):
    num_bytes_before = benches[has_channel][1].handovers.giver.num_bytes
    async with pair(benches[has_channel]) as (giver, taker):
        messages = [ask(f"given {index}", prompt) for index, prompt in enumerate(prompts())]
        expected = [await tokens_of(taker.stream(replace(each, request_id="alone"))) for each in messages]
        taker.bench.engine.scheduler.flush_cache()

        async def handed_over(message: GenerationRequest) -> list[int]:
            source = KVSource(endpoint=giver.endpoint, request_id=message.request_id)
            rest = taker.stream(replace(message, request_id=f"{message.request_id} on", kv_source=source))
            async with contextlib.aclosing(rest):
                assert await anext(rest) is None
                while has_channel and not giver.has_channel_for(message.request_id):
                    await asyncio.sleep(0.005)
                async with contextlib.aclosing(giver.stream(replace(message, hands_over=True))) as first:
                    return await tokens_of(first, until_held=True) + await tokens_of(rest)

        assert await asyncio.gather(*map(handed_over, messages)) == expected
        num_bytes = giver.bench.handovers.giver.num_bytes - num_bytes_before
        assert num_bytes >= sum(map(len, prompts())) * giver.bench.kv.num_bytes_per_token
        if has_channel:
            assert giver.num_inline_bytes < num_bytes / 10, "only what announces tensors went in frames"
        assert not giver.calls._open
        assert not taker.calls._pulls


async def test_a_giver_whose_shell_is_gone_ends_the_pull(benches):
    async with pair(benches[False]) as (giver, taker):
        message = ask("a", prompts()[0])
        source = KVSource(endpoint=giver.endpoint, request_id="never there")
        outputs = taker.stream(replace(message, kv_source=source))
        assert await anext(outputs) is None
        while not giver.calls._open:
            await asyncio.sleep(0.01)
        await giver._server.stop(grace=None)
        last = await anext(outputs)
        assert last is not None
        assert last.finish_reason is FinishReason.NOT_TAKEN
        assert "CANCELLED" in str(last.error) or "UNAVAILABLE" in str(last.error)


async def test_a_taker_that_is_cancelled_hangs_up(benches):
    async with pair(benches[False]) as (giver, taker):
        first = giver.stream(replace(ask("a", prompts()[0]), hands_over=True))
        await tokens_of(first, until_held=True)
        source = KVSource(endpoint=giver.endpoint, request_id="unknown, and waited for")
        outputs = taker.stream(replace(ask("b", prompts()[0]), kv_source=source))
        assert await anext(outputs) is None
        while not giver.calls._open:
            await asyncio.sleep(0.01)
        await outputs.aclose()
        while giver.calls._open or taker.calls._pulls:
            await asyncio.sleep(0.01)
        await first.aclose()


async def test_a_request_that_the_takers_engine_refuses_leaves_nothing_on_the_host(benches):
    """Its KV has come, and then the engine finds that it cannot run."""
    async with pair(benches[False]) as (giver, taker):
        message = ask("a", prompts()[0])
        source = KVSource(endpoint=giver.endpoint, request_id="a")
        unknown = replace(message.sampling, bad_words=((1 << 20,),))  # a token that no vocabulary here has
        rest = taker.stream(replace(message, request_id="b", kv_source=source, sampling=unknown))
        assert await anext(rest) is None
        async with contextlib.aclosing(giver.stream(replace(message, hands_over=True))) as first:
            assert await anext(first) is None
            last = await anext(rest)
            assert last is not None
            assert last.finish_reason is FinishReason.ERROR
        assert not taker.bench.handovers.taker._num_bytes


async def test_the_giver_is_told_what_was_read_and_that_the_taker_has_hung_up():
    sent: list[object] = []
    calls = HandoverCalls(sent.append)
    asked = TakeKV(take_id="the taker's own", request_id="a", terms=KVTerms(fingerprint="f", weight_version="w"))
    frames = calls.give(encode(asked))
    first = asyncio.ensure_future(anext(frames))
    await asyncio.sleep(0)
    (told,) = sent
    assert isinstance(told, TakeKV)
    calls.deliver(EngineUpdate(given=(GivenFrame(take_id=told.take_id, payload=b"abc"),)))
    assert await first == b"abc"
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(anext(frames), 0.01)  # a taker that hangs up while it waits
    ends = [PartsRead(take_id=told.take_id, num_bytes=3), EndTake(take_id=told.take_id)]
    assert sent == [replace(asked, take_id=told.take_id), *ends]


async def test_calls_that_cannot_be_answered_say_why():
    sent: list[object] = []
    for calls, payload, code in [
        (NO_HANDOVERS, b"", grpc.StatusCode.UNIMPLEMENTED),
        (HandoverCalls(sent.append), b"nonsense", grpc.StatusCode.INVALID_ARGUMENT),
    ]:
        server = grpc.aio.server()
        servicer = VerifierLinkServicer(RequestTable(sent.append), ControlTable(sent.append), calls)
        link_pb2_grpc.add_VerifierLinkServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await anext(aiter(link_pb2_grpc.VerifierLinkStub(channel).TakeKV(link_pb2.Frame(payload=payload))))
        assert refused.value.code() is code
        await server.stop(grace=None)
    assert not sent
