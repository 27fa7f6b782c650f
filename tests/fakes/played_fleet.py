"""A fleet for a gateway's backend: a client that plays the router, real gRPC servers that play verifiers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc

from fakes.engine_bench import EngineBench
from fakes.reports import verifier_report
from outrider.cluster.common.errors import Unavailable
from outrider.cluster.gateway.choice import Backend
from outrider.cluster.gateway.request_parser import ModelInfo
from outrider.cluster.gateway.rollout_memory import RolloutMemory
from outrider.cluster.gateway.routed_backend import RoutedBackend
from outrider.cluster.gateway.router_client import RouterClient
from outrider.cluster.router.fleet import (
    Assignment,
    FleetSnapshot,
    PlacementReason,
    RouteAsk,
    RouterPolicy,
    VerifierState,
)
from outrider.cluster.router.news import Cursor, FleetNews
from outrider.proto import link_pb2, link_pb2_grpc
from outrider.verifier_service.engine.service import GatewayStream, RequestTable, VerifierLinkServicer
from outrider.verifier_service.links.control_table import ControlTable
from outrider.verifier_service.messages.engine import Cancel, Published
from outrider.verifier_service.messages.link import CHANNEL_OPTIONS, payloads_of
from outrider.verifier_service.messages.request import (
    DisabledReason,
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SamplingParams,
    SpeculationPlan,
)
from outrider.verifier_service.messages.requests_link import FROM_GATEWAY, TO_GATEWAY, Accepted, Refused, StepOutputs
from outrider.verifier_service.messages.wire import decode, encode

HANGS = object()
PLAN = SpeculationPlan(drafter_id="d", draft_length=4)
MODEL = ModelInfo(name="m", max_model_len=64, vocab_size=97, eos_token_ids=(96,), created=0)
REQUEST = GenerationRequest(
    request_id="mine", prompt_token_ids=(1, 2, 3), sampling=SamplingParams(seed=4, num_speculative_tokens=2)
)
End = FinishReason | grpc.StatusCode | object  # INVALID_ARGUMENT refuses the request; other statuses end the stream


async def outputs_of(backend: Backend, request: GenerationRequest) -> AsyncGenerator[RequestOutput]:
    """Yield what a backend tells of a request, and raise its error; closing the generator cancels the request."""
    heard: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
    call = asyncio.create_task(backend.generate(request, heard.put_nowait))
    call.add_done_callback(lambda _: heard.put_nowait(None))
    try:
        while (output := await heard.get()) is not None:
            yield output
        await call
    finally:
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


# --- the router ---


class Router(RouterClient):
    """A gateway's client of a router, which chooses by a script instead of news.

    It gives `answer`; where that is None, what `choose` says, which says at first what `endpoints` has, in their order.
    """

    def __init__(self) -> None:
        super().__init__(None, "g")
        self.answer: Assignment | None = None
        self.choose: Callable[[RouteAsk], Assignment | None] = self.first
        self.endpoints: dict[str, str] = {}
        self.asks: list[RouteAsk] = []

    def route(self, ask: RouteAsk) -> Assignment:
        self.asks.append(ask)
        chosen = self.choose(ask) if self.answer is None else self.answer
        if chosen is None or (chosen is self.answer and chosen.verifier_id in ask.excluded_verifier_ids):
            raise Unavailable("no verifier is ready")
        return chosen

    def first(self, ask: RouteAsk) -> Assignment | None:
        for verifier_id, endpoint in self.endpoints.items():
            if verifier_id not in ask.excluded_verifier_ids:
                return Assignment(verifier_id=verifier_id, endpoint=endpoint, plan=PLAN, reason=PlacementReason.ONLY)
        return None

    def know(self, fleet: FleetSnapshot) -> None:
        """Take a fleet's state as news."""
        self.view.take(news_of(fleet))


class Handle:
    """A handle to a deployment's replica in this process: `handle.method.remote(…)`, or a stream of what it yields."""

    def __init__(self, replica: Any) -> None:
        self._replica = replica

    def __getattr__(self, name: str) -> _Method:
        return _Method(getattr(self._replica, name))


class _Method:
    def __init__(self, method: Callable[..., Any], *, is_stream: bool = False) -> None:
        self._method, self._is_stream = method, is_stream

    def options(self, *, stream: bool) -> _Method:
        return _Method(self._method, is_stream=stream)

    def remote(self, *arguments: Any) -> Any:
        called = self._method(*arguments)
        return _Answers(called) if self._is_stream else called


class _Answers:
    def __init__(self, answers: AsyncGenerator[Any]) -> None:
        self._answers = answers
        self.is_cancelled = False

    async def __anext__(self) -> Any:
        return await anext(self._answers)

    def cancel(self) -> None:
        self.is_cancelled = True


def news_of(fleet: FleetSnapshot, version: int = 1, *, is_whole: bool = True) -> FleetNews:
    """Return news of a router that says all, or what has changed."""
    return FleetNews(cursor=Cursor(epoch=1, version=version), is_whole=is_whole, changed=fleet, policy=RouterPolicy())


def snapshot_of(*verifier_ids: str, age_s: float = 0.0, **report: Any) -> FleetSnapshot:
    """Return a snapshot of verifiers that all report the same."""
    now_s = time.time() - age_s
    figures = {"num_running": 0, "num_waiting": 0, "num_decoding": 0, "kv_usage": 0.0, **report}
    return FleetSnapshot(
        verifiers=tuple(
            VerifierState(
                report=verifier_report(name, **figures),
                reported_s=now_s,
                default_plan=SpeculationPlan(disabled_reason=DisabledReason.LOAD),
            )
            for name in verifier_ids
        ),
        drafters=(),
        decided_at_s=now_s,
    )


# --- verifiers ---


class PlayedVerifier(link_pb2_grpc.VerifierLinkServicer):
    """A verifier that answers each request by itself, over its gateway's stream."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []
        self.senders: list[str] = []
        self.cancelled: list[str] = []

    def answer(self, request: GenerationRequest) -> AsyncGenerator[Any]:
        """Yield messages, or bytes of one; a status, or None, ends the stream."""
        raise NotImplementedError

    async def Serve(self, frames: AsyncIterator[link_pb2.Frame], context: Any) -> AsyncIterator[link_pb2.Frame]:
        said: asyncio.Queue[Any] = asyncio.Queue()
        tasks: dict[str, asyncio.Task[None]] = {}
        hearing = asyncio.create_task(self._hear(frames, said, tasks))
        try:
            while (message := await said.get()) is not None:
                if isinstance(message, grpc.StatusCode):
                    await context.abort(message, "said so")
                yield link_pb2.Frame(payload=message if isinstance(message, bytes) else encode(message))
        finally:
            for task in (hearing, *tasks.values()):
                task.cancel()

    async def _hear(
        self, frames: AsyncIterator[link_pb2.Frame], said: asyncio.Queue[Any], tasks: dict[str, asyncio.Task[None]]
    ) -> None:
        async for frame in frames:
            for payload in payloads_of(frame):
                message = decode(payload, FROM_GATEWAY)
                if isinstance(message, Cancel):
                    tasks.pop(message.request_id).cancel()
                    continue
                self.requests.append(message)
                self.senders.append(frame.sender)
                tasks[message.request_id] = asyncio.create_task(self._play(message, said))

    async def _play(self, request: GenerationRequest, said: asyncio.Queue[Any]) -> None:
        try:
            async with contextlib.aclosing(self.answer(request)) as messages:
                async for message in messages:
                    said.put_nowait(StepOutputs(outputs=(message,)) if isinstance(message, RequestOutput) else message)
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise


class ScriptedVerifier(PlayedVerifier):
    """A verifier that streams the outputs of a script, then ends as it says. A step is its tokens or an output."""

    def __init__(self, script: Sequence[Any], *, end: End = FinishReason.STOP, accepts: bool = True) -> None:
        super().__init__()
        self.script, self.end, self.accepts = script, end, accepts

    async def answer(self, request: GenerationRequest) -> AsyncGenerator[Any]:
        if self.accepts:
            yield Accepted(request_id=request.request_id)
        for index, step in enumerate(self.script, start=1):
            is_last = index == len(self.script) and isinstance(self.end, FinishReason)
            yield self._output(request, step, self.end if is_last else None)
        if self.end is HANGS:
            await asyncio.get_running_loop().create_future()
        if self.end is grpc.StatusCode.INVALID_ARGUMENT:
            yield Refused(request_id=request.request_id, error="said so")
        elif self.end is None or isinstance(self.end, grpc.StatusCode):
            yield self.end

    def _output(self, request: GenerationRequest, step: Any, finish_reason: Any) -> RequestOutput | bytes:
        if isinstance(step, bytes):
            return step
        if isinstance(step, RequestOutput):
            return dataclasses.replace(step, request_id=request.request_id)
        return RequestOutput(
            request_id=request.request_id, token_ids=step, num_cached_tokens=2, finish_reason=finish_reason
        )


class EngineVerifier(VerifierLinkServicer):
    """A verifier with an engine over the fake target.

    It dies once it has published `dies_after` tokens, or in its step `dies_in_step`.
    """

    def __init__(self, dies_after: int | None = None, dies_in_step: int | None = None, **options: Any) -> None:
        self.table = RequestTable(self._send)
        super().__init__(self.table, ControlTable(lambda _: None))
        self.requests: list[GenerationRequest] = []
        self._bench = EngineBench(**options)
        self._num_left, self._num_steps_left = dies_after, dies_in_step
        self._is_dead = False
        self._stepping: asyncio.Task[None] | None = None

    def _send(self, message: bytes | Cancel) -> None:
        if self._is_dead:
            raise ConnectionError("the engine is gone")
        if isinstance(message, Cancel):
            self._bench.engine.cancel(message.request_id)
            return
        request = decode(message, (GenerationRequest,))
        self.requests.append(request)
        if (failure := self._bench.engine.add(request)) is not None:
            self._publish([failure])
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while self._bench.engine.has_work() and not self._is_dead:
            self._publish(self._bench.step() or [])
            if self._num_steps_left is not None:
                self._num_steps_left -= 1
                if self._num_steps_left == 0:
                    self._die()
            self._bench.now_s += self._bench.engine.idle_s() or 0.0
            await asyncio.sleep(0)

    def _publish(self, outputs: list[RequestOutput]) -> None:
        self.table.deliver(map(Published.of, outputs))
        if self._num_left is not None:
            self._num_left -= sum(len(output.token_ids) for output in outputs)
            if self._num_left <= 0:
                self._die()

    def _die(self) -> None:
        self._is_dead = True
        self.table.fail("killed")


async def outputs_at(table: RequestTable, request: GenerationRequest) -> AsyncGenerator[RequestOutput | None]:
    """Play a gateway with one request: yield None once the engine has it, then its outputs.

    Raises `ConnectionError` where the engine is lost, else `ValueError`. Closing the generator early cancels it.
    """
    stream = GatewayStream()
    table.take(stream, encode(request))
    try:
        async with contextlib.aclosing(stream.frames()) as frames, contextlib.aclosing(_news_of(frames)) as news:
            async for each in news:
                yield each
    finally:
        table.close(stream)


async def outputs_over(stub: Any, request: GenerationRequest) -> AsyncGenerator[RequestOutput | None]:
    """Do the same over a channel; raises what the call does, too."""
    call = stub.Serve()
    try:
        await call.write(link_pb2.Frame(sender="g", payload=encode(request)))
        async with contextlib.aclosing(_news_of(call)) as news:
            async for each in news:
                yield each
    finally:
        call.cancel()


async def _news_of(frames: AsyncIterator[link_pb2.Frame]) -> AsyncGenerator[RequestOutput | None]:
    """Yield what comes of one request, to its last output."""
    async for frame in frames:
        for payload in payloads_of(frame):
            message = decode(payload, TO_GATEWAY)
            if isinstance(message, Refused):
                raise (ConnectionError if message.is_lost else ValueError)(message.error)
            for output in message.outputs if isinstance(message, StepOutputs) else (None,):
                yield output
                if output is not None and output.finish_reason is not None:
                    return


async def serve(verifier: link_pb2_grpc.VerifierLinkServicer, address: str = "127.0.0.1:0") -> tuple[Any, str]:
    """Start a verifier's server; return it and its endpoint."""
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    link_pb2_grpc.add_VerifierLinkServicer_to_server(verifier, server)
    port = server.add_insecure_port(address)
    await server.start()
    return server, f"127.0.0.1:{port}"


class Fleet:
    """Verifiers v0, v1, … behind a router that names the first that is not excluded."""

    def __init__(
        self,
        *,
        max_queued_requests: int = 1024,
        failover_timeout_s: float = 10.0,
        memory: RolloutMemory | None = None,
        kv_peers: Sequence[str] = (),
    ) -> None:
        self.router = Router()
        self.backend = RoutedBackend(
            self.router,
            "g",
            MODEL,
            max_queued_requests=max_queued_requests,
            failover_timeout_s=failover_timeout_s,
            memory=memory,
            kv_peers=kv_peers,
            on_handover=self._hear_handover,
        )
        self.handovers: list[tuple[str, str, bool]] = []  # outcome, reason, whether the client waited
        self.stops: list[Callable[[], Awaitable[None]]] = []

    def _hear_handover(self, outcome: str, reason: str = "", *, waited_s: float | None = None) -> None:
        self.handovers.append((outcome, reason, waited_s is not None))

    async def add(self, verifier: link_pb2_grpc.VerifierLinkServicer, address: str = "127.0.0.1:0") -> Any:
        """Start a verifier and let the router know it; return its server."""
        server, endpoint = await serve(verifier, address)
        self.stops.append(lambda: server.stop(None))
        self.router.endpoints[f"v{len(self.router.endpoints)}"] = endpoint
        return server

    async def generate(self, request: GenerationRequest = REQUEST) -> list[RequestOutput]:
        async with asyncio.timeout(20):
            return [output async for output in outputs_of(self.backend, request)]


@contextlib.asynccontextmanager
async def fleet_of(*verifiers: link_pb2_grpc.VerifierLinkServicer, **options: Any) -> AsyncIterator[Fleet]:
    fleet = Fleet(**options)
    try:
        for verifier in verifiers:
            await fleet.add(verifier)
        yield fleet
    finally:
        await fleet.backend.close()
        for stop in fleet.stops:
            await stop()


def tokens_of(outputs: Sequence[RequestOutput]) -> tuple[int, ...]:
    return tuple(token_id for output in outputs for token_id in output.token_ids)
