"""Two verifiers' loops behind gRPC ports: KV in frames and over a tensor channel; givers end, takers hang up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from multiprocessing import Pipe
from typing import Any

import grpc

from fakes.played_fleet import outputs_at
from outrider.cluster.replicas.engine_shell import EngineShell
from outrider.proto import link_pb2_grpc
from outrider.verifier_service.engine.loop import EngineLoop
from outrider.verifier_service.engine.service import RequestTable, VerifierLinkServicer
from outrider.verifier_service.links.control_table import ControlTable
from outrider.verifier_service.links.handover_calls import HandoverCalls
from outrider.verifier_service.links.relay_client import RelayDraftClient
from outrider.verifier_service.messages.engine import FROM_ENGINE, EngineUpdate
from outrider.verifier_service.messages.link import CHANNEL_OPTIONS
from outrider.verifier_service.messages.request import GenerationRequest, RequestOutput
from tiny.handing import HandingEngine

PATIENCE_S = 20.0


class Served:
    """One verifier: its loop on a thread, its shell and its port on this event loop."""

    def __init__(self, bench: HandingEngine) -> None:
        self.bench = bench
        near, far = Pipe()
        self._shell = EngineShell(near, FROM_ENGINE, on_message=self._hear, on_failure=self._fail)
        self.table = RequestTable(self._shell.send)
        self.calls = HandoverCalls(self._shell.send)
        self._server = grpc.aio.server(options=CHANNEL_OPTIONS)
        self._thread = threading.Thread(target=self._run, args=(far,), daemon=True)
        self.num_inline_bytes = 0
        self.error: BaseException | None = None

    async def start(self) -> None:
        servicer = VerifierLinkServicer(self.table, ControlTable(self._shell.send), self.calls)
        link_pb2_grpc.add_VerifierLinkServicer_to_server(servicer, self._server)
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        self._shell.start()
        self._thread.start()

    def _run(self, pipe: Any) -> None:
        try:
            EngineLoop(self.bench.engine, RelayDraftClient(), pipe, clock=time.monotonic, check_integrity=True).run()
        except BaseException as error:
            self.error = error
        finally:
            pipe.close()

    def _hear(self, update: EngineUpdate) -> None:
        self.num_inline_bytes += sum(len(frame.payload) for frame in update.given)
        self.table.deliver(update.outputs)
        self.calls.deliver(update)

    def _fail(self, reason: str) -> None:
        self.table.fail(reason)
        self.calls.fail(reason)

    def stream(self, message: GenerationRequest) -> AsyncIterator[RequestOutput | None]:
        return outputs_at(self.table, message)

    def has_channel_for(self, request_id: str) -> bool:
        """Whether a taker's channel has connected; until then parts would go in frames."""
        takes = list(self.bench.handovers.giver._takes.values())
        senders = [take.sender for take in takes if take.message.request_id == request_id]
        return any(sender is not None and sender.is_connected for sender in senders)

    async def stop(self) -> None:
        await self.calls.close()
        await self._server.stop(grace=None)
        self._shell.close()
        await asyncio.to_thread(self._thread.join)
        self.bench.handovers.close()
        assert self.error is None, repr(self.error)
