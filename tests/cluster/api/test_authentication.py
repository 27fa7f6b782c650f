"""API keys in front of the real HTTP application and the real gRPC server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fakes.backend import FakeBackend, build_gateway, says
from outrider.cluster.api.authentication import ApiKeyInterceptor, ApiKeyMiddleware
from outrider.cluster.api.grpc_api import SERVICE_NAME, start_grpc_server
from outrider.cluster.api.http_server import HttpServer
from outrider.cluster.api.openai.endpoints import build_api
from outrider.cluster.common.api_keys import ApiKeys, hash_api_key
from outrider.proto import generation_pb2 as pb
from outrider.proto import generation_pb2_grpc
from services.certificates import Certificates
from support.stack import Stack
from support.waiting import healthy

KEY = "sk-right"
WRONG_KEY = "sk-wrong"
KEYS = ApiKeys([hash_api_key("sk-another"), hash_api_key(KEY)])
BODY = {"model": "tiny", "prompt": "the", "max_tokens": 4}
REQUEST = pb.GenerateRequest(text="the", sampling=pb.SamplingParams(max_tokens=4))


@pytest.fixture
def backend(tokenizer) -> FakeBackend:
    return FakeBackend(lambda _: says(tokenizer, "fox"))


@pytest.fixture
def guarded(tokenizer, backend: FakeBackend) -> ApiKeyMiddleware:
    return ApiKeyMiddleware(Stack(backend, tokenizer=tokenizer).app, KEYS)


@contextlib.asynccontextmanager
async def http_client(app: ApiKeyMiddleware, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
        yield client


@pytest.mark.parametrize(("name", "value"), [("Authorization", f"Bearer {KEY}"), ("X-Api-Key", KEY)])
async def test_a_right_key_opens_everything(guarded, name: str, value: str):
    async with http_client(guarded, **{name: value}) as client:
        answer = await client.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "fox")
        assert (await client.get("/v1/models")).status_code == 200


async def test_without_a_right_key_nothing_reaches_the_backend(guarded, backend: FakeBackend):
    async with http_client(guarded) as client:
        for headers in ({}, {"Authorization": f"Bearer {WRONG_KEY}"}, {"X-Api-Key": ""}):
            answer = await client.post("/v1/completions", json=BODY, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            error = answer.json()["error"]
            assert error["code"] == "invalid_api_key"
            assert "API key" in error["message"]
            assert WRONG_KEY not in answer.text
    assert backend.requests == []


async def test_only_the_page_and_what_probes_ask_is_open(guarded):
    async with http_client(guarded) as client:
        for path in ("/health", "/ready", "/live", "/metrics", "/"):
            assert (await client.get(path)).status_code == 200
        for path in (
            "/v1/models",
            "/version",
            "/load",
            "/openapi.json",
            "/health/",
            "/metrics/x",
            "/web/",
            "/%2Fhealth",
            "/no-such-path",
        ):
            assert (await client.get(path)).status_code == 401, path


async def test_a_websocket_without_a_key_is_closed(guarded):
    sent = []

    async def send(message) -> None:
        sent.append(message)

    await guarded({"type": "websocket", "path": "/v1/realtime", "headers": []}, None, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def test_a_wrong_key_is_never_logged(guarded, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    async with http_client(guarded) as client:
        await client.get("/v1/models", headers={"Authorization": f"Bearer {WRONG_KEY}"})
    assert not [record for record in caplog.records if WRONG_KEY in record.getMessage()]


# --- gRPC ---


@contextlib.asynccontextmanager
async def grpc_channel(
    tokenizer, backend: FakeBackend, certificates: Certificates | None = None
) -> AsyncIterator[grpc.aio.Channel]:
    running = await start_grpc_server(
        build_gateway(backend, tokenizer),
        "127.0.0.1:0",
        credentials=certificates and certificates.tls(mutual=True).server_credentials(),
        interceptors=[ApiKeyInterceptor(KEYS)],
    )
    address = f"127.0.0.1:{running.port}"
    if certificates is None:
        channel = grpc.aio.insecure_channel(address)
    else:
        channel = grpc.aio.secure_channel(address, certificates.channel_credentials(certificates.client))
    try:
        async with channel:
            yield channel
    finally:
        await running.server.stop(None)


@pytest.mark.parametrize("metadata", [(("authorization", f"Bearer {KEY}"),), (("x-api-key", KEY),)])
async def test_grpc_calls_with_a_right_key_are_served(tokenizer, backend, metadata):
    async with grpc_channel(tokenizer, backend) as channel:
        stub = generation_pb2_grpc.InferenceStub(channel)
        assert (await stub.GenerateUnary(REQUEST, metadata=metadata)).choices[0].text == "fox"
        assert "".join([chunk.text async for chunk in stub.Generate(REQUEST, metadata=metadata)]) == "fox"


@pytest.mark.parametrize("metadata", [(), (("x-api-key", WRONG_KEY),), (("x-api-key-bin", KEY.encode()),)])
async def test_grpc_calls_without_one_are_not(tokenizer, backend, metadata):
    async with grpc_channel(tokenizer, backend) as channel:
        stub = generation_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.GenerateUnary(REQUEST, metadata=metadata, timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            [chunk async for chunk in stub.Generate(REQUEST, metadata=metadata, timeout=10)]
        for raised in (unary, stream):
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert WRONG_KEY not in raised.value.details()
        # It says nothing: a write after the refusal turns the status into INTERNAL (grpc/grpc#36066).
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        reflection = stub.ServerReflectionInfo(metadata=metadata, timeout=10)
        assert await reflection.code() is grpc.StatusCode.UNAUTHENTICATED
        assert WRONG_KEY not in await reflection.details()
    assert backend.requests == []


async def list_services(channel: grpc.aio.Channel, metadata) -> list[str]:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
        iter([request]), metadata=metadata, timeout=10
    )
    return [service.name async for answer in call for service in answer.list_services_response.service]


async def test_health_needs_no_key(tokenizer, backend):
    async with grpc_channel(tokenizer, backend) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


# --- both, behind mutual TLS ---


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


async def test_a_reflection_session_with_certificate_and_key(tokenizer, backend, certificates: Certificates):
    async with grpc_channel(tokenizer, backend, certificates) as channel:
        assert SERVICE_NAME in await list_services(channel, (("x-api-key", KEY),))


@contextlib.asynccontextmanager
async def openai_client(
    app: ApiKeyMiddleware, certificates: Certificates, api_key: str
) -> AsyncIterator[openai.AsyncOpenAI]:
    """Serve with mutual TLS; yield a client with a known certificate."""
    server = HttpServer(app, "127.0.0.1", 0, certificates.tls(mutual=True))
    async with contextlib.AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        tasks.create_task(server.run())
        stack.push_async_callback(server.drain, 0.0)
        transport = httpx.AsyncClient(verify=certificates.client_context(certificates.client))
        http_client = await stack.enter_async_context(transport)
        yield openai.AsyncOpenAI(
            base_url=f"https://127.0.0.1:{server.port}/v1", api_key=api_key, http_client=http_client, max_retries=0
        )


async def test_the_openai_client_streams_while_tokens_are_generated(tokenizer, certificates: Certificates):
    """The backend waits for ever after its first token, which nevertheless arrives; leaving stops it."""
    backend = FakeBackend(lambda _: [tokenizer.encode("fox"), None])
    guarded = ApiKeyMiddleware(build_api(build_gateway(backend, tokenizer), healthy), KEYS)
    async with asyncio.timeout(20), openai_client(guarded, certificates, KEY) as client:
        stream = await client.completions.create(**BODY, stream=True)
        assert (await anext(stream)).choices[0].text == "fox"
        await stream.close()
        while not backend.cancelled:
            await asyncio.sleep(0.005)


async def test_the_openai_client_understands_the_refusal(guarded, certificates: Certificates):
    async with asyncio.timeout(20), openai_client(guarded, certificates, WRONG_KEY) as client:
        with pytest.raises(openai.AuthenticationError) as raised:
            await client.completions.create(**BODY)
    assert raised.value.code == "invalid_api_key"
