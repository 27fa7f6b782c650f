"""The gateway's way to the verifiers: ask the router where, then stream from there.

The router may be away: the last snapshot and the same pure function then decide here, so requests go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc

from outrider.cluster.errors import InvalidRequest, OutriderError, RequestFailed, Unavailable
from outrider.cluster.fleet import Assignment, FleetSnapshot, RouteAsk, RouterPolicy
from outrider.cluster.reports import ask_router
from outrider.cluster.routing import NoVerifierError, route, with_assignment
from outrider.proto import link_pb2, link_pb2_grpc
from outrider.verifier_service.link_messages import CHANNEL_OPTIONS
from outrider.verifier_service.request import GenerationRequest, RequestOutput
from outrider.verifier_service.wire import decode, encode

ROUTE_TIMEOUT_S = 0.5  # then the snapshot decides: admission must not hang on a frozen router
SNAPSHOT_INTERVAL_S = 0.5
MAX_ATTEMPTS = 3  # verifiers tried for a request of which nothing has been published


class RouterClient:
    """Route by the router's deployment; without it, by its last snapshot."""

    def __init__(self, router: Any, policy: RouterPolicy) -> None:
        self._router = router
        self._policy = policy
        self.snapshot: FleetSnapshot | None = None

    async def route(self, ask: RouteAsk) -> Assignment:
        """Assign a verifier; raises `Unavailable` when there is none."""
        assignment = await ask_router(self._router.route, ask, timeout_s=ROUTE_TIMEOUT_S)
        if assignment is None:
            assignment = self._route_alone(ask)
        if assignment is None:
            raise Unavailable("no verifier is ready")
        return assignment

    def _route_alone(self, ask: RouteAsk) -> Assignment | None:
        if self.snapshot is None:
            return None
        try:
            assignment = route(self.snapshot, ask, time.time(), self._policy)
        except NoVerifierError:
            return None
        self.snapshot = with_assignment(self.snapshot, assignment)
        return assignment

    async def max_model_len(self) -> int:
        """Wait for the first verifier; return the longest sequence that all of them hold."""
        while True:
            verifiers = self.snapshot.verifiers if self.snapshot is not None else ()
            lengths = [length for state in verifiers if (length := state.report.max_model_len) is not None]
            if lengths:
                return min(lengths)
            await asyncio.sleep(SNAPSHOT_INTERVAL_S / 5)

    async def follow(self) -> None:
        """Keep the snapshot fresh for as long as the router answers."""
        while True:
            self.snapshot = await ask_router(self._router.snapshot) or self.snapshot
            await asyncio.sleep(SNAPSHOT_INTERVAL_S)


class _Peer:
    """A verifier's channel, shared by the streams from it; the last one closes it once it is no longer wanted."""

    def __init__(self, endpoint: str) -> None:
        self.channel = grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
        self.stub = link_pb2_grpc.VerifierLinkStub(self.channel)
        self.num_streams = 0


class RoutedBackend:
    """A gateway's `Backend` over every verifier of the fleet."""

    def __init__(self, router: RouterClient, gateway_id: str) -> None:
        self._router = router
        self._gateway_id = gateway_id
        self._peers: dict[str, _Peer] = {}
        self._serial = itertools.count()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[RequestOutput]:
        """Stream one request's outputs from the verifier the router chose; leaving early cancels it there."""
        # two clients may choose the same id: inside the fleet every request has one of its own
        internal_id = f"{self._gateway_id}/{next(self._serial)}/{request.request_id}"
        ask = RouteAsk(
            request_id=internal_id,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_speculative_tokens=request.sampling.num_speculative_tokens,
        )
        while True:
            assignment = await self._router.route(ask)
            message = dataclasses.replace(request, request_id=internal_id, plan=assignment.plan)
            is_published = False
            try:
                async with contextlib.aclosing(self._stream(assignment.endpoint, message)) as outputs:
                    async for output in outputs:
                        is_published = True
                        yield dataclasses.replace(output, request_id=request.request_id)
                return
            except Unavailable:
                excluded = (*ask.excluded_verifier_ids, assignment.verifier_id)
                if is_published or len(excluded) == MAX_ATTEMPTS:
                    raise
                ask = dataclasses.replace(ask, excluded_verifier_ids=excluded)

    async def _stream(self, endpoint: str, message: GenerationRequest) -> AsyncGenerator[RequestOutput]:
        """Stream one request from one verifier; raises the error that its gRPC status means."""
        if endpoint not in self._peers:
            self._peers[endpoint] = _Peer(endpoint)
        peer = self._peers[endpoint]
        call = peer.stub.Generate(link_pb2.Frame(sender=self._gateway_id, payload=encode(message)))
        peer.num_streams += 1
        try:
            async for answer in call:
                yield decode(answer.payload, (RequestOutput,))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._peers.pop(endpoint, None)  # a verifier that comes back has another address
            raise _error_of(error) from error
        finally:
            call.cancel()
            peer.num_streams -= 1
            if peer.num_streams == 0 and self._peers.get(endpoint) is not peer:
                await peer.channel.close()

    async def close(self) -> None:
        for peer in self._peers.values():
            await peer.channel.close()


def _error_of(error: grpc.aio.AioRpcError) -> OutriderError:
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequest(error.details() or "the verifier refused the request")
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return Unavailable(error.details() or "the verifier is gone")
    return RequestFailed(f"{error.code().name}: {error.details()}")
