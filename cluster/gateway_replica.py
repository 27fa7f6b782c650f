"""The gateway as a Serve replica: the HTTP ingress, and a gRPC server of its own."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from ray import serve

from outrider.cluster.background import BackgroundTasks
from outrider.cluster.config import ServiceConfig
from outrider.cluster.gateway import Gateway, ModelInfo
from outrider.cluster.grpc_api import start_grpc_server
from outrider.cluster.metrics import GatewayMetrics
from outrider.cluster.openai_api import build_api
from outrider.cluster.routed_backend import RoutedBackend, RouterClient
from outrider.cluster.tokenizer import load_tokenizer
from outrider.verifier_service.architectures import load_model_description, resolve_folder
from outrider.verifier_service.model_config import ModelConfig
from outrider.verifier_service.model_runner import read_eos_token_ids


@serve.ingress()
class GatewayReplica:
    """One replica of the gateway. `pools` only makes Serve deploy the pools with it."""

    async def __init__(self, config: ServiceConfig, router: Any, *pools: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        self._router = RouterClient(router, config.router_policy)
        self._tasks = BackgroundTasks()
        self._tasks.start(self._router.follow(), "follow the router")
        gateway_id = serve.get_replica_context().replica_id.unique_id
        self._backend = RoutedBackend(self._router, gateway_id)
        model = config.verifier_spec.model
        self._gateway = Gateway(
            model_info(config.model_name, model, await self._router.max_model_len()),
            load_tokenizer(model),
            self._backend,
            GatewayMetrics(CollectorRegistry(), model_name=config.model_name),
            time.monotonic,
        )
        self._grpc_server = await start_grpc_server(self._gateway, f"{config.host}:{config.grpc_port}")

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_api(self._gateway, self._has_verifier)

    async def _has_verifier(self) -> bool:
        snapshot = self._router.snapshot
        return snapshot is not None and bool(snapshot.verifiers)

    async def check_health(self) -> None:
        """Raise when this replica can no longer serve."""
        self._tasks.check()

    async def __del__(self) -> None:
        await self._tasks.stop()
        await self._grpc_server.drain(1.0)
        await self._backend.close()


def model_info(name: str, model: ModelConfig, max_model_len: int) -> ModelInfo:
    """Describe a model from its files, without loading its weights; its verifiers know how long a sequence may be."""
    folder = resolve_folder(model)
    description = load_model_description(folder, model)
    return ModelInfo(
        name=name,
        max_model_len=max_model_len,
        vocab_size=description.vocab_size,
        eos_token_ids=read_eos_token_ids(folder, description),
        created=int(time.time()),
    )
