"""How many threads the ranks of one machine have: they share its cores out, and never have more threads than cores.

Threads of a rank meet at a barrier after every layer, and wait there without sleeping. With more threads than cores one
of them always waits for a core that another burns: a step then takes 2 to 10 times as long (docs/results/threads.md).
"""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import TypeVar

from outrider.cluster.config.service_config import ServiceConfig

Config = TypeVar("Config", bound=ServiceConfig)

logger = logging.getLogger(__name__)


def usable_cores() -> int:
    """Return how many cores this process may use: those that it may run on, or OMP_NUM_THREADS where that is less."""
    num_cores, limit = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS", "")
    return min(num_cores, int(limit)) if limit.isdigit() and int(limit) > 0 else num_cores


def share_cores(config: Config, *, num_ranks: int, num_cores: int) -> Config:
    """Return the configuration with the threads of each of `num_ranks` ranks on one machine."""
    fair = max(1, num_cores // num_ranks)
    asked = config.threads_per_rank
    if asked is not None and asked > fair:
        logger.warning("threads_per_rank: %d ranks share %d cores: %d each, not %d", num_ranks, num_cores, fair, asked)
    return dataclasses.replace(config, threads_per_rank=fair if asked is None else min(asked, fair))
