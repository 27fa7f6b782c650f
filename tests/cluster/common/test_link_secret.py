"""The secret that our own services show each other: a usable file, and every caller shows what is in it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from fakes.engine_bench import make_request
from fakes.fleet_snapshots import busy_fleet
from fakes.reports import verifier_report
from outrider.cluster.common.security import LinkTls
from outrider.cluster.gateway.fleet_control import FleetControl
from outrider.cluster.gateway.verifier_streams import VerifierStreams
from outrider.cluster.hosted.options import PluginOptions
from outrider.cluster.hosted.pool_connection import PoolConnection
from outrider.cluster.peers.messages import AskMetrics
from outrider.cluster.peers.others import Others
from outrider.proto import link_pb2
from outrider.verifier_service.links.drafter_link import DrafterLink
from outrider.verifier_service.links.grpc_channel import SECRET_KEY, LinkCredentials, SecretInterceptor
from outrider.verifier_service.links.handover_calls import HandoverCalls
from outrider.verifier_service.messages.engine import EngineUpdate, PauseMode
from outrider.verifier_service.messages.handover import KVSource, KVTerms, PullKV
from outrider.verifier_service.messages.link import Hello
from support.waiting import until

SECRET = "0123456789abcdef" * 2
HELLO = Hello(verifier_id="v", epoch=1, vocab_size=9)
PATIENCE_S = 20.0


@pytest.mark.parametrize("text", ["", "short", "s" * 31, "s" * 32 + "\nand more", "ß" * 32, "s" * 32 + "\x00"])
def test_a_file_without_a_secret_is_refused_by_its_options_name(tmp_path: Path, text: str):
    file = tmp_path / "secret"
    file.write_text(text)
    for unusable in (file, tmp_path / "absent", tmp_path):
        with pytest.raises(ValueError, match="link_secret_file: ") as raised:
            LinkTls(link_secret_file=str(unusable)).check()
        assert not text or text not in str(raised.value)


def test_links_show_it_beside_their_certificates_or_alone(tmp_path: Path):
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    links = PluginOptions(pool="h:1", link_secret_file=str(file))
    links.check()
    assert links.credentials == LinkCredentials(secret=SECRET)
    assert [type(kind) for kind in links.server_interceptors] == [SecretInterceptor]
    assert links.is_closed
    assert not LinkTls().is_closed
    assert (LinkTls().credentials, LinkTls().server_interceptors) == (None, ())
    assert SECRET not in repr(links)


class Recorder(grpc.aio.ServerInterceptor):
    """Notes what each call shows, and refuses it as a stranger's."""

    def __init__(self) -> None:
        self.shown: dict[str, set[str | None]] = {}

    async def intercept_service(self, continuation: object, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        shown = {str(key): str(value) for key, value in details.invocation_metadata}
        self.shown.setdefault(details.method, set()).add(shown.get(SECRET_KEY))
        asking = SecretInterceptor("another secret, which nobody knows")
        return await asking.intercept_service(None, details)  # type: ignore[arg-type]  # nobody passes


@contextlib.asynccontextmanager
async def recording() -> AsyncIterator[tuple[Recorder, str]]:
    recorder = Recorder()
    server = grpc.aio.server(interceptors=(recorder,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield recorder, f"127.0.0.1:{port}"
    await server.stop(None)


class OneFleet:
    """A fleet whose every replica is at one address."""

    def __init__(self, address: str) -> None:
        fleet = busy_fleet()
        verifiers = [replace(state, report=replace(state.report, endpoint=address)) for state in fleet.verifiers]
        drafters = [replace(state, report=replace(state.report, endpoint=address)) for state in fleet.drafters]
        self.snapshot = replace(fleet, verifiers=tuple(verifiers), drafters=tuple(drafters))

    async def refresh(self) -> None:
        """There is nothing new."""


async def test_every_call_between_our_own_services_shows_it():
    ours = LinkCredentials(secret=SECRET)
    async with recording() as (recorder, address):
        streams = VerifierStreams("g", ours, on_accepted=lambda *_: None, on_ended=lambda _: None)
        with pytest.raises(Exception, match="show their secret"):
            await streams.open("v", address, make_request("r")).run(lambda _: None)
        await streams.close()
        others = Others("g", ours)
        others.hear_of({"h": address})
        assert await others.ask_one("h", AskMetrics()) is None
        await others.close()
        control = FleetControl.over_links(OneFleet(address), ours)
        for call in (control.pause(PauseMode.KEEP), control.update_drafters("/folder")):
            with pytest.raises(Exception, match="show their secret"):
                await call
        told: list[Any] = []
        handovers = HandoverCalls(told.append, ours)
        terms = KVTerms(fingerprint="", weight_version="")
        pull = PullKV(request_id="r", source=KVSource(endpoint=address, request_id="s"), terms=terms)
        handovers.deliver(EngineUpdate(pulls=(pull,)))
        await until(lambda: told)
        await handovers.close()
        link = DrafterLink(address, drafter_id="d", hello=HELLO, on_event=told.append, credentials=ours)
        link.start()
        await until(lambda: link.counters.num_failures)
        await link.stop()
        pool = PoolConnection(
            address,
            HELLO,
            report=lambda linked: verifier_report("v0", linked_drafters=linked),
            follow=told.append,
            credentials=ours,
        )
        pool.start()
        await until(lambda: pool.num_failures)
        await asyncio.to_thread(pool.stop)
    services = link_pb2.DESCRIPTOR.services_by_name.values()
    called = {f"/{service.full_name}/{rpc.name}": {SECRET} for service in services for rpc in service.methods}
    assert recorder.shown == called
