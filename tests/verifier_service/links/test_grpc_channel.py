"""Links between real servers: mutual TLS lets our own services speak, and strangers hang nobody."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import pytest

from fakes.played_fleet import outputs_over
from outrider.cluster.common.security import TlsConfig, bind
from outrider.drafter_service.service.service import DrafterLinkServicer
from outrider.proto import link_pb2_grpc
from outrider.verifier_service.engine.service import RequestTable, VerifierLinkServicer
from outrider.verifier_service.links.circuit_breaker import BreakerConfig
from outrider.verifier_service.links.control_table import ControlTable
from outrider.verifier_service.links.drafter_link import DrafterLink, LinkConfig
from outrider.verifier_service.links.grpc_channel import open_channel
from outrider.verifier_service.messages.drafter_load import DrafterLoad
from outrider.verifier_service.messages.engine import PeerState, Published, Relay
from outrider.verifier_service.messages.link import CHANNEL_OPTIONS, DrafterIdentity, Hello
from outrider.verifier_service.messages.request import FinishReason, GenerationRequest, RequestOutput, SamplingParams
from outrider.verifier_service.messages.wire import decode
from services.certificates import Certificates

CALL_TIMEOUT_S = 10.0
IDENTITY = DrafterIdentity(drafter_id="d", vocab_size=9, vocab_fingerprint="", max_draft_length=8, max_model_len=64)
HELLO = Hello(verifier_id="v", epoch=7, vocab_size=9)
FAST = LinkConfig(
    ping_interval_s=0.05, min_backoff_s=0.01, max_backoff_s=0.05, breaker=BreakerConfig(failure_threshold=100)
)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


# --- gateway to verifier ---


@contextlib.asynccontextmanager
async def verifier(tls: TlsConfig | None) -> AsyncIterator[str]:
    """A verifier that answers every request with token 7."""
    table: RequestTable

    def engine(message: object) -> None:
        if isinstance(message, bytes):
            request = decode(message, (GenerationRequest,))
            finished = RequestOutput(request_id=request.request_id, token_ids=(7,), finish_reason=FinishReason.LENGTH)
            asyncio.get_running_loop().call_soon(table.deliver, [Published.of(finished)])

    table = RequestTable(engine)
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    link_pb2_grpc.add_VerifierLinkServicer_to_server(VerifierLinkServicer(table, ControlTable(engine)), server)
    port = bind(server, "127.0.0.1:0", tls and tls.server_credentials())
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def tokens(address: str, tls: TlsConfig | None, server_name: str | None = None) -> tuple[int, ...]:
    request = GenerationRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1))
    async with open_channel(address, tls and tls.link_credentials(server_name)) as channel:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            outputs = [output async for output in outputs_over(link_pb2_grpc.VerifierLinkStub(channel), request)]
        return outputs[-1].token_ids


async def test_a_verifier_answers_its_own_gateways_only(certificates: Certificates):
    async with verifier(certificates.link()) as address:
        assert await tokens(address, certificates.link()) == (7,)
        for stranger in (None, certificates.link(certificates.strange), certificates.link(certificates.expired)):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await tokens(address, stranger)
            assert "UNAVAILABLE" in str(raised.value)


async def test_a_gateway_gives_no_prompt_to_a_stranger_in_a_verifiers_place(certificates: Certificates):
    async with verifier(certificates.link(certificates.strange)) as address:
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await tokens(address, certificates.link())


async def test_one_certificate_serves_on_any_address_under_its_name(certificates: Certificates):
    shared = certificates.link(certificates.named)
    async with verifier(shared) as address:
        assert await tokens(address, shared, "replica.outrider") == (7,)
        for server_name in (None, "another.name"):
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await tokens(address, shared, server_name)


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
@pytest.mark.parametrize("is_encrypted", [True, False])
async def test_links_pass_by_the_environments_proxy(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, variable: str, is_encrypted: bool
):
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "http://127.0.0.1:9")  # where nobody listens
    tls = certificates.link() if is_encrypted else None
    async with verifier(tls) as address:
        assert await tokens(address, tls) == (7,)


# --- verifier to drafter ---


class IdlePort:
    """A drafting engine that is never asked anything."""

    def submit(self, peer: str, payload: bytes) -> None:
        raise AssertionError("nothing is asked")

    def peer_gone(self, peer: str) -> None: ...

    def subscribe(self, peer: str, deliver: object) -> None: ...

    def unsubscribe(self, peer: str) -> None: ...

    def load(self) -> DrafterLoad:
        return DrafterLoad()


@contextlib.asynccontextmanager
async def link_to_drafter(drafter: TlsConfig, verifier: TlsConfig | None) -> AsyncIterator[DrafterLink]:
    """A drafter's server, and a verifier's link to it that has been up, or has failed, at least once."""
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    link_pb2_grpc.add_DrafterLinkServicer_to_server(DrafterLinkServicer(IdlePort(), IDENTITY), server)
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0', drafter.server_credentials())}"
    await server.start()
    events: list[PeerState | Relay] = []
    credentials = verifier and verifier.link_credentials(None)
    link = DrafterLink(
        address, drafter_id="d", hello=HELLO, on_event=events.append, config=FAST, credentials=credentials
    )
    link.start()
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            while not link.is_up and link.counters.num_failures < 2:
                await asyncio.sleep(0.005)
        yield link
    finally:
        await link.stop()
        await server.stop(None)


async def test_a_link_comes_up_between_certificates_of_one_ca(certificates: Certificates):
    async with link_to_drafter(certificates.link(), certificates.link()) as link:
        assert link.is_up


async def test_a_verifier_that_is_a_stranger_never_comes_up(certificates: Certificates):
    for stranger in (None, certificates.link(certificates.strange), certificates.link(certificates.expired)):
        async with link_to_drafter(certificates.link(), stranger) as link:
            assert not link.is_up
            assert link.last_error is not None
            assert "UNAVAILABLE" in link.last_error


async def test_a_drafter_that_is_a_stranger_never_comes_up(certificates: Certificates):
    for stranger in (certificates.strange, certificates.expired, certificates.named):
        async with link_to_drafter(certificates.link(stranger), certificates.link()) as link:
            assert not link.is_up
            assert link.last_error is not None
            assert "UNAVAILABLE" in link.last_error
