"""The gateway with all its doors before a backend that plays a script: everything has a default."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import httpx
import openai
import uvicorn
from fastapi import FastAPI
from transformers import PreTrainedTokenizerFast

from fakes.backend import FakeBackend, Step, build_gateway, build_tokenizer, says
from outrider.cluster.api.grpc_api import RunningGrpcServer, start_grpc_server
from outrider.cluster.api.openai.endpoints import build_api
from outrider.cluster.api.rollouts.doors import TrainerDoors
from outrider.cluster.api.rollouts.trainer_routes import add_trainer_routes
from outrider.cluster.gateway.fleet_control import FleetControl
from outrider.cluster.gateway.gateway import Gateway
from outrider.cluster.gateway.learner_control import LearnerControl
from outrider.cluster.peers.every_gateway import EveryGateway
from outrider.verifier_service.messages.request import FinishReason, GenerationRequest, SpeculationMetrics
from support.waiting import healthy

Script = Callable[[GenerationRequest], Sequence[Step]]
shared_tokenizer = functools.cache(build_tokenizer)  # by its chat template; who adds tokens builds one


@dataclass(frozen=True, slots=True)
class Rpc:
    """A gateway's gRPC server, and a channel to it."""

    running: RunningGrpcServer
    channel: grpc.aio.Channel


class Stack:
    """A gateway, its HTTP application and its gRPC server.

    `played` is what the model says, a token a step, or its steps, or a script of requests, or a whole backend. What is
    named nowhere here is an option of `build_gateway`. In rollouts the trainers' doors are there.
    """

    def __init__(
        self,
        played: str | Sequence[Step] | Script | Any = "fox",
        *,
        tokenizer: PreTrainedTokenizerFast | None = None,
        finish_reason: FinishReason | None = FinishReason.LENGTH,
        speculation: SpeculationMetrics | None = None,
        is_healthy: Callable[[], Awaitable[bool]] = healthy,
        api: Mapping[str, Any] | None = None,
        **gateway: Any,
    ) -> None:
        self.tokenizer: PreTrainedTokenizerFast = tokenizer or shared_tokenizer()
        self.is_healthy, self._api = is_healthy, dict(api or {})
        if hasattr(played, "generate"):
            self.backend = played
        else:
            self.backend = FakeBackend(self._script(played), finish_reason=finish_reason, speculation=speculation)
        self.gateway: Gateway = build_gateway(self.backend, self.tokenizer, **gateway)

    def _script(self, played: str | Sequence[Step] | Script) -> Script:
        if callable(played):
            return played
        steps = says(self.tokenizer, played) if isinstance(played, str) else played
        return lambda _: steps

    # --- what was asked ---

    @property
    def requests(self) -> list[GenerationRequest]:
        """Return what reached the backend."""
        return self.backend.requests

    @property
    def prompts(self) -> list[str]:
        """Return what the model was given, as text."""
        return [self.tokenizer.decode(list(request.prompt_token_ids)) for request in self.requests]

    # --- HTTP ---

    @functools.cached_property
    def app(self) -> FastAPI:
        """The application, with `build_api`'s options of `api`."""
        app = build_api(self.gateway, self.is_healthy, **{"wall_clock": lambda: 1_700_000_000.0, **self._api})
        if self.gateway.model.rollouts:
            add_trainer_routes(app, self._trainer_doors())
        return app

    def _trainer_doors(self) -> TrainerDoors:
        fleet = FleetControl(NoRouter(), no_verifier, no_verifier)
        return TrainerDoors(
            every=EveryGateway(self.gateway),
            fleet=fleet,
            is_healthy=self.is_healthy,
            model_path="",
            tensor_parallel_size=1,
            learners=LearnerControl({}, lambda: None),
        )

    def client(self, wrap: Callable[[Any], Any] = lambda app: app, **options: Any) -> httpx.AsyncClient:
        """Return a client within this process; `wrap` puts a middleware before the application."""
        transport = httpx.ASGITransport(wrap(self.app))
        return httpx.AsyncClient(transport=transport, base_url="http://gateway", **options)

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        """Return OpenAI's client, within this process."""
        options = {"api_key": "x", "max_retries": 0, **options}
        return openai.AsyncOpenAI(base_url="http://gateway/v1", http_client=self.client(), **options)

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        async with self.client() as client:
            return await client.post(path, json=body, headers=headers)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve the application on a port of this machine; yield its URL."""
        async with serving(self.app) as url:
            yield url

    # --- gRPC ---

    @asynccontextmanager
    async def rpc(self, **options: Any) -> AsyncIterator[Rpc]:
        """Serve gRPC, both protocols, on a port of this machine."""
        running = await start_grpc_server(self.gateway, "127.0.0.1:0", **options)
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{running.port}")
        try:
            yield Rpc(running, channel)
        finally:
            await channel.close()
            await running.server.stop(None)


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """Serve an application on a port of this machine; yield its URL."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


class NoRouter:
    """A router that has heard of nobody."""

    snapshot: None = None

    async def refresh(self) -> None:
        pass


async def no_verifier(endpoint: str, message: object) -> NoReturn:
    raise AssertionError(f"there is no verifier at {endpoint}")
