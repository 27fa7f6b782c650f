"""The gateway's way to the verifiers: it chooses one by the router's news; if that is lost, it chooses another.

A verifier has the last word on its queue: if it is full, the request goes to the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

from outrider.cluster.common.errors import Overloaded, Unavailable
from outrider.cluster.gateway.admission import Turnover, overload, queue_limit
from outrider.cluster.gateway.handover import KeptStreams, Migration, OnHandover, ignore_handover
from outrider.cluster.gateway.internal_ids import internal_id
from outrider.cluster.gateway.journal import Attempts, Journal
from outrider.cluster.gateway.kv_transfer import offering, prompt_digest
from outrider.cluster.gateway.request_parser import ModelInfo
from outrider.cluster.gateway.rollout_memory import RolloutMemory, Sample
from outrider.cluster.gateway.router_client import RouterClient
from outrider.cluster.gateway.verifier_streams import (
    Hear,
    NotTaken,
    Stream,
    VerifierFull,
    VerifierLost,
    VerifierStreams,
)
from outrider.cluster.router.fleet import Assignment, RouteAsk
from outrider.cluster.router.search import Search
from outrider.verifier_service.links.grpc_channel import LinkCredentials
from outrider.verifier_service.messages.handover import KVSource
from outrider.verifier_service.messages.request import GenerationRequest, RequestOutput, SpeculationPlan

logger = logging.getLogger(__name__)

AFFINITY_PREFIX_TOKENS = 256  # prompts that share so many are best served by one verifier


class _Group:
    """Choices of one prompt, which share its KV: all go to the first one's verifier, until it is lost."""

    def __init__(self) -> None:
        self.num_members = 0
        self._assignment: Assignment | None = None

    def assign(self, router: RouterClient, ask: RouteAsk) -> Assignment:
        if self._assignment is None:
            self._assignment = router.route(ask)
        return self._assignment

    def forget(self, lost: Assignment) -> None:
        """Forget the lost verifier, unless another member has found a new one."""
        if self._assignment is lost:
            self._assignment = None


@dataclass(slots=True, kw_only=True)
class _Run:
    """One request, over all of its attempts."""

    journal: Journal
    attempts: Attempts
    source: KVSource | None  # of the first attempt: where the KV of its prompt is
    search: Search
    is_first: bool = True

    @property
    def may_hand_over(self) -> bool:
        """Whether its prompt may be computed elsewhere: choices share a prompt's KV, and what was lost once stays."""
        request = self.journal.request
        return self.is_first and self.source is None and request.group_id is None and request.sampling.beams is None


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
        kv_peers: Iterable[str] = (),
        on_handover: OnHandover = ignore_handover,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_queued_requests`, per verifier: see `admission`. `failover_timeout_s`: see `Attempts`.

        `memory`: of rollouts, and where there are none, None. `kv_peers`: hosts, or hosts and ports, of verifiers
        beside the fleet's from which a client may have KV taken.
        """
        self._router = router
        self._gateway_id = gateway_id
        self._model = model
        self._max_queued_requests = max_queued_requests
        self._failover_timeout_s = failover_timeout_s
        self._memory = memory
        self._clock = clock
        self._turnover = Turnover(clock)
        self._streams = VerifierStreams(
            gateway_id, credentials, on_accepted=router.view.accept, on_ended=router.view.end
        )
        self._kept = KeptStreams()
        self._kv_peers = frozenset(kv_peers)
        self._on_handover = on_handover
        self._groups: dict[str, _Group] = {}
        self._serial = itertools.count()

    async def generate(self, request: GenerationRequest, hear: Hear) -> None:
        """Pass one request's outputs on, from several verifiers if some are lost; cancelling the call cancels it.

        Raises `Overloaded` before anything is published; `Unavailable` if no verifier is found in time;
        `InvalidRequest` if a verifier refuses the request; `RequestFailed` if it seems to crash its verifiers.
        """
        self._admit(request)
        run = _Run(
            journal=Journal(request=request, model=self._model),
            attempts=Attempts(failover_timeout_s=self._failover_timeout_s),
            source=self._allowed_source(request),
            search=Search(may_wait=request.group_id is not None),  # choices stay together
        )
        journal = run.journal
        with self._turnover.entered() as ticket, self._group_of(request) as group:
            while journal.ending is None:
                name = self._new_name(request)
                assignment = await self._place(name, run, group)
                try:
                    await self._attempt(name, assignment, run, self._publishing(name, journal, ticket, hear))
                except VerifierFull as full:
                    group.forget(assignment)
                    if not run.search.refused(full.verifier_id):
                        raise self._crowded_out(str(full)) from full
                except VerifierLost as loss:
                    group.forget(assignment)
                    self._count_loss(name, run, loss)
                except NotTaken as refusal:
                    group.forget(assignment)
                    self._count_refusal(name, run, refusal)
                run.is_first = False
            if journal.finish_reason is None:
                hear(journal.last_output())

    def _publishing(self, name: str, journal: Journal, ticket: int, hear: Hear) -> Hear:
        """Return what records an attempt's outputs and passes them on."""
        version = journal.weight_version

        def publish(output: RequestOutput) -> None:
            nonlocal version
            if output.is_held and not output.token_ids:
                return
            self._turnover.begin(ticket)
            if version and version != output.weight_version:
                _warn_of_other_weights(name, version, output.weight_version)
            version = ""
            hear(journal.publish(output))

        return publish

    async def prefill(self, request: GenerationRequest) -> RequestOutput | None:
        """Have a background request's prompt computed by the verifier that requests which begin with it go to.

        It is not counted as load. Return its output, of one token; None: it is not known where they go. Raises
        `Unavailable` if the verifier is lost, `InvalidRequest` if it refuses.
        """
        is_known = request.session_id is not None or len(request.prompt_token_ids) >= AFFINITY_PREFIX_TOKENS
        name = self._new_name(request)
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
        stream = self._open(assignment.verifier_id, assignment.endpoint, message)
        try:
            return await stream.run(_ignore)
        except VerifierLost as loss:
            raise Unavailable(str(loss)) from loss
        finally:
            stream.end()

    def _admit(self, request: GenerationRequest) -> None:
        refusal = self._router.refusal(
            self._turnover.update(), priority=request.priority, max_queued_requests=self._max_queued_requests
        )
        if refusal is not None:
            raise self._promised(refusal)

    def _crowded_out(self, reason: str) -> Overloaded | Unavailable:
        """Return the refusal of a new request that found full queues."""
        return self._promised(overload(reason, self._turnover.update(), self._max_queued_requests))

    def _promised(self, refusal: Overloaded | Unavailable) -> Overloaded | Unavailable:
        """Return a refusal; a client that is told when to come back is expected then."""
        if isinstance(refusal, Overloaded):
            self._turnover.promise(refusal.retry_after_s)
        return refusal

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

    def _allowed_source(self, request: GenerationRequest) -> KVSource | None:
        """Return where a client says that the KV of its prompt is, if a verifier may go and take it there."""
        source = request.kv_source
        if source is None or request.sampling.prompt_logprobs is not None:  # which only a prefill computes
            return None
        host = source.endpoint.rpartition(":")[0]
        is_known = self._router.has_verifier_at(source.endpoint) or not self._kv_peers.isdisjoint(
            (source.endpoint, host)
        )
        if is_known and source.request_id.endswith(prompt_digest(request)):
            return source
        reason = "other_prompt" if is_known else "unknown_peer"
        logger.warning("request %s computes its own KV: %s: %s", request.request_id, source.endpoint, reason)
        self._on_handover("not_taken", reason)
        return None

    async def _place(self, name: str, run: _Run, group: _Group) -> Assignment:
        """Wait for a verifier that takes the request; return its assignment."""
        attempts, search = run.attempts, run.search
        while True:
            excluded = (*attempts.excluded_verifier_ids, *search.excluded_ids)
            try:
                return group.assign(self._router, self._ask(name, run, excluded))
            except Unavailable:
                if search.none_left():
                    continue
                if search.full_ids:
                    raise self._crowded_out("no verifier has room") from None
                await asyncio.sleep(attempts.none_found(self._clock()))

    def _ask(self, name: str, run: _Run, excluded_verifier_ids: tuple[str, ...]) -> RouteAsk:
        request = run.journal.request
        return RouteAsk(
            request_id=name,
            num_prompt_tokens=len(request.prompt_token_ids) + len(run.journal.token_ids),
            num_speculative_tokens=request.sampling.num_speculative_tokens,
            excluded_verifier_ids=excluded_verifier_ids,
            affinity_key=affinity_key(request, in_rollouts=self._model.rollouts),
            priority=request.priority,
            may_hand_over=run.may_hand_over and self._memory is None,  # a response is remembered where all was drawn
        )

    def _new_name(self, request: GenerationRequest) -> str:
        return internal_id(self._gateway_id, next(self._serial), request.request_id)

    def _attempt(self, name: str, assignment: Assignment, run: _Run, hear: Hear) -> Awaitable[None]:
        """Run the request at its verifier, or at the one that computes its prompt and the one that takes it."""
        journal, plan = run.journal, assignment.plan
        own = prefill = assignment.verifier_id, assignment.endpoint
        if assignment.prefill_verifier_id is not None:
            prefill = assignment.prefill_verifier_id, assignment.prefill_endpoint
        source = run.source if run.is_first else None
        most_waiting = self._most_waiting(prefill[0], assignment, run)
        message = journal.continuation(name, plan, source, most_waiting=most_waiting)
        taker = None
        if journal.request.hands_over:
            return self._kept.run(self._open(*prefill, offering(message)), hear)
        if prefill is own:
            stream = self._open(*own, message)
        else:  # drafts are for the taker: the giver draws one token
            giver = self._new_name(journal.request)
            giving = dataclasses.replace(message, request_id=giver, plan=SpeculationPlan(), hands_over=True)
            stream = self._open(*prefill, giving)
            taker = self._open(*own, journal.continuation(name, plan, stream.place))
        return Migration(
            stream=stream,
            taker=taker,
            find_taker=functools.partial(self._find_taker, run),
            on_taken=functools.partial(self._on_taken, journal),
            tell=self._on_handover,
            clock=self._clock,
        ).run(hear)

    def _most_waiting(self, verifier_id: str, assignment: Assignment, run: _Run) -> int | None:
        """Return how many may wait at a verifier, with this request; None: any number, it was admitted before."""
        state = self._router.view.state_of(verifier_id)
        if state is None or not run.attempts.is_new:
            return None
        priority = run.journal.request.priority
        limit = queue_limit(state, priority=priority, max_queued_requests=self._max_queued_requests)
        return run.search.most_waiting(assignment, state, limit)

    async def _find_taker(self, run: _Run, giver: Stream) -> Stream | None:
        """Let another verifier take over a request that its verifier holds; None: there is none now."""
        name = self._new_name(run.journal.request)
        excluded = (giver.verifier_id, *run.attempts.excluded_verifier_ids)
        try:
            assignment = self._router.route(self._ask(name, run, excluded))
        except Unavailable:
            return None
        message = run.journal.continuation(name, assignment.plan, giver.place)
        return self._open(assignment.verifier_id, assignment.endpoint, message)

    def _on_taken(self, journal: Journal, source: KVSource) -> None:
        journal.close_account()
        self._kept.release(source)

    def _open(self, verifier_id: str, endpoint: str, message: GenerationRequest) -> Stream:
        """Begin a stream; in rollouts with its history, and into the memory. It is load from now on."""
        if not message.is_background:
            self._router.view.begin(message.request_id, verifier_id, message.plan.drafter_id)
        if self._memory is None:
            return self._streams.open(verifier_id, endpoint, message)
        sampling = self._memory.sampling(message, verifier_id, self._router.drafters_of(verifier_id))
        witness = _SampleWitness(sampling)
        return self._streams.open(verifier_id, endpoint, witness.sample.request, witness)

    def _count_loss(self, name: str, run: _Run, loss: VerifierLost) -> None:
        has_published = run.journal.close_account()
        if run.journal.ending is not None:
            return
        num_tokens = len(run.journal.token_ids)
        logger.warning("request %s lost verifier %s after %d tokens: %s", name, loss.verifier_id, num_tokens, loss)
        run.attempts.lost(
            loss.verifier_id,
            self._clock(),
            was_accepted=loss.was_accepted or has_published,
            has_published=has_published,
            reason=str(loss),
        )

    def _count_refusal(self, name: str, run: _Run, refusal: NotTaken) -> None:
        """Count a verifier that could not take the request: none was lost, and one computes the KV again."""
        run.journal.close_account()
        logger.warning("request %s was not taken after %d tokens: %s", name, len(run.journal.token_ids), refusal)
        self._on_handover("not_taken", refusal.label)

    async def close(self) -> None:
        await self._kept.close()
        await self._streams.close()


class _SampleWitness:
    """Notes a stream's outputs in the memory of rollouts."""

    def __init__(self, sampling: contextlib.AbstractContextManager[Sample]) -> None:
        self._sampling = sampling
        self.sample = sampling.__enter__()
        self.hear = self.sample.hear
        self.lose = self.sample.lose

    def close(self) -> None:
        self._sampling.__exit__(None, None, None)


def _ignore(output: RequestOutput) -> None:
    """A prompt's one token is told once, by the call's end."""


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
