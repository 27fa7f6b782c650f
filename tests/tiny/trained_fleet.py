"""A fleet for trainers, without Ray: tiny models on real engine loops, gRPC, a router, the HTTP application."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import grpc
import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from exactness.small_engines import load
from fakes.backend import build_tokenizer
from fakes.played_fleet import Handle
from outrider.cluster.api.openai.endpoints import build_api
from outrider.cluster.api.rollouts.doors import TrainerDoors
from outrider.cluster.api.rollouts.trainer_routes import add_trainer_routes
from outrider.cluster.gateway.fleet_control import FleetControl
from outrider.cluster.gateway.gateway import Gateway, ModelInfo
from outrider.cluster.gateway.learner_control import LearnerControl
from outrider.cluster.gateway.rollout_memory import RolloutMemory
from outrider.cluster.gateway.routed_backend import RoutedBackend
from outrider.cluster.gateway.router_client import RouterClient
from outrider.cluster.monitoring.metrics import GatewayMetrics
from outrider.cluster.peers.every_gateway import EveryGateway
from outrider.cluster.replicas.desired_state import fleet_pause
from outrider.cluster.replicas.engine_shell import EngineShell
from outrider.cluster.replicas.router_replica import RouterReplica
from outrider.cluster.router.fleet import RouterPolicy, VerifierReport
from outrider.proto import link_pb2_grpc
from outrider.verifier_service.engine.factory import build_engine
from outrider.verifier_service.engine.loop import EngineLoop
from outrider.verifier_service.engine.service import RequestTable, VerifierLinkServicer
from outrider.verifier_service.engine.verifier_spec import VerifierSpec
from outrider.verifier_service.links.control_rules import ControlRules
from outrider.verifier_service.links.control_table import ControlTable
from outrider.verifier_service.links.relay_client import RelayDraftClient
from outrider.verifier_service.messages.engine import FROM_ENGINE, EngineUpdate
from outrider.verifier_service.messages.link import CHANNEL_OPTIONS
from outrider.verifier_service.messages.request import LogprobsMode
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.refit.rank_weights import RankWeights
from support.waiting import until
from tiny.models import VOCAB_SIZE, make_model

MAX_MODEL_LEN = 256
EOS = 2


class TinyVerifier:
    """An engine with a tiny model, in its loop on a thread, behind a gRPC port; it reports to the router's core."""

    def __init__(self, verifier_id: str, folder: Path, router: RouterReplica) -> None:
        self.verifier_id, self._router = verifier_id, router
        self.endpoint = ""
        self.runner = load(make_model(), folder)
        self.weights = RankWeights(self.runner)
        near, far = Pipe()
        self._thread = threading.Thread(target=self._run, args=(far,), daemon=True)
        self._shell = EngineShell(near, FROM_ENGINE, on_message=self._hear, on_failure=lambda _: None)
        self.table, self.control = RequestTable(self._shell.send), ControlTable(self._shell.send)
        self._server = grpc.aio.server(options=CHANNEL_OPTIONS)
        self._pause = fleet_pause(self.control, time.monotonic)
        self._following: asyncio.Task[None] | None = None
        self.error: BaseException | None = None
        self._running: set[str] = set()
        self._reporting = asyncio.create_task(self._report_forever())
        self._reports: asyncio.Queue[VerifierReport] = asyncio.Queue()

    @property
    def num_running(self) -> int:
        """How many requests have tokens and are not finished; those that were cancelled count."""
        return len(self._running)

    async def start(self) -> None:
        servicer = VerifierLinkServicer(self.table, self.control, rules=ControlRules(is_open=True))
        link_pb2_grpc.add_VerifierLinkServicer_to_server(servicer, self._server)
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        self._shell.start()
        self._thread.start()
        self._following = asyncio.create_task(self._pause.run())

    def _run(self, pipe: Any) -> None:
        links = RelayDraftClient()
        spec = VerifierSpec(model=ModelConfig(path="tiny", device="cpu"), rollouts=True)
        engine = build_engine(self.runner, spec, links, has_grammars=False)
        try:
            EngineLoop(
                *(engine, links, pipe),
                clock=time.monotonic,
                check_integrity=True,
                weights=self.weights,
            ).run()
        except BaseException as error:
            self.error = error
        finally:
            pipe.close()

    def _hear(self, update: EngineUpdate) -> None:
        for output in update.outputs:
            self._running.add(output.request_id)
            if output.is_last:
                self._running.discard(output.request_id)
        self.table.deliver(update.outputs)
        self.control.deliver(update.results)
        if update.load is not None:
            report = VerifierReport(
                verifier_id=self.verifier_id, endpoint=self.endpoint, epoch=1, load=update.load, dtype="float32"
            )
            self._reports.put_nowait(report)

    async def _report_forever(self) -> None:
        while True:
            directive = await self._router.report_verifier(await self._reports.get())
            self._pause.want(directive.pause)

    async def stop(self) -> None:
        """End as a killed replica does."""
        self._reporting.cancel()
        await self._router.remove(self.verifier_id)
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self._server.stop(grace=None)
        self._shell.close()
        await asyncio.to_thread(self._thread.join)
        assert self.error is None


@dataclass
class TrainedFleet:
    """What a trainer reaches over HTTP."""

    http: httpx.AsyncClient
    app: FastAPI
    gateway: Gateway
    router: RouterReplica
    fleet: FleetControl
    folder: Path
    verifiers: list[TinyVerifier] = field(default_factory=list)

    @property
    def num_running(self) -> int:
        """How many requests have tokens and are not finished, where none was cancelled."""
        return sum(verifier.num_running for verifier in self.verifiers)

    async def add_verifier(self, name: str, folder: Path | None = None) -> TinyVerifier:
        """Start another verifier, which has the first weights; wait until the gateway knows of it."""
        verifier = TinyVerifier(name, folder or self.folder / name, self.router)
        await verifier.start()
        self.verifiers.append(verifier)
        await until(lambda: any(report.verifier_id == name for report in self.fleet.verifiers))
        return verifier


@contextlib.asynccontextmanager
async def trained_fleet(folder: Path, num_verifiers: int = 1) -> AsyncIterator[TrainedFleet]:
    """Serve a tiny llama on `num_verifiers` verifiers, in rollouts."""
    router = RouterReplica(RouterPolicy())
    client = RouterClient(Handle(router), "g")
    info = ModelInfo(
        name="tiny",
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        created=0,
        logprobs_mode=LogprobsMode.PROCESSED,
        rollouts=True,
    )
    memory = RolloutMemory()
    backend = RoutedBackend(client, "g", info, max_queued_requests=1024, failover_timeout_s=10.0, memory=memory)
    metrics = GatewayMetrics(CollectorRegistry(), model_name="tiny")
    gateway = Gateway(info, build_tokenizer(), backend, metrics, time.monotonic, memory=memory)

    async def is_healthy() -> bool:
        return bool(control.verifiers)

    control = FleetControl.over_links(client, None)
    app = build_api(gateway, is_healthy)
    doors = TrainerDoors(
        every=EveryGateway(gateway),
        fleet=control,
        is_healthy=is_healthy,
        model_path=str(folder / "v0"),
        tensor_parallel_size=1,
        learners=LearnerControl({}, lambda: client.snapshot),
    )
    add_trainer_routes(app, doors)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=60.0) as http:
        fleet = TrainedFleet(http, app, gateway, router, control, folder)
        following = asyncio.create_task(client.follow())
        for index in range(num_verifiers):
            await fleet.add_verifier(f"v{index}")
        try:
            yield fleet
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            for verifier in fleet.verifiers:
                await verifier.stop()
            await backend.close()
