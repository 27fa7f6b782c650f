"""Every door of the public ports, from the application's routes and the servers' descriptors, and who passes it.

A route or call that is not in the table fails here: who adds one says whose it is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NoReturn

import grpc
import httpx
import pytest
from fastapi import FastAPI
from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.cluster.api.access import OPEN_PATHS, admin_paths
from outrider.cluster.api.authentication import ApiKeyInterceptor
from outrider.cluster.api.malformed_calls import MalformedCallInterceptor
from outrider.cluster.api.rollouts.doors import TrainerDoors
from outrider.cluster.common.api_keys import ApiKeys, hash_api_key
from outrider.cluster.common.security import LinkTls, bind
from outrider.cluster.config.drafters_config import DraftersConfig
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.gateway.fleet_control import FleetControl
from outrider.cluster.gateway.learner_control import LearnerControl
from outrider.cluster.gateway.rollout_memory import RolloutMemory
from outrider.cluster.peers.every_gateway import EveryGateway
from outrider.cluster.peers.others import GatewayLinkServicer
from outrider.cluster.replicas.directory_replica import drafters_api, drafters_app
from outrider.cluster.replicas.directory_servicer import DirectoryServicer
from outrider.cluster.replicas.gateway_replica import application_of, guarded
from outrider.cluster.web.page import FILES as WEB_FILES
from outrider.drafter_service.service.service import DrafterLinkServicer
from outrider.proto import link_pb2, link_pb2_grpc
from outrider.verifier_service.engine.service import RequestTable, VerifierLinkServicer
from outrider.verifier_service.links.control_table import ControlTable
from outrider.verifier_service.links.grpc_channel import metadata_of
from outrider.verifier_service.links.handover_calls import HandoverCalls
from outrider.verifier_service.messages.engine import UpdateWeights
from outrider.verifier_service.messages.link import DrafterIdentity
from outrider.verifier_service.messages.wire import encode
from support.stack import NoRouter, Stack, no_verifier
from support.waiting import healthy
from tiny.played_learners import PlayedLearner

OPEN, CLIENT, ADMIN = "open", "client", "admin"
PLAIN, ADMINS = {"authorization": "Bearer sk-plain"}, {"authorization": "Bearer sk-admin"}
HASHES = (hash_api_key("sk-plain"), f"{hash_api_key('sk-admin')}:admin")
REFUSALS = (401, 403, 415)
ROUTES = {  # by whom they may be called
    OPEN: ["GET /health", "GET /ready", "GET /live", "GET /metrics", *(f"GET {path}" for path in WEB_FILES)],
    CLIENT: [
        *("POST /v1/completions", "POST /v1/chat/completions", "POST /v1/embeddings"),
        *("POST /v1/responses", "GET /v1/responses/{response_id}", "DELETE /v1/responses/{response_id}"),
        *("POST /v1/messages", "POST /v1/messages/count_tokens"),
        *("POST /tokenize", "POST /detokenize", "GET /v1/models", "GET /v1/models/{name:path}"),
        *("GET /load", "GET /version", "GET /openapi.json", "GET /v1/learner"),
        *("POST /generate", "PUT /generate", "POST /inference/v1/generate", "GET /health_generate", "GET /liveness"),
        *("GET /get_weight_version", "GET /weight_version", "GET /model_info", "GET /get_model_info"),
        *("GET /server_info", "GET /get_server_info", "GET /v1/loads", "GET /get_load", "GET /weight_info"),
        *("GET /get_world_size", "GET /is_paused"),
    ],
    ADMIN: [
        *("POST /abort_request", "POST /abort_requests", "POST /inference/v1/abort_requests"),
        *("POST /pause_generation", "POST /continue_generation", "POST /pause", "POST /resume"),
        *("GET /flush_cache", "POST /flush_cache", "POST /reset_prefix_cache"),
        *("POST /init_weights_update_group", "POST /destroy_weights_update_group"),
        *("POST /update_weights_from_distributed", "POST /update_weights_from_disk", "POST /update_weights"),
        *("POST /update_weights_from_tensor", "POST /init_weight_transfer_engine", "POST /start_weight_update"),
        *("POST /start_draft_weight_update", "POST /finish_weight_update", "POST /collective_rpc"),
        *("GET /v1/rollouts/history", "POST /v1/rollouts/history", "DELETE /v1/rollouts/history"),
        "POST /v1/rollouts/reward",
        *("POST /v1/learner/pause", "POST /v1/learner/resume", "POST /v1/learner/rollback"),
        *("POST /v1/learner/publish", "POST /v1/learner/export"),
    ],
}
DRAFTERS_ROUTES = {
    OPEN: ["GET /health", "GET /metrics"],
    CLIENT: ["GET /v1/learner"],
    ADMIN: [route for route in ROUTES[ADMIN] if "/v1/learner/" in route],
}
RPCS = {
    OPEN: [f"/grpc.health.v1.Health/{name}" for name in ("Check", "Watch")],
    CLIENT: [
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        *(
            f"/outrider.v1.Inference/{name}"
            for name in ("Generate", "GenerateUnary", "Abort", "GetModelInfo", "GetServerInfo", "GetLoads")
        ),
        *(
            f"/vllm.grpc.engine.VllmEngine/{name}"
            for name in ("Generate", "Abort", "HealthCheck", "GetModelInfo", "GetServerInfo", "GetLoads")
        ),
        "/vllm.grpc.engine.VllmEngine/GetTokenizer",
    ],
    ADMIN: [  # none is implemented
        f"/vllm.grpc.engine.VllmEngine/{name}"
        for name in ("Embed", "FlushCache", "StartProfile", "StopProfile", "SubscribeKvEvents")
    ],
}


@pytest.fixture
def stack() -> Stack:
    return Stack([], rollouts=True, learns=True, memory=RolloutMemory())


@pytest.fixture
def service(stack: Stack) -> FastAPI:
    """The application of a service with rollouts and a learner, as a gateway's replica makes it."""
    doors = TrainerDoors(
        every=EveryGateway(stack.gateway),
        fleet=FleetControl(NoRouter(), no_verifier, no_verifier),
        is_healthy=healthy,
        model_path="",
        tensor_parallel_size=1,
        learners=LearnerControl({"default": PlayedLearner()}, lambda: None),
    )
    return application_of(ServiceConfig(rollouts=True, learner={}, speculative_config={"method": "suffix"}), doors)


def walked(app: FastAPI) -> list[str]:
    """Return every route with each of its methods; HEAD goes with GET."""
    return [f"{method} {route.path}" for route in app.routes for method in sorted(set(route.methods) - {"HEAD"})]


def calls(table: dict[str, list[str]]) -> Iterator[tuple[str, str, str]]:
    for rank, routes in table.items():
        for route in routes:
            method, _, path = route.partition(" ")
            yield rank, method, path.partition("{")[0] + "x" * ("{" in path)


async def refused(
    api: ASGIApp, table: dict[str, list[str]], url: str = "http://127.0.0.1:8000", **headers: str
) -> dict[str, set[int]]:
    """Return the refusals' statuses that each rank of the table gets, with 0 for what passes."""
    found: dict[str, set[int]] = {rank: set() for rank in table}
    transport = httpx.ASGITransport(app=api)
    async with httpx.AsyncClient(transport=transport, base_url=url, headers=headers) as client:
        for rank, method, path in calls(table):
            body = None if method in ("GET", "DELETE") else {}
            answer = await client.request(method, path, json=body)
            found[rank].add(answer.status_code if answer.status_code in REFUSALS else 0)
    return found


def test_every_route_is_in_the_table(service: FastAPI):
    assert sorted(walked(service)) == sorted(route for routes in ROUTES.values() for route in routes)
    table = {path for rank, _, path in calls({ADMIN: ROUTES[ADMIN]})}
    assert admin_paths(service.routes) == table, "whatever no table names is an admin's"


def test_a_route_that_no_table_names_is_an_admins():
    app = FastAPI(openapi_url=None)
    app.post("/new")(healthy)
    assert admin_paths(app.routes) == {"/new"}
    app.get("/new/{name}")(healthy)
    with pytest.raises(ValueError, match=r"an admin's path has no parameters, unlike /new/\{name\}"):
        admin_paths(app.routes)


@pytest.mark.parametrize("is_private", [True, False])
async def test_with_keys_each_opens_its_doors(service: FastAPI, is_private: bool):
    api = guarded(service, ServiceConfig(api_key_hashes=HASHES).gateway, is_private=is_private)
    assert await refused(api, ROUTES) == {OPEN: {0}, CLIENT: {401}, ADMIN: {401}}
    assert await refused(api, ROUTES, authorization="Bearer sk-wrong") == {OPEN: {0}, CLIENT: {401}, ADMIN: {401}}
    assert await refused(api, ROUTES, **PLAIN) == {OPEN: {0}, CLIENT: {0}, ADMIN: {403}}
    assert await refused(api, ROUTES, **ADMINS) == {OPEN: {0}, CLIENT: {0}, ADMIN: {0}}
    foreign = {"origin": "https://evil.example"}
    assert await refused(api, ROUTES, **foreign) == {OPEN: {0}, CLIENT: {401}, ADMIN: {401}}
    assert await refused(api, ROUTES, **foreign, **PLAIN) == {OPEN: {0}, CLIENT: {0}, ADMIN: {403}}


async def test_without_an_admin_nobody_beyond_this_machine_changes_anything(service: FastAPI):
    for hashes, shown in (((), {}), (HASHES[:1], PLAIN)):
        api = guarded(service, ServiceConfig(api_key_hashes=hashes).gateway, is_private=False)
        assert await refused(api, ROUTES, **shown) == {OPEN: {0}, CLIENT: {0}, ADMIN: {403}}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://127.0.0.1") as client:
            said = (await client.post("/pause", headers=shown)).json()["error"]
        assert (said["type"], said["code"]) == ("permission_error", "forbidden")
        assert "add --admin-api-key, OUTRIDER_ADMIN_API_KEY or role=admin behind a key" in said["message"]


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:8000", "[::1]:8000", "127.0.0.5"])
async def test_on_this_machine_its_own_programs_are_trusted(service: FastAPI, host: str):
    api = guarded(service, ServiceConfig().gateway, is_private=True)
    everything = {OPEN: {0}, CLIENT: {0}, ADMIN: {0}}
    assert await refused(api, ROUTES, f"http://{host}") == everything
    own = {"origin": f"http://{host}", "sec-fetch-site": "same-origin"}
    assert await refused(api, ROUTES, f"http://{host}", **own) == everything


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "http://127.0.0.1:3000"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"host": "rebind.evil.example"},
        {"host": "127.0.0.1.evil.example:8000"},
        {"host": "["},
        {"host": ""},
    ],
)
@pytest.mark.parametrize("shown", [{}, PLAIN])
async def test_on_this_machine_a_page_of_somebody_else_changes_nothing(
    service: FastAPI, headers: dict[str, str], shown: dict[str, str]
):
    options = ServiceConfig(api_key_hashes=HASHES[:1] if shown else ()).gateway
    api = guarded(service, options, is_private=True)
    assert await refused(api, ROUTES, **headers, **shown) == {OPEN: {0}, CLIENT: {0}, ADMIN: {403}}


FORMS = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x")


@pytest.mark.parametrize("kind", [*FORMS, ""])
async def test_on_this_machine_a_body_without_the_type_of_json_changes_nothing(service: FastAPI, kind: str):
    """A page needs no permission to send those; `curl -d` sends the second."""
    api = guarded(service, ServiceConfig().gateway, is_private=True)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://localhost:8000") as client:
        for rank, method, path in calls(ROUTES):
            if rank == ADMIN:
                headers = {"content-type": kind} if kind else {}
                answer = await client.request(method, path, content=b"{}", headers=headers)
                assert answer.status_code == 415, (path, answer.text)
                assert answer.json()["error"]["param"] == "content-type"
        for headers in ({}, {"content-type": "application/octet-stream"}):  # as aiohttp says of no body
            assert (await client.post("/resume", headers=headers)).status_code == 503, "there is no verifier"
        lines = await client.post("/v1/rollouts/history", content=b"", headers={"content-type": "application/jsonl"})
        assert lines.status_code == 200


async def test_a_prefix_in_front_of_all_routes_opens_nothing(service: FastAPI):
    """Ray Serve's `route_prefix` is the root path: the router matches what follows."""
    api = guarded(service, ServiceConfig().gateway, is_private=False)

    async def mounted(scope: Scope, receive: Receive, send: Send) -> None:
        await api({**scope, "root_path": "/llm"}, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(mounted), base_url="http://x") as client:
        assert (await client.post("/llm/pause")).status_code == 403
        assert (await client.get("/llm/health")).status_code == 200
        for path in ("/llm/pause/", "/llm//pause", "/pause"):
            assert (await client.post(path)).status_code in (307, 403, 404), path


# --- a pool of drafters alone ---


LEARNERS = LearnerControl({"default": PlayedLearner()}, lambda: None)


def drafters(**options: Any) -> ASGIApp:
    config = DraftersConfig(draft_model="d", model="m", learner={}, link_secret_file="unread", **options)
    return drafters_api(config, CollectorRegistry(), LEARNERS)


def test_every_route_of_a_pool_alone_is_in_the_table():
    routes = walked(drafters_app(CollectorRegistry(), LEARNERS))
    assert sorted(routes) == sorted(route for routes in DRAFTERS_ROUTES.values() for route in routes)


async def test_learners_of_a_pool_alone_follow_the_same_rule():
    own = {"own_proxy": True, "host": "127.0.0.1"}
    everything = {OPEN: {0}, CLIENT: {0}, ADMIN: {0}}
    assert await refused(drafters(**own), DRAFTERS_ROUTES) == everything
    foreign = await refused(drafters(**own), DRAFTERS_ROUTES, origin="https://evil.example")
    assert foreign == {OPEN: {0}, CLIENT: {0}, ADMIN: {403}}
    for beyond in ({"host": "127.0.0.1"}, {"host": "10.0.0.7", "own_proxy": True}):
        assert await refused(drafters(**beyond), DRAFTERS_ROUTES) == {OPEN: {0}, CLIENT: {0}, ADMIN: {403}}
    kept = drafters(host="10.0.0.7", api_key_hashes=HASHES)
    assert await refused(kept, DRAFTERS_ROUTES) == {OPEN: {0}, CLIENT: {401}, ADMIN: {401}}
    assert await refused(kept, DRAFTERS_ROUTES, **PLAIN) == {OPEN: {0}, CLIENT: {0}, ADMIN: {403}}
    assert await refused(kept, DRAFTERS_ROUTES, **ADMINS) == everything


# --- gRPC ---


async def served_rpcs(channel: grpc.aio.Channel) -> list[str]:
    """Return every call that the server has, as its own reflection names them."""
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    answers = stub.ServerReflectionInfo(iter([ask]), metadata=tuple(PLAIN.items()), timeout=20)
    names = [service.name async for answer in answers for service in answer.list_services_response.service]
    pool = descriptor_pool.Default()
    return [f"/{name}/{rpc.name}" for name in names for rpc in pool.FindServiceByName(name).methods]


async def code_of(channel: grpc.aio.Channel, rpc: str, metadata: dict[str, str]) -> grpc.StatusCode:
    """Call with bytes that are no message; return the status."""
    call = channel.stream_stream(rpc)(metadata=tuple(metadata.items()), timeout=20)
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it may be refused before that
        await call.write(b"\xff")
        await call.done_writing()
    with contextlib.suppress(grpc.aio.AioRpcError):
        if await call.read() is not grpc.aio.EOF:
            call.cancel()  # health is watched until somebody leaves
    return await call.code()


async def test_every_call_is_in_the_table_and_asks_for_its_key(stack: Stack):
    refusals = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
    none, plain = refusals
    async with stack.rpc(interceptors=[ApiKeyInterceptor(ApiKeys(HASHES))]) as rpc_:
        channel = rpc_.channel
        served = await served_rpcs(channel)
        assert sorted(served) == sorted(rpc for rpcs in RPCS.values() for rpc in rpcs)
        for shown, expected in (
            ({}, {OPEN: None, CLIENT: none, ADMIN: none}),
            ({"x-api-key": "sk-wrong"}, {OPEN: None, CLIENT: none, ADMIN: none}),
            (PLAIN, {OPEN: None, CLIENT: None, ADMIN: plain}),
            (ADMINS, {OPEN: None, CLIENT: None, ADMIN: None}),
        ):
            for rank, rpcs in RPCS.items():
                for rpc in rpcs:
                    code = await code_of(channel, rpc, shown)
                    assert (code if code in refusals else None) is expected[rank], (rpc, shown)
        assert await code_of(channel, "/outrider.v1.Inference/None", PLAIN) is grpc.StatusCode.UNIMPLEMENTED


# --- links between our own services ---

LINK_RPCS = [
    *("DrafterDirectory/Follow", "DrafterLink/Control", "DrafterLink/Stream"),
    *("GatewayLink/Ask", "VerifierLink/Control", "VerifierLink/Serve", "VerifierLink/TakeKV"),
]


class NoDrafter:
    def load(self) -> NoReturn:
        raise AssertionError("nobody is linked")

    async def control(self, message: object) -> NoReturn:
        raise AssertionError("no order comes here")


def no_engine(message: object) -> NoReturn:
    raise AssertionError("nothing comes here")


@contextlib.asynccontextmanager
async def linking(links: LinkTls) -> AsyncIterator[grpc.aio.Channel]:
    """Serve all that our own services serve each other, in a service without rollouts."""
    identity = DrafterIdentity(drafter_id="d", vocab_size=8, vocab_fingerprint="", max_draft_length=1, max_model_len=8)
    directory = DirectoryServicer(no_engine, no_engine)
    server = grpc.aio.server(interceptors=(*links.server_interceptors, MalformedCallInterceptor()))
    tables = RequestTable(no_engine), ControlTable(no_engine)
    link_pb2_grpc.add_VerifierLinkServicer_to_server(VerifierLinkServicer(*tables, HandoverCalls(no_engine)), server)
    link_pb2_grpc.add_DrafterLinkServicer_to_server(DrafterLinkServicer(NoDrafter(), identity), server)
    link_pb2_grpc.add_DrafterDirectoryServicer_to_server(directory, server)
    link_pb2_grpc.add_GatewayLinkServicer_to_server(GatewayLinkServicer({}), server)
    port = bind(server, "127.0.0.1:0", None)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def test_every_call_of_a_link_asks_for_the_services_secret(tmp_path: Path):
    file = tmp_path / "secret"
    file.write_text("s" * 32 + "\n")
    links = LinkTls(link_secret_file=str(file))
    services = link_pb2.DESCRIPTOR.services_by_name.values()
    served = [f"{service.full_name}/{rpc.name}" for service in services for rpc in service.methods]
    assert sorted(served) == sorted(f"outrider.link.v1.{rpc}" for rpc in LINK_RPCS)
    right = dict(metadata_of(links.credentials))
    async with linking(links) as channel:
        for rpc in served:
            for shown in ({}, PLAIN, ADMINS, dict.fromkeys(right, "t" * 32)):
                assert await code_of(channel, f"/{rpc}", shown) is grpc.StatusCode.UNAUTHENTICATED, rpc
            assert await code_of(channel, f"/{rpc}", right) is not grpc.StatusCode.UNAUTHENTICATED, rpc


async def test_without_rollouts_links_take_no_orders_whoever_calls():
    async with linking(LinkTls()) as channel:
        for stub in (link_pb2_grpc.VerifierLinkStub(channel), link_pb2_grpc.DrafterLinkStub(channel)):
            order = UpdateWeights(call_id="u", folder="/weights", weight_version="from the link port")
            with pytest.raises(grpc.aio.AioRpcError, match="not for rollouts") as refused:
                await stub.Control(link_pb2.Frame(payload=encode(order)))
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_what_is_open_is_open_in_the_application_too():
    assert {route.partition(" ")[2] for route in ROUTES[OPEN]} == OPEN_PATHS
