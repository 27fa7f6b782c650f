"""The whole service with mutual TLS on every port and link, and API keys; and with links that show a secret."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import openai
import pytest
import ray
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from outrider.cluster.api.grpc_api import SERVICE_NAME
from outrider.cluster.common.api_keys import hash_api_key
from outrider.cluster.common.security import MIN_SECRET_CHARS
from outrider.cluster.replicas.node_address import cluster_secret
from outrider.drafter_service import embedded
from outrider.drafter_service.embedded import held_out_prompts
from outrider.proto import generation_pb2, generation_pb2_grpc, link_pb2, link_pb2_grpc
from outrider.verifier_service.messages.engine import PauseGeneration
from outrider.verifier_service.messages.wire import encode
from services.certificates import Certificates
from services.live_service import LiveService, SharedRay

pytestmark = pytest.mark.service

KEY = "sk-of-this-test"
PROMPT = held_out_prompts()[0]
DRAFTS_TIMEOUT_S = 90.0


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def service(shared_ray: SharedRay, certificates: Certificates) -> LiveService:
    """Public ports with a certificate of this address; our own services share one that names no address."""
    return shared_ray.service(
        wait_for_drafts=False,
        ssl_certfile=certificates.server.certfile,
        ssl_keyfile=certificates.server.keyfile,
        ssl_ca_certs=certificates.ca_certs,
        link_ssl_certfile=certificates.named.certfile,
        link_ssl_keyfile=certificates.named.keyfile,
        link_ssl_ca_certs=certificates.ca_certs,
        link_ssl_server_name="replica.outrider",
        api_key_hashes=(hash_api_key("sk-of-somebody-else"), hash_api_key(KEY)),
    )


def openai_client(service: LiveService, http_client: httpx.Client, api_key: str = KEY) -> openai.OpenAI:
    base_url = f"https://{service.config.host}:{service.config.port}/v1"
    return openai.OpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)


@pytest.fixture
def client(service: LiveService, certificates: Certificates) -> Iterator[openai.OpenAI]:
    with httpx.Client(verify=certificates.client_context(certificates.client)) as http_client:
        yield openai_client(service, http_client)


@pytest.fixture
def channel(service: LiveService, certificates: Certificates) -> Iterator[grpc.Channel]:
    credentials = grpc.composite_channel_credentials(
        certificates.channel_credentials(certificates.client), grpc.access_token_call_credentials(KEY)
    )
    with grpc.secure_channel(service.grpc_address, credentials) as channel:
        yield channel


def stream(
    client: openai.OpenAI, service: LiveService, *, max_tokens: int = 64, speculate: bool = True
) -> tuple[str, int]:
    """Return a greedy completion's text and how many drafts were verified for it."""
    chunks = list(
        client.completions.create(
            model=service.config.model.name,
            prompt=PROMPT,
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            extra_body={"disable_spec_decode": not speculate},
        )
    )
    last = next(chunk for chunk in reversed(chunks) if chunk.choices)
    metrics = last.model_extra["metrics"]["speculative_decoding"]
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices), metrics["num_drafts"]


def test_the_openai_client_is_served_with_drafts_over_mutual_links(service: LiveService, client: openai.OpenAI):
    deadline_s = time.monotonic() + DRAFTS_TIMEOUT_S
    while stream(client, service, max_tokens=8)[1] == 0:
        assert time.monotonic() < deadline_s, "verifier and drafter did not find each other"
        time.sleep(0.2)
    text, num_drafts = stream(client, service)
    assert text == stream(client, service, speculate=False)[0] != ""
    assert num_drafts > 0


def test_a_reflection_driven_session(channel: grpc.Channel):
    database = ProtoReflectionDescriptorDatabase(channel)
    assert SERVICE_NAME in database.get_services()
    method = descriptor_pool.DescriptorPool(database).FindServiceByName(SERVICE_NAME).FindMethodByName("GenerateUnary")
    request_type = message_factory.GetMessageClass(method.input_type)
    response_type = message_factory.GetMessageClass(method.output_type)
    request = request_type(text=PROMPT)
    request.sampling.max_tokens = 8
    call = channel.unary_unary(
        f"/{SERVICE_NAME}/{method.name}",
        request_serializer=request_type.SerializeToString,
        response_deserializer=response_type.FromString,
    )
    assert call(request, timeout=60).usage.completion_tokens == 8


def test_without_certificate_or_key_nobody_is_served(service: LiveService, certificates: Certificates):
    with httpx.Client(verify=certificates.client_context(certificates.client)) as known:
        with pytest.raises(openai.AuthenticationError):
            openai_client(service, known, api_key="sk-wrong").models.list()
        assert known.get(f"https://{service.config.host}:{service.config.port}/health").status_code == 200
    with httpx.Client(verify=certificates.client_context()) as unknown, pytest.raises(openai.APIConnectionError):
        openai_client(service, unknown).models.list()
    for credentials, status in (
        (certificates.channel_credentials(), grpc.StatusCode.UNAVAILABLE),
        (certificates.channel_credentials(certificates.client), grpc.StatusCode.UNAUTHENTICATED),
    ):
        with (
            grpc.secure_channel(service.grpc_address, credentials) as channel,
            pytest.raises(grpc.RpcError) as raised,
        ):
            generation_pb2_grpc.InferenceStub(channel).GetModelInfo(generation_pb2.GetModelInfoRequest(), timeout=20)
        assert raised.value.code() is status


def test_links_are_closed_to_peers_without_their_certificate(service: LiveService):
    (verifier,) = service.call("Router", "snapshot").verifiers
    with grpc.insecure_channel(verifier.report.endpoint) as plaintext, pytest.raises(grpc.RpcError) as raised:
        list(link_pb2_grpc.VerifierLinkStub(plaintext).Serve(iter([link_pb2.Frame()]), timeout=20))
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


def test_links_that_show_a_secret_carry_drafts_and_orders_and_nobody_else_is_let_in(
    shared_ray: SharedRay, tmp_path: Path
):
    """The orders of a trainer, who on this machine needs no key; beyond it the cluster keeps such a secret."""
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef" * 2)
    folder = str(embedded.target_path())
    service = shared_ray.service(link_secret_file=str(file), rollouts=True, weights_root=folder)
    assert len(cluster_secret()) >= 2 * MIN_SECRET_CHARS
    elsewhere = ray.remote(num_cpus=0)(cluster_secret).remote()
    assert ray.get(elsewhere, timeout=60.0) == cluster_secret(), "the first one is kept for all processes"
    snapshot = service.call("Router", "snapshot")
    verifier, drafter = snapshot.verifiers[0].report.endpoint, snapshot.drafters[0].report.endpoint
    order = link_pb2.Frame(payload=encode(PauseGeneration(call_id="stranger")))
    for address, stub in ((verifier, link_pb2_grpc.VerifierLinkStub), (drafter, link_pb2_grpc.DrafterLinkStub)):
        with (
            grpc.insecure_channel(address) as channel,
            pytest.raises(grpc.RpcError, match="show their secret") as raised,
        ):
            stub(channel).Control(order, timeout=20)
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
    with httpx.Client(base_url=service.base_url, timeout=60.0) as http:
        update = {"model_path": folder, "weight_version": "7"}
        assert http.post("/update_weights_from_disk", json=update).status_code == 200
        assert http.get("/get_weight_version").json()["weight_version"] == "7"
        elsewhere = http.post("/update_weights_from_disk", json={"model_path": str(tmp_path)})
        assert (elsewhere.status_code, "does not lie below" in elsewhere.text) == (400, True)
        page = http.post("/pause", headers={"origin": "https://evil.example"})
        assert (page.status_code, http.get("/is_paused").json()) == (403, {"is_paused": False})
