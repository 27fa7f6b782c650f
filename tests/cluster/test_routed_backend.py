"""The gateway's way to the verifiers: handles that play the router, real gRPC servers that play verifiers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from ray.exceptions import RayActorError

from outrider.cluster import routed_backend
from outrider.cluster.errors import InvalidRequest, RequestFailed, Unavailable
from outrider.cluster.fleet import (
    Assignment,
    FleetSnapshot,
    RouteAsk,
    RouterPolicy,
    VerifierReport,
    VerifierState,
)
from outrider.cluster.routed_backend import RoutedBackend, RouterClient
from outrider.proto import link_pb2, link_pb2_grpc
from outrider.verifier_service.request import (
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SamplingParams,
    SpeculationPlan,
)
from outrider.verifier_service.wire import decode, encode

PLAN = SpeculationPlan(drafter_id="d", draft_length=4)
ASK = RouteAsk(request_id="r", num_prompt_tokens=3)
REQUEST = GenerationRequest(
    request_id="mine", prompt_token_ids=(1, 2, 3), sampling=SamplingParams(seed=4, num_speculative_tokens=2)
)


class Method:
    """A method of the router's handle that plays `answer`: a value, an error, or None for ever."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self._answer = answer
        self.asked: list[tuple[Any, ...]] = []

    async def remote(self, *arguments: Any) -> Any:
        self.asked.append(arguments)
        answer = self._answer()
        if answer is HANGS:
            await asyncio.get_running_loop().create_future()
        if isinstance(answer, BaseException):
            raise answer
        return answer


HANGS = object()


class Router:
    """The router's deployment handle."""

    def __init__(self, answer: Any, snapshot: Any = HANGS) -> None:
        self.answer, self.snapshot_answer = answer, snapshot
        self.route = Method(lambda: self.answer)
        self.snapshot = Method(lambda: self.snapshot_answer)


def snapshot_of(*verifier_ids: str) -> FleetSnapshot:
    now_s = time.time()
    figures = {"num_running": 0, "num_waiting": 0, "num_decoding": 0, "kv_usage": 0.0}
    return FleetSnapshot(
        verifiers=tuple(
            VerifierState(
                report=VerifierReport(verifier_id=name, endpoint=f"{name}:1", epoch=1, **figures),
                reported_s=now_s,
                default_plan=SpeculationPlan(disabled_reason="load"),
            )
            for name in verifier_ids
        ),
        drafters=(),
        decided_at_s=now_s,
    )


def assigned(endpoint: str) -> Assignment:
    return Assignment(verifier_id="v", endpoint=endpoint, plan=PLAN)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


# --- routing ---


async def test_the_router_decides_while_it_answers():
    router = Router(assigned("v:1"))
    client = RouterClient(router, RouterPolicy())
    client.snapshot = snapshot_of("other")
    assert await client.route(ASK) == assigned("v:1")
    assert router.route.asked == [(ASK,)]
    assert client.snapshot.verifiers[0].num_assigned == 0


@pytest.mark.parametrize("answer", [HANGS, RayActorError(), TimeoutError()], ids=["hangs", "is dead", "times out"])
async def test_without_the_router_the_snapshot_decides(answer: Any):
    client = RouterClient(Router(answer), RouterPolicy())
    client.snapshot = snapshot_of("v")
    begin_s = time.monotonic()
    assignment = await client.route(ASK)
    assert time.monotonic() - begin_s < 10 * routed_backend.ROUTE_TIMEOUT_S
    assert (assignment.verifier_id, assignment.endpoint) == ("v", "v:1")
    assert assignment.plan.disabled_reason == "load"


async def test_requests_routed_alone_count_and_so_spread():
    client = RouterClient(Router(RayActorError()), RouterPolicy())
    client.snapshot = snapshot_of("v", "w")
    chosen = [(await client.route(dataclasses.replace(ASK, request_id=str(i)))).verifier_id for i in range(6)]
    assert chosen.count("v") == chosen.count("w") == 3


@pytest.mark.parametrize("snapshot", [None, snapshot_of()], ids=["no snapshot", "an empty one"])
@pytest.mark.parametrize("answer", [None, RayActorError()], ids=["the router knows none", "the router is dead"])
async def test_no_verifier_is_unavailable(answer: Any, snapshot: FleetSnapshot | None):
    client = RouterClient(Router(answer), RouterPolicy())
    client.snapshot = snapshot
    with pytest.raises(Unavailable, match="no verifier"):
        await client.route(ASK)


async def test_following_takes_the_newest_snapshot_and_keeps_it_when_the_router_goes():
    router = Router(HANGS, snapshot=snapshot_of("v"))
    client = RouterClient(router, RouterPolicy())
    following = asyncio.ensure_future(client.follow())
    await until(lambda: client.snapshot == router.snapshot_answer)
    router.snapshot_answer = newer = snapshot_of("v", "w")
    await until(lambda: client.snapshot == newer)
    router.snapshot_answer = RayActorError()
    num_asked = len(router.snapshot.asked)
    await until(lambda: len(router.snapshot.asked) >= num_asked + 2)
    assert client.snapshot == newer
    assert not following.done()
    following.cancel()


# --- streaming ---


class Verifier(link_pb2_grpc.VerifierLinkServicer):
    """A verifier that streams the outputs of a script, then ends as it says."""

    def __init__(self, script: list[tuple[int, ...]], *, end: Any = FinishReason.STOP) -> None:
        self.script, self.end = script, end
        self.requests: list[GenerationRequest] = []
        self.senders: list[str] = []
        self.cancelled: list[str] = []

    async def Generate(self, frame: link_pb2.Frame, context: Any) -> AsyncIterator[link_pb2.Frame]:
        request = decode(frame.payload, (GenerationRequest,))
        self.requests.append(request)
        self.senders.append(frame.sender)
        try:
            for index, token_ids in enumerate(self.script, start=1):
                is_last = index == len(self.script) and isinstance(self.end, FinishReason)
                output = RequestOutput(
                    request_id=request.request_id,
                    token_ids=token_ids,
                    num_cached_tokens=2,
                    finish_reason=self.end if is_last else None,
                )
                yield link_pb2.Frame(payload=encode(output))
            if isinstance(self.end, grpc.StatusCode):
                await context.abort(self.end, "said so")
            if self.end is HANGS:
                await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise


@contextlib.asynccontextmanager
async def backend_over(verifier: Verifier) -> AsyncIterator[tuple[RoutedBackend, Router]]:
    server = grpc.aio.server()
    link_pb2_grpc.add_VerifierLinkServicer_to_server(verifier, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    router = Router(assigned(f"127.0.0.1:{port}"))
    backend = RoutedBackend(RouterClient(router, RouterPolicy()), gateway_id="g")
    try:
        yield backend, router
    finally:
        await backend.close()
        await server.stop(grace=None)


async def generate(backend: RoutedBackend, request: GenerationRequest = REQUEST) -> list[RequestOutput]:
    async with asyncio.timeout(20):
        return [output async for output in backend.generate(request)]


async def test_outputs_carry_the_callers_own_id_and_nothing_else_changes():
    verifier = Verifier([(1, 2), (3,)])
    async with backend_over(verifier) as (backend, _):
        outputs = await generate(backend)
    assert outputs == [
        RequestOutput(request_id="mine", token_ids=(1, 2), num_cached_tokens=2),
        RequestOutput(request_id="mine", token_ids=(3,), num_cached_tokens=2, finish_reason=FinishReason.STOP),
    ]


async def test_the_verifier_sees_the_request_with_the_routers_plan_and_an_id_of_the_fleet():
    verifier = Verifier([(1,)])
    async with backend_over(verifier) as (backend, router):
        await generate(backend)
    (seen,) = verifier.requests
    assert dataclasses.replace(seen, request_id="mine", plan=SpeculationPlan()) == REQUEST
    assert seen.plan == PLAN
    assert verifier.senders == ["g"]
    ((ask,),) = router.route.asked
    assert (ask.request_id, ask.num_prompt_tokens, ask.num_speculative_tokens) == (seen.request_id, 3, 2)


async def test_two_clients_may_choose_the_same_id():
    verifier = Verifier([(1,)])
    async with backend_over(verifier) as (backend, _):
        first, second = await asyncio.gather(generate(backend), generate(backend))
    assert first == second
    assert len({request.request_id for request in verifier.requests}) == 2
    assert all(request.request_id.startswith("g/") for request in verifier.requests)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
        (grpc.StatusCode.INTERNAL, RequestFailed),
    ],
)
async def test_the_verifiers_status_becomes_an_error_after_the_outputs_before_it(code: Any, kind: type[Exception]):
    async with backend_over(Verifier([(1,), (2,)], end=code)) as (backend, _):
        stream = backend.generate(REQUEST)
        assert [(await anext(stream)).token_ids for _ in range(2)] == [(1,), (2,)]
        with pytest.raises(kind, match="said so") as failure:
            await anext(stream)
    assert type(failure.value) is kind


async def test_a_verifier_that_is_not_there_is_unavailable():
    async with backend_over(Verifier([(1,)])) as (backend, router):
        router.answer = assigned("127.0.0.1:1")
        with pytest.raises(Unavailable):
            await generate(backend)


async def test_without_any_verifier_no_call_is_made():
    verifier = Verifier([(1,)])
    async with backend_over(verifier) as (backend, router):
        router.answer = None
        with pytest.raises(Unavailable, match="no verifier"):
            await generate(backend)
    assert verifier.requests == []


async def test_leaving_early_cancels_at_the_verifier():
    verifier = Verifier([(1,)], end=HANGS)
    async with backend_over(verifier) as (backend, _):
        stream = backend.generate(REQUEST)
        assert (await anext(stream)).token_ids == (1,)
        assert verifier.cancelled == []
        await stream.aclose()
        await until(lambda: verifier.cancelled)
        assert verifier.cancelled == [verifier.requests[0].request_id]


async def test_cancelling_the_caller_cancels_at_the_verifier():
    verifier = Verifier([], end=HANGS)
    async with backend_over(verifier) as (backend, _):
        caller = asyncio.ensure_future(generate(backend))
        await until(lambda: verifier.requests)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await until(lambda: verifier.cancelled)


async def test_one_channel_serves_all_requests_to_a_verifier():
    verifier = Verifier([(1,)])
    async with backend_over(verifier) as (backend, _):
        for _ in range(3):
            await generate(backend)
        assert len(backend._peers) == 1


async def test_a_verifier_that_is_gone_is_passed_over_while_nothing_was_published():
    verifier = Verifier([(1,)])
    async with backend_over(verifier) as (backend, router):
        good, asked = router.answer, []

        async def route(ask: RouteAsk) -> Assignment:
            asked.append(ask.excluded_verifier_ids)
            return good if ask.excluded_verifier_ids else dataclasses.replace(good, endpoint="127.0.0.1:1")

        router.route = type("Handle", (), {"remote": staticmethod(route)})
        assert [output.token_ids for output in await generate(backend)] == [(1,)]
    assert asked == [(), ("v",)]


async def test_a_request_is_tried_a_few_times_only():
    async with backend_over(Verifier([(1,)])) as (backend, router):
        router.answer = assigned("127.0.0.1:1")
        with pytest.raises(Unavailable):
            await generate(backend)
        assert len(router.route.asked) == routed_backend.MAX_ATTEMPTS


async def test_one_request_that_fails_leaves_the_others_on_its_channel_alone():
    class Moody(Verifier):
        async def Generate(self, frame: link_pb2.Frame, context: Any) -> AsyncIterator[link_pb2.Frame]:
            self.requests.append(decode(frame.payload, (GenerationRequest,)))
            if len(self.requests) > 1:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "not this one")
            await go_on.wait()
            last = RequestOutput(request_id="x", token_ids=(9,), finish_reason=FinishReason.STOP)
            yield link_pb2.Frame(payload=encode(last))

    verifier, go_on = Moody([]), asyncio.Event()
    async with backend_over(verifier) as (backend, _):
        first = asyncio.ensure_future(generate(backend))
        await until(lambda: verifier.requests)
        with pytest.raises(Unavailable):
            await generate(backend)
        go_on.set()
        await asyncio.wait([first])
        assert not first.cancelled(), "nobody cancelled it"
        assert first.result()[-1].token_ids == (9,)
