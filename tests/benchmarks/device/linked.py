"""A played drafter behind a real link: its engine is a process, and both ends of the gRPC stream are another.

As in a service, but for what stands still while a request runs: no router, and one event loop for both shells.
"""

from __future__ import annotations

import asyncio
import os
import time
from multiprocessing.connection import Connection

from outrider.cluster.replicas.drafter_replica import ShellPort
from outrider.cluster.replicas.engine_host import EngineHost
from outrider.drafter_service.engine.messages import FROM_DRAFT_ENGINE, DrafterReady, DrafterUpdate
from outrider.drafter_service.service.service import DrafterLinkServicer
from outrider.proto.link_pb2_grpc import add_DrafterLinkServicer_to_server
from outrider.verifier_service.links.link_pool import LinkPool
from outrider.verifier_service.messages.engine import PeerState, Relay
from outrider.verifier_service.messages.link import DrafterEndpoint, DrafterIdentity, Hello
from outrider.verifier_service.messages.wire import decode, encode
from outrider.verifier_service.model.ranks import PipeListener, RankSpec, connect, keep_loaded

DRAFTER_ID = "process"
HOST = "127.0.0.1"
TIMEOUT_S = 60.0


class _Drafter:
    """The drafter's engine, which somebody else has started: what `RankActors` are for an `EngineHost`."""

    def __init__(self, address: str) -> None:
        self._listener = PipeListener(address)

    async def connect(self) -> Connection:
        with self._listener:
            return await asyncio.to_thread(self._listener.accept)

    def ended(self) -> bool:
        return False

    def stop(self) -> None:
        """Nothing: it ends with its pipe."""


def run_link(address: str, rank: RankSpec) -> None:
    """Be the process that holds both ends of the link, until the verifier closes its pipe."""
    asyncio.run(_hold_link(address, connect(rank.shell_address)))


async def _hold_link(address: str, verifier: Connection) -> None:
    host = EngineHost(on_message=lambda update: port.on_update(update), on_failure=print, timeout_s=TIMEOUT_S)
    port = ShellPort(host)
    ready: DrafterReady = await host.start(_Drafter(address), FROM_DRAFT_ENGINE)
    identity = DrafterIdentity(
        drafter_id=DRAFTER_ID,
        vocab_size=ready.vocab_size,
        vocab_fingerprint="",
        max_draft_length=ready.max_draft_length,
        max_model_len=ready.max_model_len,
        needs=ready.needs,
    )
    servicer = DrafterLinkServicer(port, identity)
    endpoint = await host.serve(HOST, lambda server: add_DrafterLinkServicer_to_server(servicer, server))
    is_up = asyncio.Event()

    def on_event(event: PeerState | Relay) -> None:
        if isinstance(event, PeerState):
            is_up.set()
        else:
            verifier.send_bytes(encode(DrafterUpdate(relays=(event,), load=port.load())))

    links = LinkPool(Hello(verifier_id="v", epoch=time.time_ns(), vocab_size=ready.vocab_size), on_event)
    host.on_close(links.close)
    await links.hold([DrafterEndpoint(drafter_id=DRAFTER_ID, endpoint=endpoint, epoch=1)])
    await asyncio.wait_for(is_up.wait(), TIMEOUT_S)
    verifier.send_bytes(encode(ready))
    keep_loaded()
    await _relay(verifier, links)
    await host.close()


async def _relay(verifier: Connection, links: LinkPool) -> None:
    """Pass on what the verifier says to its drafter, until it hangs up."""
    hung_up = asyncio.Event()

    def read() -> None:
        relays: list[Relay] = []
        try:
            while verifier.poll(0):
                relays.append(decode(verifier.recv_bytes(), (Relay,)))
        except (EOFError, OSError):
            loop.remove_reader(verifier.fileno())
            hung_up.set()
        links.send(relays)

    loop = asyncio.get_running_loop()
    os.set_blocking(verifier.fileno(), True)
    loop.add_reader(verifier.fileno(), read)
    await hung_up.wait()
