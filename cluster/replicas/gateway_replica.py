"""The gateway as a Serve replica: the HTTP ingress, and its own gRPC server."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from ray import serve
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from outrider.cluster.api.access import admin_paths
from outrider.cluster.api.authentication import ApiKeyInterceptor, ApiKeyMiddleware
from outrider.cluster.api.grpc_api import SERVER_OPTIONS, RunningGrpcServer, start_grpc_server
from outrider.cluster.api.http_server import HttpServer
from outrider.cluster.api.learner_routes import add_learner_actions, add_learner_status
from outrider.cluster.api.openai.endpoints import Scrape, build_api
from outrider.cluster.api.openai.response_store import Responses
from outrider.cluster.api.request_ids import RequestIdInterceptor, RequestIdMiddleware
from outrider.cluster.api.rollouts.doors import TrainerDoors
from outrider.cluster.api.rollouts.trainer_routes import add_trainer_routes
from outrider.cluster.common.api_keys import ApiKeys
from outrider.cluster.common.background import BackgroundTasks
from outrider.cluster.common.extras import require_extra
from outrider.cluster.common.logs import configure_logging
from outrider.cluster.common.security import is_loopback
from outrider.cluster.config.service_config import OUTRIDER, GatewayOptions, ServiceConfig
from outrider.cluster.gateway.fleet_control import FleetControl, TrainerLimits
from outrider.cluster.gateway.gateway import Gateway, ModelInfo
from outrider.cluster.gateway.learner_control import LearnerControl
from outrider.cluster.gateway.rollout_memory import MemoryLimits, Recorded, RolloutMemory
from outrider.cluster.gateway.routed_backend import RoutedBackend
from outrider.cluster.gateway.router_client import RouterClient
from outrider.cluster.monitoring.fleet_load import fleet_load
from outrider.cluster.monitoring.fleet_metrics import FleetMetrics
from outrider.cluster.monitoring.metrics import GatewayMetrics
from outrider.cluster.monitoring.shared_metrics import SharedMetrics
from outrider.cluster.peers.every_gateway import EveryGateway, answers_of
from outrider.cluster.peers.messages import AskResponse, Kept
from outrider.cluster.peers.others import GatewayLinkServicer, Others
from outrider.cluster.replicas.engine_host import SERVER_GRACE_S, open_port
from outrider.cluster.replicas.node_address import internal_address, with_closed_links
from outrider.cluster.replies.reader import ReplySyntax
from outrider.proto import link_pb2_grpc
from outrider.verifier_service.messages.request import AcceptanceRule, LogprobsMode
from outrider.verifier_service.model.architectures import (
    read_description,
    read_eos_token_ids,
    read_sampling_defaults,
    resolve_description,
)
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.tokenizer import load_tokenizer
from outrider.verifier_service.start_phases import begin_phases, tell_phase
from outrider.verifier_service.without_torch import import_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from outrider.cluster.gateway.tracing import Tracing

# the gateways of a node share a port; `serving` checks that no other program holds it
GRPC_OPTIONS = {**SERVER_OPTIONS, "grpc.so_reuseport": 1}


@serve.ingress()
class GatewayReplica:
    """One replica of the gateway. `pools` is not used: Serve deploys the pools because they are arguments."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ServiceConfig, router: Any, learners: Mapping[str, Any], *pools: Any
    ) -> None:
        """`learners`: the handles of the learners, by their pools' names."""
        config = with_closed_links(config)
        self._drain_timeout_s = config.drain_timeout_s
        gateway_id = serve.get_replica_context().replica_id.unique_id
        self._router = RouterClient(router, gateway_id)
        self._learners = LearnerControl(learners, lambda: self._router.snapshot)
        self._tasks = BackgroundTasks()
        self._tasks.start(self._router.follow(), "follow the router")
        configure_logging(config.log_format, replica=f"gateway/{gateway_id}")
        begin_phases("gateway", "reading the tokenizer")
        self._tracing = tracing_of(config.gateway, gateway_id)
        model = config.verifier_spec.model
        tokenizer = await asyncio.to_thread(_load_tokenizer, model)  # meanwhile verifiers load
        tell_phase("waiting for a verifier")
        info = model_info(
            config.model.name,
            model,
            await self._router.max_model_len(),
            config.speculative.rejection_sample_method,
            config.logprobs_mode,
            reads_generation_config=config.reads_generation_config,
            adapters=tuple(config.verifiers.lora_modules),
            rollouts=config.verifiers.rollouts,
            learns=bool(config.learning),
            hands_over=config.verifiers.engine == OUTRIDER,
            allows_lossy=config.gateway.allow_typical_acceptance,
            tells_cached=not config.is_shared_by_strangers,
        )
        self._others = Others(gateway_id, config.links.credentials)
        memory = memory_of(config, self._others.tell)
        metrics = GatewayMetrics(CollectorRegistry(), model_name=config.model.name, engine=gateway_id)
        self._backend = RoutedBackend(
            self._router,
            gateway_id,
            info,
            config.links.credentials,
            max_queued_requests=config.gateway.max_queued_requests,
            failover_timeout_s=config.gateway.failover_timeout_s,
            memory=memory,
            kv_peers=config.gateway.kv_peers,
            on_handover=metrics.handover_ended,
        )
        self._gateway = self._gateway_of(config, info, tokenizer, metrics, memory)
        self._responses = Responses(gateway_id, self._fetch_response)
        await self._meet_the_others(config, metrics.registry, router)
        await self._open_doors(config, metrics)
        tell_phase("ready")

    def _gateway_of(
        self,
        config: ServiceConfig,
        info: ModelInfo,
        tokenizer: PreTrainedTokenizerBase,
        metrics: GatewayMetrics,
        memory: RolloutMemory | None,
    ) -> Gateway:
        return Gateway(
            info,
            tokenizer,
            self._backend,
            metrics,
            time.monotonic,
            fleet_load=lambda: fleet_load(self._router.snapshot, time.time()),
            tracing=self._tracing,
            memory=memory,
            stream_interval=config.gateway.stream_interval,
            prefills=self._backend if config.gateway.next_turn_prefill else None,
        )

    async def _open_doors(self, config: ServiceConfig, metrics: GatewayMetrics) -> None:
        self._grpc_server = await self._serve_grpc(config)
        fleet = FleetMetrics(lambda: self._router.snapshot, model_name=config.model.name, wall_clock=time.time)
        shared = SharedMetrics(metrics.registry, fleet, self._others)
        self._app = application_of(config, self._trainer_doors(config), shared.scrape, self._responses)
        # with TLS nothing: Serve's proxies verify no client
        self._proxied_api = FastAPI(openapi_url=None) if config.tls else self._guarded(config)
        self._http_server = self._serve_http(config)

    async def _meet_the_others(self, config: ServiceConfig, own: CollectorRegistry, router: Any) -> None:
        """Answer the other gateways, and begin to know them."""
        self._every = EveryGateway(self._gateway, self._others)
        answers = answers_of(
            self._gateway,
            self._others,
            find_response=lambda ask: self._responses.packed(ask.response_id, is_removed=ask.is_removed),
            metrics=own,
        )
        self._link_server, endpoint = await open_port(
            internal_address(config.links),
            lambda server: link_pb2_grpc.add_GatewayLinkServicer_to_server(GatewayLinkServicer(answers), server),
            config.links,
        )
        following = self._others.follow(router, endpoint, wants_history=self._gateway.memory is not None)
        self._tasks.start(following, "know the other gateways")

    async def _fetch_response(self, gateway_id: str, response_id: str, is_removed: bool) -> bytes | None:
        answer: Kept | None = await self._others.ask_one(
            gateway_id, AskResponse(response_id=response_id, is_removed=is_removed)
        )
        return None if answer is None else answer.payload

    async def _serve_grpc(self, config: ServiceConfig) -> RunningGrpcServer:
        """Start the gRPC server, with its interceptors."""
        keys = ApiKeys(config.gateway.api_key_hashes, shares=config.gateway.share_between_keys)
        return await start_grpc_server(
            self._gateway,
            config.address(config.grpc_port),
            every=self._every,
            credentials=None if config.tls is None else config.tls.server_credentials(),
            options=GRPC_OPTIONS,
            interceptors=[
                RequestIdInterceptor(),
                *([ApiKeyInterceptor(keys)] if keys else []),
                *([self._tracing.interceptor()] if self._tracing is not None else []),
            ],
        )

    def _serve_http(self, config: ServiceConfig) -> HttpServer | None:
        """Start the HTTP server, unless clients come through Serve's proxies."""
        if not config.listens_itself:
            return None
        api = self._guarded(config, is_private=is_loopback(config.host))
        server = HttpServer(
            RequestIdMiddleware(api),
            config.host,
            config.port,
            config.tls,
            keep_alive_timeout_s=config.gateway.keep_alive_timeout_s,
        )
        self._tasks.start(server.run(), "serve HTTP")
        return server

    def _guarded(self, config: ServiceConfig, *, is_private: bool = False) -> ASGIApp:
        return guarded(self._app, config.gateway, self._tracing, is_private=is_private)

    def _trainer_doors(self, config: ServiceConfig) -> TrainerDoors:
        trainers = TrainerLimits(hosts=config.gateway.trainer_hosts, timeout_s=config.gateway.trainer_timeout_s)
        return TrainerDoors(
            every=self._every,
            fleet=FleetControl.over_links(self._router, config.links.credentials, trainers),
            is_healthy=self._has_verifier,
            model_path=config.model.target_path,
            tensor_parallel_size=config.verifiers.tensor_parallel_size,
            learners=self._learners,
        )

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return what Serve's proxies serve, where there are any: they listen where Serve's options say."""
        return RequestIdMiddleware(self._proxied_api, is_echoed_by_proxy=True)

    async def _has_verifier(self) -> bool:
        snapshot = self._router.snapshot
        if snapshot is None or snapshot.is_stopping:
            return False
        return any(
            not state.report.draining and state.report.load.weights_error is None for state in snapshot.verifiers
        )

    async def pid(self) -> int:
        return os.getpid()

    async def check_health(self) -> None:
        """Raise if this replica can no longer serve."""
        self._tasks.check()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the autoscaler's figures."""
        return {"num_requests": float(self._gateway.num_running)}

    async def __del__(self) -> None:
        self._gateway.drain()
        drains = [self._grpc_server.drain(self._drain_timeout_s)]
        if self._http_server is not None:
            drains.append(self._http_server.drain(self._drain_timeout_s))
        await asyncio.gather(*drains)
        await self._tasks.stop()
        await self._others.close()
        await self._link_server.stop(SERVER_GRACE_S)
        if self._gateway.next_turn is not None:
            await self._gateway.next_turn.close()
        await self._backend.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)


def _load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer: without torch, unless the model needs it for that."""
    if not model.has_code:
        import_transformers()
    return load_tokenizer(model)


def reply_syntax_of(options: GatewayOptions) -> ReplySyntax | None:
    """Return how the model writes calls and thoughts, where that is said; None: its tokenizer may know."""
    if options.tool_call_parser is None and options.reasoning_parser is None:
        return None
    return ReplySyntax(tool_call_parser=options.tool_call_parser, reasoning_parser=options.reasoning_parser)


def memory_of(config: ServiceConfig, tell: Callable[[Recorded], None]) -> RolloutMemory | None:
    """Return what remembers the responses of rollouts, and tells of them; None: the service is for none."""
    if not config.verifiers.rollouts:
        return None
    speculative = config.speculative
    return RolloutMemory(
        MemoryLimits(
            num_versions=speculative.suffix_decoding_max_versions,
            max_drafter_responses=speculative.suffix_decoding_max_cached_requests,
        ),
        tell,
    )


def tracing_of(options: GatewayOptions, replica: str) -> Tracing | None:
    """Return what makes spans; None without a collector to send them to."""
    if options.otlp_traces_endpoint is None:
        return None
    require_extra("otlp", "otlp_traces_endpoint")  # also on this node
    from outrider.cluster.gateway.tracing import Tracing, otlp_provider

    return Tracing(
        otlp_provider(options.otlp_traces_endpoint, sample_ratio=options.trace_sample_ratio, replica=replica)
    )


def application_of(
    config: ServiceConfig, doors: TrainerDoors, scrape: Scrape | None = None, responses: Responses | None = None
) -> FastAPI:
    """Return the HTTP application of a gateway, with all its doors."""
    syntax = reply_syntax_of(config.gateway)
    app = build_api(doors.gateway, doors.is_healthy, scrape=scrape, responses=responses, reply_syntax=syntax)
    if config.verifiers.rollouts:
        add_trainer_routes(app, doors)
    if config.learning:
        add_learner_status(app, doors.learners)
        add_learner_actions(app, doors.learners)
    return app


def guarded(app: FastAPI, options: GatewayOptions, tracing: Tracing | None = None, *, is_private: bool) -> ASGIApp:
    """Return an application behind its middleware; `is_private`: only this machine's programs reach it."""
    api: ASGIApp = app if tracing is None else tracing.middleware(app)
    keys = ApiKeys(options.api_key_hashes, shares=options.share_between_keys)
    api = ApiKeyMiddleware(api, keys, admin_paths=admin_paths(app.routes), is_private=is_private)
    if options.allowed_origins:  # outside the keys: a browser asks before it may show one
        origins = list(options.allowed_origins)
        api = CORSMiddleware(api, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return api


def model_info(
    name: str,
    model: ModelConfig,
    max_model_len: int,
    acceptance: AcceptanceRule,
    logprobs_mode: LogprobsMode,
    *,
    reads_generation_config: bool = False,
    adapters: tuple[str, ...] = (),
    rollouts: bool = False,
    learns: bool = False,
    hands_over: bool = False,
    allows_lossy: bool = False,
    tells_cached: bool = True,
) -> ModelInfo:
    """Describe a model by its files, without its weights; `max_model_len` is the verifiers'."""
    folder = resolve_description(model)
    description = read_description(folder, model)  # the verifiers check that it is supported
    return ModelInfo(
        name=name,
        max_model_len=max_model_len,
        vocab_size=description.vocab_size,
        eos_token_ids=read_eos_token_ids(folder, description, model),
        created=int(time.time()),
        acceptance=acceptance,
        logprobs_mode=logprobs_mode,
        sampling_defaults=read_sampling_defaults(folder) if reads_generation_config else {},
        adapters=adapters,
        rollouts=rollouts,
        learns=learns,
        hands_over=hands_over,
        allows_lossy=allows_lossy or acceptance.is_lossy,
        tells_cached=tells_cached,
    )
