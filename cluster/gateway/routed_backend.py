"""The gateway's way to the verifiers: the router names one; if it is lost, the request goes on at another.

While the router is away, the gateway routes by the last snapshot, with the same pure function.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any

import grpc

from outrider.cluster.common.errors import InvalidRequest, Overloaded, RequestFailed, Unavailable
from outrider.cluster.common.reports import ask_router
from outrider.cluster.gateway.admission import OwnQueue, Turnover, refusal
from outrider.cluster.gateway.internal_ids import internal_id
from outrider.cluster.gateway.journal import Attempts, Journal
from outrider.cluster.gateway.request_parser import ModelInfo
from outrider.cluster.gateway.rollout_memory import RolloutMemory
from outrider.cluster.router.fleet import Assignment, FleetSnapshot, RouteAnswer, RouteAsk, RouterPolicy
from outrider.cluster.router.routing import NoVerifierError, route, with_assignment
from outrider.proto import link_pb2, link_pb2_grpc
from outrider.verifier_service.links.grpc_channel import LinkCredentials, open_channel
from outrider.verifier_service.messages.link import ACCEPTED
from outrider.verifier_service.messages.request import GenerationRequest, RequestOutput
from outrider.verifier_service.messages.wire import WireError, decode, encode

logger = logging.getLogger(__name__)

ROUTE_TIMEOUT_S = 0.5  # then the snapshot decides: a frozen router must not block requests
SNAPSHOT_INTERVAL_S = 0.5
ACCEPT_TIMEOUT_S = 5.0  # a verifier that has not acknowledged the request by then is lost
AFFINITY_PREFIX_TOKENS = 256  # prompts that share so many are best served by one verifier
# status of a stream whose verifier ended; any other status is about the request
LOSS_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class RouterClient:
    """Route by the router's deployment; while it is away, by its last snapshot."""

    def __init__(self, router: Any, policy: RouterPolicy) -> None:
        self._router = router
        self._policy = policy
        self.snapshot: FleetSnapshot | None = None

    async def route(self, ask: RouteAsk) -> Assignment:
        """Assign a verifier; raises `Unavailable` when there is none."""
        answer: RouteAnswer | None = await ask_router(self._router.route, ask, timeout_s=ROUTE_TIMEOUT_S)
        assignment = self._route_alone(ask) if answer is None else answer.assignment
        if assignment is None:
            raise Unavailable("no verifier is ready")
        return assignment

    def _route_alone(self, ask: RouteAsk) -> Assignment | None:
        assignment = self.place_of(ask)
        if assignment is not None and self.snapshot is not None:
            self.snapshot = with_assignment(self.snapshot, assignment)
        return assignment

    def place_of(self, ask: RouteAsk) -> Assignment | None:
        """Return where a request would go by the last snapshot; None: there is no verifier."""
        if self.snapshot is None:
            return None
        try:
            return route(self.snapshot, ask, time.time(), self._policy)
        except NoVerifierError:
            return None

    @property
    def num_verifiers(self) -> int:
        return 0 if self.snapshot is None else len(self.snapshot.verifiers)

    def refusal(self, own: OwnQueue, *, priority: int, max_queued_requests: int) -> Overloaded | Unavailable | None:
        """Return why a new request is refused, by the last snapshot; None: it is admitted."""
        if self.snapshot is None:
            return None
        return refusal(
            self.snapshot,
            own,
            priority=priority,
            max_queued_requests=max_queued_requests,
            now_s=time.time(),
            policy=self._policy,
        )

    @property
    def has_no_verifier(self) -> bool:
        """Whether the last snapshot has no verifier: the router has none to name."""
        return self.snapshot is not None and not self.snapshot.verifiers

    def has_left(self, endpoint: str) -> bool:
        """Return whether the last snapshot has no verifier at an endpoint."""
        snapshot = self.snapshot
        return snapshot is not None and all(state.report.endpoint != endpoint for state in snapshot.verifiers)

    def drafters_of(self, verifier_id: str) -> frozenset[str]:
        """Return the drafters that a verifier has links to, by the last snapshot."""
        reports = () if self.snapshot is None else (state.report for state in self.snapshot.verifiers)
        return frozenset(*(report.linked_drafters for report in reports if report.verifier_id == verifier_id))

    async def max_model_len(self) -> int:
        """Wait for the first verifier; return the longest sequence that every verifier can hold."""
        while True:
            verifiers = self.snapshot.verifiers if self.snapshot is not None else ()
            lengths = [length for state in verifiers if (length := state.report.max_model_len) is not None]
            if lengths:
                return min(lengths)
            await asyncio.sleep(SNAPSHOT_INTERVAL_S / 5)

    async def follow(self) -> None:
        """Refresh the snapshot, forever."""
        while True:
            await self.refresh()
            await asyncio.sleep(SNAPSHOT_INTERVAL_S)

    async def refresh(self) -> None:
        """Take the router's snapshot of now; the last one stays if the router does not answer."""
        self.snapshot = await ask_router(self._router.snapshot) or self.snapshot


class _VerifierLost(Exception):
    """A stream ended before its request, and the request is not known to be the cause."""

    def __init__(self, reason: str, *, was_accepted: bool) -> None:
        super().__init__(reason)
        self.was_accepted = was_accepted  # the engine had the request


class _Peer:
    """A verifier's channel, shared by its streams; the last stream closes it once the verifier is lost."""

    def __init__(self, endpoint: str, credentials: LinkCredentials | None) -> None:
        self.channel = open_channel(endpoint, credentials)
        self.stub = link_pb2_grpc.VerifierLinkStub(self.channel)
        self.num_streams = 0


class _Group:
    """Choices of one prompt, which share its KV: all go to the first one's verifier, until it is lost."""

    def __init__(self) -> None:
        self.num_members = 0
        self._assignment: Assignment | None = None
        self._lock = asyncio.Lock()

    async def assign(self, router: RouterClient, ask: RouteAsk) -> Assignment:
        async with self._lock:
            if self._assignment is None:
                self._assignment = await router.route(ask)
            return self._assignment

    def forget(self, lost: Assignment) -> None:
        """Forget the lost verifier, unless another member has found a new one."""
        if self._assignment is lost:
            self._assignment = None


class RoutedBackend:
    """A gateway's `Backend` over every verifier of the fleet."""

    def __init__(
        self,
        router: RouterClient,
        gateway_id: str,
        model: ModelInfo,
        credentials: LinkCredentials | None = None,
        *,
        max_queued_requests: int,
        failover_timeout_s: float,
        memory: RolloutMemory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_queued_requests`, per verifier: see `admission`. `failover_timeout_s`: see `Attempts`.

        `memory`: of rollouts, and where there are none, None.
        """
        self._router = router
        self._gateway_id = gateway_id
        self._model = model
        self._credentials = credentials
        self._max_queued_requests = max_queued_requests
        self._failover_timeout_s = failover_timeout_s
        self._memory = memory
        self._clock = clock
        self._turnover = Turnover(clock)
        self._peers: dict[str, _Peer] = {}
        self._groups: dict[str, _Group] = {}
        self._serial = itertools.count()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[RequestOutput]:
        """Stream one request's outputs, from several verifiers if some are lost; closing the iterator cancels it.

        Raises `Overloaded` before anything is sent; `Unavailable` if no verifier is found in time; `InvalidRequest` if
        a verifier refuses the request; `RequestFailed` if it seems to crash its verifiers.
        """
        self._admit(request)
        journal = Journal(request=request, model=self._model)
        attempts = Attempts(failover_timeout_s=self._failover_timeout_s)
        with self._turnover.entered() as ticket, self._group_of(request) as group:
            while journal.ending is None:
                name = internal_id(self._gateway_id, next(self._serial), request.request_id)
                assignment = await self._place(name, journal, attempts, group)
                message, version = journal.continuation(name, assignment.plan), journal.weight_version
                try:
                    async with contextlib.aclosing(self._attempt(assignment, message)) as outputs:
                        async for output in outputs:
                            self._turnover.begin(ticket)
                            yield journal.publish(output)
                            if version not in ("", output.weight_version):
                                _warn_of_other_weights(name, version, output.weight_version)
                            version = ""
                except _VerifierLost as loss:
                    group.forget(assignment)
                    self._count_loss(name, assignment, loss, journal, attempts)
            if journal.finish_reason is None:
                yield journal.last_output()

    async def prefill(self, request: GenerationRequest) -> RequestOutput | None:
        """Have a background request's prompt computed by the verifier that requests which begin with it go to.

        It is not counted as load. Return its output, of one token; None: it is not known where they go. Raises
        `Unavailable` if the verifier is lost, `InvalidRequest` if it refuses.
        """
        is_known = request.session_id is not None or len(request.prompt_token_ids) >= AFFINITY_PREFIX_TOKENS
        name = internal_id(self._gateway_id, next(self._serial), request.request_id)
        ask = RouteAsk(
            request_id=name,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_speculative_tokens=0,
            affinity_key=affinity_key(request, in_rollouts=self._model.rollouts),
        )
        assignment = self._router.place_of(ask) if is_known or self._router.num_verifiers == 1 else None
        if assignment is None:
            return None
        message = dataclasses.replace(request, request_id=name)
        try:
            async with contextlib.aclosing(self._stream(assignment.endpoint, message)) as outputs:
                return await anext(outputs)
        except _VerifierLost as loss:
            raise Unavailable(str(loss)) from loss

    def _admit(self, request: GenerationRequest) -> None:
        refusal = self._router.refusal(
            self._turnover.update(), priority=request.priority, max_queued_requests=self._max_queued_requests
        )
        if isinstance(refusal, Overloaded):
            self._turnover.promise(refusal.retry_after_s)
        if refusal is not None:
            raise refusal

    @contextlib.contextmanager
    def _group_of(self, request: GenerationRequest) -> Iterator[_Group]:
        """Join the request's group; a request without one is a group of its own."""
        if request.group_id is None:
            yield _Group()
            return
        group = self._groups.setdefault(request.group_id, _Group())
        group.num_members += 1
        try:
            yield group
        finally:
            group.num_members -= 1
            if group.num_members == 0:
                del self._groups[request.group_id]

    async def _place(self, name: str, journal: Journal, attempts: Attempts, group: _Group) -> Assignment:
        """Wait for a verifier that takes the request; return its assignment."""
        request = journal.request
        while True:
            ask = RouteAsk(
                request_id=name,
                num_prompt_tokens=len(request.prompt_token_ids) + len(journal.token_ids),
                num_speculative_tokens=request.sampling.num_speculative_tokens,
                excluded_verifier_ids=attempts.excluded_verifier_ids,
                affinity_key=affinity_key(request, in_rollouts=self._model.rollouts),
                priority=request.priority,
            )
            try:
                return await group.assign(self._router, ask)
            except Unavailable:
                await asyncio.sleep(attempts.none_found(self._clock()))
            while self._router.has_no_verifier:
                await asyncio.sleep(attempts.none_found(self._clock()))

    def _count_loss(
        self, name: str, assignment: Assignment, loss: _VerifierLost, journal: Journal, attempts: Attempts
    ) -> None:
        has_published = journal.close_account()
        if journal.ending is not None:
            return
        logger.warning(
            "request %s lost verifier %s after %d tokens: %s",
            name,
            assignment.verifier_id,
            len(journal.token_ids),
            loss,
        )
        attempts.lost(
            assignment.verifier_id,
            self._clock(),
            was_accepted=loss.was_accepted or has_published,
            has_published=has_published,
            reason=str(loss),
        )

    def _attempt(self, assignment: Assignment, message: GenerationRequest) -> AsyncGenerator[RequestOutput]:
        """Stream one request from its verifier; in rollouts with its history, and into the memory."""
        if self._memory is None:
            return self._stream(assignment.endpoint, message)
        return self._sample(self._memory, assignment, message)

    async def _sample(
        self, memory: RolloutMemory, assignment: Assignment, message: GenerationRequest
    ) -> AsyncGenerator[RequestOutput]:
        drafters = self._router.drafters_of(assignment.verifier_id)
        with memory.sampling(message, assignment.verifier_id, drafters) as sample:
            try:
                async with contextlib.aclosing(self._stream(assignment.endpoint, sample.request)) as outputs:
                    async for output in outputs:
                        sample.hear(output)
                        yield output
            except _VerifierLost:
                sample.lose()
                raise

    async def _stream(self, endpoint: str, message: GenerationRequest) -> AsyncGenerator[RequestOutput]:
        """Stream one request from one verifier; raises `_VerifierLost`, or the error of its gRPC status."""
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
                raise _VerifierLost("it did not say that it has the request", was_accepted=False)
            async for answer in answers:
                yield decode(answer.payload, (RequestOutput,))
            raise _VerifierLost("it ended the stream without a finish reason", was_accepted=was_accepted)
        except grpc.aio.AioRpcError as error:
            if error.code() not in LOSS_CODES:
                raise _error_of(error) from error
            self._drop_peer(endpoint, peer)
            raise _VerifierLost(str(error.details()), was_accepted=was_accepted) from error
        except TimeoutError as error:
            self._drop_peer(endpoint, peer)
            raise _VerifierLost(f"no answer within {ACCEPT_TIMEOUT_S:g} s", was_accepted=False) from error
        except WireError as error:
            raise _VerifierLost(str(error), was_accepted=was_accepted) from error
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
            endpoint
            for endpoint, peer in self._peers.items()
            if peer.num_streams == 0 and self._router.has_left(endpoint)
        ]
        for peer in [self._peers.pop(endpoint) for endpoint in unused]:
            await peer.channel.close()

    async def close(self) -> None:
        for peer in list(self._peers.values()):
            await peer.channel.close()


def affinity_key(request: GenerationRequest, *, in_rollouts: bool = False) -> str:
    """Return the key that requests for the same verifier share: their session, else a hash of their prefix.

    In rollouts a salt may be the policy's version, and a prompt's history is where the prompt went before.
    """
    if request.session_id is not None:
        return request.session_id
    prefix = request.prompt_token_ids[:AFFINITY_PREFIX_TOKENS]
    salt = "" if in_rollouts else request.cache_salt
    return hashlib.blake2b(f"{request.adapter}/{salt}/{prefix}".encode(), digest_size=16).hexdigest()


def _warn_of_other_weights(request_id: str, old: str, new: str) -> None:
    logger.warning("request %s goes on under weights %r; those of its lost verifier were %r", request_id, new, old)


def _error_of(error: grpc.aio.AioRpcError) -> InvalidRequest | RequestFailed:
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequest(error.details() or "the verifier refused the request")
    return RequestFailed(f"{error.code().name}: {error.details()}")
