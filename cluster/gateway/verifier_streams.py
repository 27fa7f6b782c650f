"""Requests' streams from verifiers: one gRPC call each, over one channel per verifier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import grpc

from outrider.cluster.common.errors import InvalidRequest, RequestFailed
from outrider.proto import link_pb2, link_pb2_grpc
from outrider.verifier_service.links.grpc_channel import LinkCredentials, open_channel
from outrider.verifier_service.messages.link import ACCEPTED
from outrider.verifier_service.messages.request import GenerationRequest, RequestOutput
from outrider.verifier_service.messages.wire import WireError, decode, encode

ACCEPT_TIMEOUT_S = 5.0  # a verifier that has not acknowledged the request by then is lost
# status of a stream whose verifier ended; any other status is about the request
LOSS_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class VerifierLost(Exception):
    """A stream ended before its request, and the request is not known to be the cause."""

    def __init__(self, verifier_id: str, reason: str, *, was_accepted: bool) -> None:
        super().__init__(reason)
        self.verifier_id = verifier_id
        self.was_accepted = was_accepted  # the engine had the request


class _Peer:
    """A verifier's channel, shared by its streams; the last stream closes it once the verifier is lost."""

    def __init__(self, endpoint: str, credentials: LinkCredentials | None) -> None:
        self.channel = open_channel(endpoint, credentials)
        self.stub = link_pb2_grpc.VerifierLinkStub(self.channel)
        self.num_streams = 0


class VerifierStreams:
    """A gateway's open streams."""

    def __init__(self, gateway_id: str, credentials: LinkCredentials | None, has_left: Callable[[str], bool]) -> None:
        """`has_left` tells of an endpoint whether its verifier has left the fleet."""
        self._gateway_id = gateway_id
        self._credentials = credentials
        self._has_left = has_left
        self._peers: dict[str, _Peer] = {}

    async def stream(
        self, verifier_id: str, endpoint: str, message: GenerationRequest
    ) -> AsyncGenerator[RequestOutput]:
        """Stream one request from one verifier; raises `VerifierLost`, or the error of its gRPC status."""
        if endpoint not in self._peers:
            self._peers[endpoint] = _Peer(endpoint, self._credentials)
        peer = self._peers[endpoint]
        call = peer.stub.Generate(link_pb2.Frame(sender=self._gateway_id, payload=encode(message)))
        peer.num_streams += 1
        was_accepted = False
        answers = aiter(call)
        try:
            async with asyncio.timeout(ACCEPT_TIMEOUT_S):
                first = await anext(answers, None)
            was_accepted = first is not None and first.payload == ACCEPTED
            if not was_accepted:
                raise VerifierLost(verifier_id, "it did not say that it has the request", was_accepted=False)
            async for answer in answers:
                yield decode(answer.payload, (RequestOutput,))
            reason = "it ended the stream without a finish reason"
            raise VerifierLost(verifier_id, reason, was_accepted=was_accepted)
        except grpc.aio.AioRpcError as error:
            if error.code() not in LOSS_CODES:
                raise _error_of(error) from error
            self._drop_peer(endpoint, peer)
            raise VerifierLost(verifier_id, str(error.details()), was_accepted=was_accepted) from error
        except TimeoutError as error:
            self._drop_peer(endpoint, peer)
            reason = f"no answer within {ACCEPT_TIMEOUT_S:g} s"
            raise VerifierLost(verifier_id, reason, was_accepted=False) from error
        except WireError as error:
            raise VerifierLost(verifier_id, str(error), was_accepted=was_accepted) from error
        finally:
            call.cancel()
            peer.num_streams -= 1
            if peer.num_streams == 0 and self._peers.get(endpoint) is not peer:
                await peer.channel.close()
            await self._close_unused()

    def _drop_peer(self, endpoint: str, lost: _Peer) -> None:
        """Drop a lost verifier's channel: the next stream opens a new one."""
        if self._peers.get(endpoint) is lost:
            del self._peers[endpoint]

    async def _close_unused(self) -> None:
        """Close channels without streams whose verifiers have left the fleet."""
        unused = [
            endpoint for endpoint, peer in self._peers.items() if peer.num_streams == 0 and self._has_left(endpoint)
        ]
        for peer in [self._peers.pop(endpoint) for endpoint in unused]:
            await peer.channel.close()

    async def close(self) -> None:
        for peer in list(self._peers.values()):
            await peer.channel.close()


def _error_of(error: grpc.aio.AioRpcError) -> InvalidRequest | RequestFailed:
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequest(error.details() or "the verifier refused the request")
    return RequestFailed(f"{error.code().name}: {error.details()}")
