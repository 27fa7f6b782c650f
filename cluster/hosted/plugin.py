"""The plug-in of one engine process: drafting, connection to the pool, reports, metrics."""

from __future__ import annotations

import collections
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from outrider.cluster.hosted.drafting import Host, HostedConfig, HostedDrafting, HostRow
from outrider.cluster.hosted.metrics import HostedMetrics
from outrider.cluster.hosted.options import PluginOptions
from outrider.cluster.hosted.pool_connection import PoolConnection
from outrider.cluster.router.fleet import VerifierReport
from outrider.verifier_service.drafting.state_source import StateSource
from outrider.verifier_service.messages.link import Hello

logger = logging.getLogger(__name__)

MAX_FAILURES = 3  # within `OFF_S`: then the plug-in is off for `OFF_S`
OFF_S = 600.0
HostStep = tuple[Sequence[HostRow], Iterable[str], Host]  # arguments of `HostedDrafting.propose`


class Plugin:
    """Draft from a pool for an engine's steps; a failure costs drafts and nothing else."""

    def __init__(
        self,
        options: PluginOptions,
        config: HostedConfig,
        *,
        vocab_fingerprint: str,
        engine: str,
        known_ids: Callable[[], Iterable[str]],
        metrics: HostedMetrics,
        states: StateSource | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`engine`: its name in the pool; `known_ids`: ids of its present requests."""
        self._states = states
        self._config = config
        self._known_ids = known_ids
        self._metrics = metrics
        self._clock = clock
        self._failed_s: collections.deque[float] = collections.deque(maxlen=MAX_FAILURES)  # times of failures
        self._hello = Hello(
            verifier_id=f"{engine}-{socket.gethostname()}-{os.getpid()}",
            epoch=time.time_ns(),
            vocab_size=config.vocab_size,
            vocab_fingerprint=vocab_fingerprint,
            state_taps=options.state_taps,
        )
        self._connection = PoolConnection(
            options.pool,
            self._hello,
            report=self._report,
            follow=lambda directive: self._drafting.follow(directive),
            credentials=options.credentials,
        )
        self._drafting = HostedDrafting(self._connection, config, states=states)
        self._connection.start()
        logger.info("drafts come from the pool at %s, as verifier %s", options.pool, self._hello.verifier_id)

    def propose(self, num_rows: int, read: Callable[[], HostStep]) -> list[list[int]]:
        """Return the next step's draft for every row; never raises, not even an error of `read`."""
        if self._is_off:
            return [[] for _ in range(num_rows)]
        try:
            return self._drafting.propose(*read())
        except Exception:
            self._failed_s.append(self._clock())
            after = f"it is off for {OFF_S:.0f} s" if self._is_off else "it begins again"
            logger.exception("drafting has failed; %s", after)
            self._begin_again()
            return [[] for _ in range(num_rows)]

    @property
    def _is_off(self) -> bool:
        failed_s = self._failed_s
        is_often = len(failed_s) == MAX_FAILURES and failed_s[-1] - failed_s[0] < OFF_S
        return is_often and self._clock() - failed_s[-1] < OFF_S

    def close(self) -> None:
        self._connection.stop()

    def _begin_again(self) -> None:
        """Drop all state and reopen every link: drafters then free their sessions."""
        self._drafting = HostedDrafting(self._connection, self._config, states=self._states)
        self._metrics.begin_again()
        self._connection.begin_again()

    def _report(self, linked_drafters: tuple[str, ...]) -> VerifierReport | None:
        drafting = self._drafting
        if (load := drafting.refresh_load(self._known_ids)) is None:
            return None
        self._metrics.observe(load, drafting.num_undrafted, len(linked_drafters))
        return VerifierReport(
            verifier_id=self._hello.verifier_id,
            endpoint="",  # gateways send it no requests
            epoch=self._hello.epoch,
            load=load,
            max_model_len=self._config.max_model_len,
            step_times=drafting.step_times,
            linked_drafters=linked_drafters,
        )


class RankPlugin:
    """The plug-in on one rank: the first of a tensor-parallel group drafts, the others follow."""

    def __init__(self, group: Any, make: Callable[[], Plugin]) -> None:
        """`group`: the engine's tensor-parallel group (vLLM's `GroupCoordinator`, of which SGLang has its own copy)."""
        self._group = group
        self._plugin = make() if group.rank_in_group == 0 else None

    def propose(self, num_rows: int, read: Callable[[], HostStep]) -> list[list[int]]:
        """Return the next step's draft for every row; only the first rank calls `read`."""
        drafts = None if self._plugin is None else self._plugin.propose(num_rows, read)
        if self._group.world_size > 1:
            drafts = self._group.broadcast_object(drafts, src=0)
        assert drafts is not None
        return drafts
