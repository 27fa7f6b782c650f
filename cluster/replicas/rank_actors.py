"""The ranks of one engine, as child actors of a Serve replica in its placement group."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from outrider.cluster.config.placement import RANK_CPUS
from outrider.verifier_service.model.ranks import PipeListener, RankMain, RankSpec, run_rank

START_TIMEOUT_S = 300.0  # a rank imports torch and loads its share of the weights
LONG_START_TIMEOUT_S = 1800.0  # vLLM also compiles its model


class Rank:
    """One rank: a process whose main thread runs the engine."""

    def pid(self) -> int:
        return os.getpid()

    def run(self, spec: RankMain, rank: RankSpec) -> None:
        run_rank(spec, rank)


RankActor: Any = ray.remote(max_restarts=0)(Rank)  # Ray's decorators are badly typed


class RankActors:
    """The ranks of one engine. They end with their replica; once one has ended, the group cannot go on."""

    def __init__(
        self,
        spec: RankMain,
        size: int,
        *,
        num_gpus: float,
        num_cpus: float = RANK_CPUS,
        timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """`num_gpus`, `num_cpus`: of each rank. `timeout_s`: the longest time that a rank may take to load."""
        self._timeout_s = timeout_s
        self._folder = Path(tempfile.mkdtemp(prefix="outrider-"))  # mode 0700: only this user's processes connect
        ranks = [RankSpec(rank=rank, size=size, folder=self._folder) for rank in range(size)]
        self._listener = PipeListener(ranks[0].shell_address)
        group = ray.util.get_current_placement_group()
        # bundle 0 is the replica's own
        strategies = [
            PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank + 1) if group else "DEFAULT"
            for rank in range(size)
        ]
        self._actors = [
            RankActor.options(num_cpus=num_cpus, num_gpus=num_gpus, scheduling_strategy=strategy).remote()
            for strategy in strategies
        ]
        self._pids = [actor.pid.remote() for actor in self._actors]
        self._runs = [actor.run.remote(spec, rank) for actor, rank in zip(self._actors, ranks, strict=True)]

    async def connect(self) -> Connection:
        """Wait until rank 0 has loaded; return the pipe to it. Raises the error that ended a rank."""
        accepting = asyncio.to_thread(self._listener.accept, lambda: not self.ended(), self._timeout_s)
        try:
            return await accepting
        except ConnectionError:
            ended, _ = ray.wait(self._runs, num_returns=1, timeout=0)
            await asyncio.gather(*ended)  # raises the rank's own error, which is more specific
            raise

    async def pids(self) -> list[int]:
        return list(await asyncio.gather(*self._pids))

    def ended(self) -> bool:
        """Return whether any rank has ended."""
        done, _ = ray.wait(self._runs, num_returns=1, timeout=0)
        return bool(done)

    def stop(self) -> None:
        """End every rank and remove their socket's folder."""
        for actor in self._actors:
            ray.kill(actor)
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)
