"""A verifier as a Serve replica: its engine, links to drafters, gRPC port for gateways, reports to the router."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from outrider.cluster.config.service_config import OUTRIDER, ServiceConfig
from outrider.cluster.config.verifier_main import verifier_main
from outrider.cluster.replicas.desired_state import fleet_pause, fleet_weights
from outrider.cluster.replicas.directory_servicer import DirectoryServicer
from outrider.cluster.replicas.draining import HEARD_S, empty_out, wait_until
from outrider.cluster.replicas.node_address import internal_address, with_closed_links
from outrider.cluster.replicas.rank_actors import LONG_START_TIMEOUT_S, START_TIMEOUT_S, RankActors
from outrider.cluster.replicas.replica_base import ReplicaBase, own_id
from outrider.cluster.replicas.verifiers_drafters import Drafters, LinkedDrafters, PluginsDrafters
from outrider.cluster.router.fleet import Directive, VerifierReport, VerifierRole
from outrider.cluster.scaling.figures import VerifierFigures
from outrider.cluster.vllm_engine.spec import VllmSpec
from outrider.proto import link_pb2_grpc
from outrider.verifier_service.engine.service import RequestTable, VerifierLinkServicer
from outrider.verifier_service.links.control_table import ControlTable
from outrider.verifier_service.links.handover_calls import HandoverCalls, NoHandoverCalls
from outrider.verifier_service.links.link_pool import LinkPool
from outrider.verifier_service.messages.draft import LOCAL_DRAFTER_ID
from outrider.verifier_service.messages.engine import (
    FROM_ENGINE,
    Cancel,
    ControlResult,
    EngineLoad,
    EngineReady,
    EngineUpdate,
)
from outrider.verifier_service.messages.link import Hello
from outrider.verifier_service.messages.request import SpeculationPlan
from outrider.verifier_service.model.ranks import RankMain
from outrider.verifier_service.start_phases import begin_phases

logger = logging.getLogger(__name__)
FIRST_REPORT_TIMEOUT_S = 10.0


def own_draft_length(load: EngineLoad, configured: int) -> int:
    """Return the longest draft of the drafter in the engine's process; 0 once that drafter has failed."""
    is_up = any(circuit.drafter_id == LOCAL_DRAFTER_ID for circuit in load.circuits)
    return configured if is_up else 0


class VerifierReplica(ReplicaBase):
    """One replica of the target model."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ServiceConfig, router: Any, role: VerifierRole, main: RankMain | None = None
    ) -> None:
        """`main`: what the ranks run; None: the configuration's engine."""
        config = with_closed_links(config)
        super().__init__(
            config,
            router.report_verifier,
            name=f"verifier/{own_id()}",
            timeout_s=config.engine_timeout_s,
            remove=router.remove,
        )
        begin_phases("verifier", "starting its ranks")
        self._role = role
        self._load: EngineLoad | None = None
        self._default_plan: SpeculationPlan | None = None  # the router's last one
        self._figures = VerifierFigures()
        drafter = config.own_drafter
        self._own_draft_length = 0 if drafter is None else drafter.speculative.num_speculative_tokens
        self._num_ranks = config.verifiers.tensor_parallel_size  # accelerators, whoever starts their processes
        self._is_known = self._is_closed = False
        self._handovers = NoHandoverCalls()  # vLLM's KV stays where it is
        if config.verifiers.engine == OUTRIDER:
            self._handovers = HandoverCalls(self._host.send, config.links.credentials, self._id)
        self._can_migrate = False  # by the router's last directive
        self._table = RequestTable(self._send, max_running=config.max_num_seqs)
        self._control: ControlTable[ControlResult] = ControlTable(self._host.send)
        self._weights = fleet_weights(self._control, lambda: self._load, time.monotonic)
        self._pause = fleet_pause(self._control, time.monotonic)
        main = verifier_main(config, internal_address(config.links)) if main is None else main
        self._drafters = await self._start_engine(config, main)
        self._host.on_close(self._drafters.close)
        self._host.on_close(self._handovers.close)
        self._endpoint = await self._host.serve(
            internal_address(config.links),
            lambda server: link_pb2_grpc.add_VerifierLinkServicer_to_server(
                VerifierLinkServicer(self._table, self._control, self._handovers, config.control_rules), server
            ),
            config.links,
        )
        self._host.tasks.start(self._report_forever(), "report to the router")
        self._host.tasks.start(self._weights.run(), "take the fleet's weights")
        self._host.tasks.start(self._pause.run(), "follow the fleet's pause")
        # Serve stops the old replica once this one is up: the router, if there is one, must know it by then
        await wait_until(lambda: self._is_known, FIRST_REPORT_TIMEOUT_S)

    async def _start_engine(self, config: ServiceConfig, main: RankMain) -> Drafters:
        """Load the engine; return its drafters."""
        placement = config.verifier_placement
        plugins, timeout_s = None, START_TIMEOUT_S
        if isinstance(main, VllmSpec):
            plugins, timeout_s = PluginsDrafters(), LONG_START_TIMEOUT_S
            if main.drafts is not None:  # the plug-in connects to its directory while the engine loads
                main = main.drafting_from(await self._serve_directory(config, plugins))
        ranks = RankActors(main, placement.num_ranks, num_gpus=placement.gpus_per_rank, timeout_s=timeout_s)
        self._ready: EngineReady = await self._host.start(ranks, FROM_ENGINE)
        if plugins is not None:
            return plugins
        hello = Hello(
            verifier_id=self._id,
            epoch=self._epoch,
            vocab_size=self._ready.vocab_size,
            vocab_fingerprint=self._ready.vocab_fingerprint,
            state_taps=config.verifier_spec.model.state_taps,
            tensor_transports=config.tensor_transports,
        )
        return LinkedDrafters(LinkPool(hello, self._host.send, config.links.credentials), self._host.send)

    async def _serve_directory(self, config: ServiceConfig, plugins: PluginsDrafters) -> str:
        servicer = DirectoryServicer(plugins.answer, plugins.forget)
        return await self._host.serve(
            internal_address(config.links),
            lambda server: link_pb2_grpc.add_DrafterDirectoryServicer_to_server(servicer, server),
            config.links,
        )

    def _send(self, message: bytes | Cancel) -> None:
        if self._is_closed and isinstance(message, bytes):  # a request
            raise ConnectionError("the verifier is stopping")  # the gateway goes to another one
        self._host.send(message)

    def _on_update(self, update: EngineUpdate) -> None:
        self._table.deliver(update.outputs)
        self._control.deliver(update.results)
        self._handovers.deliver(update)
        if update.relays:  # only once there are links
            self._drafters.send(update.relays)
        if update.load is not None:
            self._load = update.load
            self._table.hear(update.load)
            self._news.set()

    def _on_failure(self, reason: str) -> None:
        self._table.fail(reason)
        self._control.fail(reason)
        self._handovers.fail(reason)

    async def _follow(self, directive: Directive) -> None:
        self._is_known = True
        self._default_plan = directive.default_plan
        self._can_migrate = directive.can_migrate
        if directive.migrate_one:
            self._hand_over(max_held=1)
        self._weights.want(directive.weights)
        self._pause.want(directive.pause)
        await self._drafters.follow(directive)

    def _report(self) -> VerifierReport | None:
        load = self._load
        if load is None:
            return None
        report = VerifierReport(
            verifier_id=self._id,
            endpoint=self._endpoint,
            epoch=self._epoch,
            load=load,
            num_taken=self._table.num_taken,
            num_pending=self._table.num_pending,
            max_model_len=self._ready.max_model_len,
            step_times=self._ready.step_times,
            own_draft_length=own_draft_length(load, self._own_draft_length),
            num_ranks=self._num_ranks,
            dtype=self._ready.dtype,
            batch_dependent=self._ready.batch_dependent,
            draining=self._is_draining,
            role=self._role,
        )
        return self._drafters.complete(report)

    async def load(self) -> EngineLoad | None:
        """Return the engine's last reported load."""
        return self._load

    async def linked_drafters(self) -> tuple[str, ...]:
        """Return the drafters with a live link."""
        return self._drafters.linked_drafters

    async def check_health(self) -> None:
        """Raise if this replica can no longer verify."""
        await super().check_health()
        self._drafters.check()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the autoscaler's figures, and start to count anew."""
        return {} if self._load is None else self._figures.take(self._load, self._default_plan)

    async def _drain(self) -> None:
        """Accept no new requests, hand the running ones over to other verifiers, and wait for those that stay.

        After the time-out these go on at other verifiers, too, which compute all of their KV again.
        Raises `ConnectionError` without an engine: its requests have moved already.
        """
        self._is_draining = True
        await self._tell_router()
        await asyncio.sleep(HEARD_S)
        is_empty = await empty_out(lambda: len(self._table) == 0, self._hand_over, self._drain_timeout_s)
        self._is_closed = True
        if not is_empty:
            logger.warning("draining ends after %s s with %d requests left", self._drain_timeout_s, len(self._table))
            self._table.fail("the verifier is stopping")

    def _hand_over(self, max_held: int | None = None) -> None:
        """Hold requests that decode, if another verifier could take them: alone, they would wait for nobody."""
        if self._can_migrate:
            self._handovers.hold(max_held)
