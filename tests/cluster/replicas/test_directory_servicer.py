"""The directory of a pool that stands alone, over a real connection, with a router that is played."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from fakes.reports import verifier_report
from outrider.cluster.api.malformed_calls import MalformedCallInterceptor
from outrider.cluster.common.reports import ask_router
from outrider.cluster.replicas.directory_servicer import DirectoryServicer
from outrider.cluster.router.fleet import Directive, VerifierReport
from outrider.proto.link_pb2_grpc import DrafterDirectoryStub, add_DrafterDirectoryServicer_to_server
from outrider.verifier_service.messages.link import CHANNEL_OPTIONS, DrafterEndpoint, Hello, frame_of
from outrider.verifier_service.messages.request import SpeculationPlan
from outrider.verifier_service.messages.wire import decode, encode
from support.waiting import until

TIMEOUT_S = 30.0
DIRECTIVE = Directive(
    plans={"a": SpeculationPlan(drafter_id="d", draft_length=3)},
    default_plan=SpeculationPlan(draft_length=4),
    drafters=(DrafterEndpoint(drafter_id="d", endpoint="127.0.0.1:9", epoch=3),),
)


class Method:
    """A method of the router's deployment handle."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[Any] = []

    async def remote(self, argument: Any) -> Any:
        self.asked.append(argument)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


class Router:
    def __init__(self) -> None:
        self.report_verifier = Method(DIRECTIVE)
        self.remove = Method(None)


@asynccontextmanager
async def directory_of(router: Router) -> AsyncIterator[DrafterDirectoryStub]:
    server = grpc.aio.server(interceptors=(MalformedCallInterceptor(),), options=CHANNEL_OPTIONS)
    servicer = DirectoryServicer(
        lambda report: ask_router(router.report_verifier, report),
        lambda verifier_id: ask_router(router.remove, verifier_id),
    )
    add_DrafterDirectoryServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield DrafterDirectoryStub(channel)
    finally:
        await server.stop(grace=None)


async def answered(call: Any, report: VerifierReport) -> Directive:
    async with asyncio.timeout(TIMEOUT_S):
        await call.write(frame_of(report.verifier_id, report.epoch, encode(report)))
        frame = await call.read()
        if frame is grpc.aio.EOF:
            raise AssertionError(f"{await call.code()}: {await call.details()}")
    assert (frame.sender, frame.epoch) == (report.verifier_id, report.epoch)
    return decode(frame.payload, (Directive,))


async def ended(call: Any) -> tuple[grpc.StatusCode, str]:
    async with asyncio.timeout(TIMEOUT_S):
        with contextlib.suppress(grpc.aio.AioRpcError):
            assert await call.read() is grpc.aio.EOF
        return await call.code(), await call.details()


async def test_each_report_goes_to_the_router_and_its_directive_comes_back():
    router = Router()
    async with directory_of(router) as directory:
        call = directory.Follow()
        report = verifier_report("v0", num_running=2)
        assert await answered(call, report) == DIRECTIVE
        assert await answered(call, verifier_report("v0", num_running=3)) == DIRECTIVE
        assert [one.load.num_running for one in router.report_verifier.asked] == [2, 3]
        assert router.report_verifier.asked[0] == report
        assert router.remove.asked == []
        call.cancel()


async def test_a_verifier_that_ends_its_stream_is_removed():
    router = Router()
    async with directory_of(router) as directory:
        call = directory.Follow()
        await answered(call, verifier_report("v0"))
        await call.done_writing()
        assert (await ended(call))[0] is grpc.StatusCode.OK
        await until(lambda: router.remove.asked == ["v0"])


async def test_a_verifier_that_vanishes_is_removed_and_the_others_are_not():
    router = Router()
    async with directory_of(router) as directory:
        gone, staying = directory.Follow(), directory.Follow()
        await answered(gone, verifier_report("v0"))
        await answered(staying, verifier_report("v1"))
        gone.cancel()
        await until(lambda: router.remove.asked)
        assert await answered(staying, verifier_report("v1")) == DIRECTIVE
        assert router.remove.asked == ["v0"]
        staying.cancel()


@pytest.mark.parametrize(
    "payload", [b"", b"\xff\xff", encode(Hello(verifier_id="v0", epoch=1, vocab_size=5)), b"\x81\xa4type\xa1x"]
)
async def test_what_is_no_report_ends_the_stream_and_the_client_is_told_what_is_wrong(payload: bytes):
    router = Router()
    async with directory_of(router) as directory:
        call = directory.Follow()
        await call.write(frame_of("v0", 1, payload))
        code, details = await ended(call)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details
        assert router.report_verifier.asked == []


async def test_a_verifier_whose_later_frame_is_malformed_is_removed():
    router = Router()
    async with directory_of(router) as directory:
        call = directory.Follow()
        await answered(call, verifier_report("v0"))
        await call.write(frame_of("v0", 1, b"\xff"))
        assert (await ended(call))[0] is grpc.StatusCode.INVALID_ARGUMENT
        await until(lambda: router.remove.asked == ["v0"])


async def test_a_router_that_does_not_answer_ends_the_stream_as_unavailable():
    router = Router()
    router.report_verifier.answer = TimeoutError()
    async with directory_of(router) as directory:
        call = directory.Follow()
        await call.write(frame_of("v0", 1, encode(verifier_report("v0"))))
        assert await ended(call) == (grpc.StatusCode.UNAVAILABLE, "the router does not answer")


async def test_a_router_that_cannot_be_told_of_a_leaving_verifier_harms_nobody():
    router = Router()
    router.remove.answer = TimeoutError()
    async with directory_of(router) as directory:
        call = directory.Follow()
        await answered(call, verifier_report("v0"))
        call.cancel()
        await until(lambda: router.remove.asked)
        other = directory.Follow()
        assert await answered(other, verifier_report("v1")) == DIRECTIVE
        other.cancel()
