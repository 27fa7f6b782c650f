"""The directory of a pool without verifiers: other engines report here and are told their drafters."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from ray import serve
from starlette.types import ASGIApp

from outrider.cluster.api.access import admin_paths
from outrider.cluster.api.authentication import ApiKeyMiddleware
from outrider.cluster.api.learner_routes import add_learner_actions, add_learner_status
from outrider.cluster.api.openai.endpoints import prepare
from outrider.cluster.common.api_keys import ApiKeys
from outrider.cluster.common.background import BackgroundTasks
from outrider.cluster.common.logs import configure_logging
from outrider.cluster.common.reports import ask_router
from outrider.cluster.config.drafters_config import DraftersConfig
from outrider.cluster.gateway.learner_control import LearnerControl
from outrider.cluster.gateway.router_client import RouterClient
from outrider.cluster.monitoring.fleet_metrics import FleetMetrics
from outrider.cluster.replicas.directory_servicer import DirectoryServicer
from outrider.cluster.replicas.engine_host import SERVER_GRACE_S, open_port
from outrider.proto.link_pb2_grpc import add_DrafterDirectoryServicer_to_server


@serve.ingress()
class DirectoryReplica:
    """The directory as a Serve replica. `pools` is not used: Serve deploys the pools because they are arguments."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: DraftersConfig, router: Any, learners: Mapping[str, Any], *pools: Any
    ) -> None:
        """`learners`: the handles of the learners, by their pools' names."""
        configure_logging(config.log_format, replica="directory")
        self._router = RouterClient(router, "directory")
        self._tasks = BackgroundTasks()
        self._tasks.start(self._router.follow(), "follow the router")
        registry = CollectorRegistry()
        registry.register(
            FleetMetrics(lambda: self._router.snapshot, model_name=config.model.name, wall_clock=time.time)
        )
        control = LearnerControl(learners, lambda: self._router.snapshot) if config.learning else None
        self._api = drafters_api(config, registry, control)
        servicer = DirectoryServicer(
            lambda report: ask_router(router.report_verifier, report),
            lambda verifier_id: ask_router(router.remove, verifier_id),
        )
        self._server, _ = await open_port(
            config.public_host,
            lambda server: add_DrafterDirectoryServicer_to_server(servicer, server),
            config.links,
            config.grpc_port,
        )

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._api

    async def check_health(self) -> None:
        """Raise if this replica can no longer serve."""
        self._tasks.check()

    async def __del__(self) -> None:
        await self._server.stop(SERVER_GRACE_S)
        await self._tasks.stop()


def drafters_api(config: DraftersConfig, registry: CollectorRegistry, control: LearnerControl | None) -> ASGIApp:
    """Return the HTTP application of a pool without verifiers, behind its keys."""
    app, keys = drafters_app(registry, control), ApiKeys(config.access.api_key_hashes)
    return ApiKeyMiddleware(app, keys, admin_paths=admin_paths(app.routes), is_private=config.is_private)


def drafters_app(registry: CollectorRegistry, control: LearnerControl | None) -> FastAPI:
    """Return the application with all its doors; `control`: of the pool's learners, if there are any."""
    app = FastAPI(openapi_url=None)
    prepare(app)
    if control is not None:
        add_learner_status(app, control)
        add_learner_actions(app, control)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app
