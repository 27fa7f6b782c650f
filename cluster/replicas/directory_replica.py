"""The directory of a pool without verifiers: other engines report here and are told their drafters."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import grpc
from fastapi import FastAPI, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from ray import serve

from outrider.cluster.api.learner_routes import add_learner_actions, add_learner_status
from outrider.cluster.api.malformed_calls import MalformedCallInterceptor
from outrider.cluster.api.openai.endpoints import prepare
from outrider.cluster.common.background import BackgroundTasks
from outrider.cluster.common.logs import configure_logging
from outrider.cluster.common.reports import ask_router
from outrider.cluster.common.security import bind
from outrider.cluster.config.drafters_config import DraftersConfig
from outrider.cluster.config.service_config import LOOPBACK
from outrider.cluster.gateway.learner_control import LearnerControl
from outrider.cluster.gateway.routed_backend import RouterClient
from outrider.cluster.monitoring.fleet_metrics import FleetMetrics
from outrider.cluster.replicas.directory_servicer import DirectoryServicer
from outrider.proto.link_pb2_grpc import add_DrafterDirectoryServicer_to_server
from outrider.verifier_service.messages.link import CHANNEL_OPTIONS

SERVER_GRACE_S = 0.5


@serve.ingress()
class DirectoryReplica:
    """The directory as a Serve replica. `pools` is not used: Serve deploys the pools because they are arguments."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: DraftersConfig, router: Any, learners: Mapping[str, Any], *pools: Any
    ) -> None:
        """`learners`: the handles of the learners, by their pools' names."""
        configure_logging(config.log_format, replica="directory")
        self._router = RouterClient(router, config.router_policy)
        self._tasks = BackgroundTasks()
        self._tasks.start(self._router.follow(), "follow the router")
        registry = CollectorRegistry()
        registry.register(
            FleetMetrics(lambda: self._router.snapshot, model_name=config.model.name, wall_clock=time.time)
        )
        self._api = _api(registry)
        if config.learning:
            control = LearnerControl(learners, lambda: self._router.snapshot)
            add_learner_status(self._api, control)
            if config.host in LOOPBACK:  # this port asks for no key: whoever passes changes the weights
                add_learner_actions(self._api, control)
        self._server = grpc.aio.server(interceptors=(MalformedCallInterceptor(),), options=CHANNEL_OPTIONS)
        servicer = DirectoryServicer(
            lambda report: ask_router(router.report_verifier, report),
            lambda verifier_id: ask_router(router.remove, verifier_id),
        )
        add_DrafterDirectoryServicer_to_server(servicer, self._server)
        bind(self._server, config.address(config.grpc_port), config.links.server_credentials)
        await self._server.start()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._api

    async def check_health(self) -> None:
        """Raise if this replica can no longer serve."""
        self._tasks.check()

    async def __del__(self) -> None:
        await self._server.stop(SERVER_GRACE_S)
        await self._tasks.stop()


def _api(registry: CollectorRegistry) -> FastAPI:
    app = FastAPI(openapi_url=None)
    prepare(app)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app
