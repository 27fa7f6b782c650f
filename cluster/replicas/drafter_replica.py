"""A drafter as a Serve replica: its engine, its end of the links, its reports to the router."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

from outrider.cluster.common.reports import ask
from outrider.cluster.config.pools_config import PoolsConfig
from outrider.cluster.replicas.draining import HEARD_S, wait_until
from outrider.cluster.replicas.engine_host import EngineHost
from outrider.cluster.replicas.learner_heartbeats import ANSWER_TIMEOUT_S, LearnerHeartbeats
from outrider.cluster.replicas.node_address import internal_address, with_closed_links
from outrider.cluster.replicas.rank_actors import RankActors
from outrider.cluster.replicas.replica_base import ReplicaBase, own_id
from outrider.cluster.router.fleet import DrafterReport
from outrider.cluster.scaling.figures import drafter_figures
from outrider.drafter_service.engine.messages import FROM_DRAFT_ENGINE, DrafterReady, DrafterUpdate
from outrider.drafter_service.service.drafter_spec import DrafterSpec
from outrider.drafter_service.service.methods import Kind
from outrider.drafter_service.service.service import DrafterLinkServicer, EngineDeadError
from outrider.proto import link_pb2_grpc
from outrider.verifier_service.links.control_table import ControlTable
from outrider.verifier_service.messages.drafter_load import DrafterLoad
from outrider.verifier_service.messages.engine import ControlResult, PeerState, Relay
from outrider.verifier_service.messages.link import DrafterIdentity
from outrider.verifier_service.messages.tensor_route import TensorRoute
from outrider.verifier_service.model.architectures import resolve_folder

QUIET_S = 1.0  # a drafter without an ask for so long is idle, even if it holds sessions


class ShellPort:
    """The servicer's way to a draft engine in another process."""

    def __init__(self, host: EngineHost, clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._clock = clock
        self._last_ask_s = clock()
        self._load = DrafterLoad()
        self._deliver: dict[str, Callable[[bytes], None]] = {}
        self._calls: ControlTable[ControlResult] = ControlTable(host.send)
        self.control, self.fail = self._calls.call, self._calls.fail

    @property
    def is_quiet(self) -> bool:
        """Return whether no session is left, or none has asked for drafts lately."""
        return self._load.num_sessions == 0 or self._clock() - self._last_ask_s >= QUIET_S

    def submit(self, peer: str, payload: bytes) -> None:
        self._last_ask_s = self._clock()
        self._send(Relay(peer=peer, payload=payload))

    def peer_gone(self, peer: str) -> None:
        self._send(PeerState(peer=peer, is_up=False))

    def subscribe(self, peer: str, deliver: Callable[[bytes], None]) -> None:
        self._deliver[peer] = deliver

    def unsubscribe(self, peer: str) -> None:
        self._deliver.pop(peer, None)

    def open_tensors(self, peer: str, route: TensorRoute) -> None:
        self._send(PeerState(peer=peer, is_up=True, tensors=route))

    def load(self) -> DrafterLoad:
        if self._host.failure is not None:
            raise EngineDeadError(self._host.failure)
        return self._load

    def on_update(self, update: DrafterUpdate) -> None:
        """Pass drafts to their links, and answers to those who called."""
        for relay in update.relays:
            if (deliver := self._deliver.get(relay.peer)) is not None:
                deliver(relay.payload)
        self._load = update.load or self._load
        self._calls.deliver(update.results)

    def _send(self, message: Relay | PeerState) -> None:
        try:
            self._host.send(message)
        except ConnectionError as error:
            raise EngineDeadError(str(error)) from error


def learner_heartbeats(drafter_id: str, spec: DrafterSpec, learner: Any, port: ShellPort) -> LearnerHeartbeats:
    """Return a drafter's heartbeats to the learner behind a handle."""
    looks_up = spec.speculative.has(Kind.LOOKUP)
    return LearnerHeartbeats(
        drafter_id,
        own_folder="" if spec.model is None else str(resolve_folder(spec.model)),
        heartbeat=functools.partial(ask, learner.heartbeat, timeout_s=ANSWER_TIMEOUT_S),
        texts=functools.partial(ask, learner.texts, timeout_s=ANSWER_TIMEOUT_S) if looks_up else None,
        control=port.control,
        clock=time.monotonic,
    )


class DrafterReplica(ReplicaBase):
    """One replica of a drafter pool."""

    async def __init__(self, config: PoolsConfig, router: Any, pool: str, learner: Any = None) -> None:  # type: ignore[misc]  # Serve awaits it
        """`learner` is the handle of the pool's learner; None: it has none."""
        config = with_closed_links(config)
        super().__init__(
            config,
            router.report_drafter,
            name=f"drafter/{own_id()}",
            timeout_s=config.engine_timeout_s,
            remove=router.remove,
        )
        self._port = ShellPort(self._host)
        options = config.pools[pool]
        spec, placement = config.drafter_spec_of(options), config.drafter_placement(options)
        self._num_ranks = placement.num_ranks
        self._pool = pool
        self._heartbeats = None if learner is None else learner_heartbeats(self._id, spec, learner, self._port)
        transports = config.tensor_transports
        spec = dataclasses.replace(spec, tensor_host=internal_address(config.links) if transports else "")
        ranks = RankActors(spec, placement.num_ranks, num_gpus=placement.gpus_per_rank)
        self._ready: DrafterReady = await self._host.start(ranks, FROM_DRAFT_ENGINE)
        identity = DrafterIdentity(
            drafter_id=self._id,
            vocab_size=self._ready.vocab_size,
            vocab_fingerprint=self._ready.vocab_fingerprint,
            max_draft_length=self._ready.max_draft_length,
            max_model_len=self._ready.max_model_len,
            needs=self._ready.needs,
            tensor_transports=transports,
            tensor_store=self._ready.tensor_store,
        )
        self._servicer = DrafterLinkServicer(self._port, identity, rules=config.control_rules)
        self._endpoint = await self._host.serve(
            internal_address(config.links),
            lambda server: link_pb2_grpc.add_DrafterLinkServicer_to_server(self._servicer, server),
            config.links,
        )
        if self._heartbeats is not None:
            await self._heartbeats.heartbeat_once()  # so that the first draft is already one of the version that serves
            self._host.tasks.start(self._heartbeats.run(), "heartbeat the learner")
        self._host.tasks.start(self._report_forever(), "report to the router")

    def _on_update(self, update: DrafterUpdate) -> None:
        self._port.on_update(update)
        if self._heartbeats is not None:
            self._heartbeats.take(update)

    def _on_failure(self, reason: str) -> None:
        self._port.fail(reason)

    def _report(self) -> DrafterReport:
        load = self._port.load()
        return DrafterReport(
            drafter_id=self._id,
            pool=self._pool,
            endpoint=self._endpoint,
            epoch=self._epoch,
            load=load,
            max_draft_length=self._ready.max_draft_length,
            num_ranks=self._num_ranks,
            draining=self._is_draining,
            num_bad_frames=self._servicer.counters.num_bad_frames + load.counters.num_bad_messages,
        )

    async def load(self) -> DrafterLoad:
        """Return the engine's last reported load."""
        return self._port.load()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the autoscaler's figures."""
        return drafter_figures(self._port.load())

    async def _drain(self) -> None:
        """Wait while verifiers move their requests to other drafters; a remaining one loses speed, never a token."""
        if self._host.failure is not None:
            return
        self._is_draining = True
        await self._tell_router()
        await asyncio.sleep(HEARD_S)
        await wait_until(lambda: self._port.is_quiet, self._drain_timeout_s)
