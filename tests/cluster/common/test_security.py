"""TLS options are judged at start, by name; the public gRPC port is closed to strangers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from outrider.cluster.common.security import LinkTls, TlsConfig, public_tls
from outrider.cluster.config.service_config import ServiceConfig
from outrider.proto import generation_pb2 as pb
from outrider.proto import generation_pb2_grpc
from services.certificates import Certificates, Identity
from support.stack import Stack

CALL_TIMEOUT_S = 10.0
REQUEST = pb.GenerateRequest(text="the", sampling=pb.SamplingParams(max_tokens=4))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


# --- options ---


def test_nothing_given_is_no_tls_and_an_incomplete_set_names_what_is_missing():
    assert public_tls(None, None, None) is None
    assert LinkTls().tls is None
    for options, missing in (
        ({"ssl_keyfile": "k"}, "ssl_certfile is missing"),
        ({"ssl_certfile": "c"}, "ssl_keyfile is missing"),
        ({"ssl_ca_certs": "a"}, "ssl_certfile is missing"),
        ({"link_ssl_certfile": "c", "link_ssl_keyfile": "k"}, "link_ssl_ca_certs is missing"),
        ({"link_ssl_certfile": "c", "link_ssl_ca_certs": "a"}, "link_ssl_keyfile is missing"),
        ({"link_ssl_server_name": "n"}, "link_ssl_server_name needs"),
    ):
        with pytest.raises(ValueError, match=missing):
            ServiceConfig(**options)


def test_unusable_files_are_refused_by_the_name_of_their_option(certificates: Certificates, tmp_path: Path):
    server, client = certificates.server, certificates.client
    no_pem = tmp_path / "no.pem"
    no_pem.write_text("not a certificate")
    for certfile, keyfile, ca_certs, complaint in (
        (str(tmp_path / "absent"), server.keyfile, None, "ssl_certfile: cannot read .*No such file"),
        (server.certfile, str(tmp_path), None, "ssl_keyfile: cannot read .*directory"),
        (server.certfile, client.keyfile, None, "ssl_certfile, ssl_keyfile: .*MISMATCH"),
        (str(no_pem), server.keyfile, None, "ssl_certfile, ssl_keyfile"),
        (server.certfile, server.keyfile, str(no_pem), "ssl_ca_certs: .* holds no certificate"),
        (server.certfile, server.keyfile, str(tmp_path / "absent"), "ssl_ca_certs: cannot read"),
    ):
        tls = TlsConfig(option="ssl", certfile=certfile, keyfile=keyfile, ca_certs=ca_certs)
        with pytest.raises(ValueError, match=complaint):
            tls.check()
        with pytest.raises(ValueError, match=complaint):
            tls.server_credentials()


def test_an_encrypted_key_is_refused_without_asking_for_its_password(certificates: Certificates, tmp_path: Path):
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(Path(certificates.server.keyfile).read_bytes(), password=None)
    encrypted = tmp_path / "encrypted.key"
    encrypted.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ValueError, match=r"ssl_keyfile: .*unencrypted"):
        certificates.tls(mutual=False, identity=Identity(certificates.server.certfile, str(encrypted))).check()


# --- the public gRPC port ---


@contextlib.asynccontextmanager
async def public_server(tokenizer, tls: TlsConfig) -> AsyncIterator[str]:
    async with Stack(tokenizer=tokenizer).rpc(credentials=tls.server_credentials()) as rpc:
        yield f"127.0.0.1:{rpc.running.port}"


async def ask(address: str, credentials: grpc.ChannelCredentials) -> str:
    async with grpc.aio.secure_channel(address, credentials) as channel:
        answer = await generation_pb2_grpc.InferenceStub(channel).GenerateUnary(REQUEST, timeout=CALL_TIMEOUT_S)
    return answer.choices[0].text


async def test_grpc_with_tls_serves_those_who_trust_it(tokenizer, certificates: Certificates):
    async with public_server(tokenizer, certificates.tls(mutual=False)) as address:
        assert await ask(address, certificates.channel_credentials()) == "fox"
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await ask(address, certificates.channel_credentials(ca_certs=certificates.other_ca_certs))
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        async with grpc.aio.insecure_channel(address) as plaintext:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await generation_pb2_grpc.InferenceStub(plaintext).GenerateUnary(REQUEST, timeout=CALL_TIMEOUT_S)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_mutual_grpc_serves_only_known_certificates(tokenizer, certificates: Certificates):
    async with public_server(tokenizer, certificates.tls(mutual=True)) as address:
        assert await ask(address, certificates.channel_credentials(certificates.client)) == "fox"
        for identity in (None, certificates.strange, certificates.expired):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await ask(address, certificates.channel_credentials(identity))
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
