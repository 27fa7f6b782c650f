"""How a service fits one machine: who drafts where no option says so, and how many threads each rank has.

Ranks share the cores, and never have more threads than there are cores. The threads of a rank meet at a barrier after
every layer, and wait there without sleeping. With more threads than cores, one thread always waits for a core that
another thread keeps busy: a step then takes 2 to 10 times as long (docs/results/threads.md).
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TypeVar

from outrider.cluster.config.known_models import LOOK_UPS, is_embedded
from outrider.cluster.config.model_options import DEVICES, has_gpu_nodes
from outrider.cluster.config.pools_config import PoolsConfig

Config = TypeVar("Config", bound=PoolsConfig)

FEWEST_CORES = 4  # for a drafter in a process of its own: with fewer, it would take the verifier's cores

logger = logging.getLogger(__name__)


def usable_cores() -> int:
    """Return how many cores this process may use: those that it may run on, or OMP_NUM_THREADS where that is less."""
    num_cores, limit = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS", "")
    return min(num_cores, int(limit)) if limit.isdigit() and int(limit) > 0 else num_cores


def is_small(config: PoolsConfig, *, num_cores: int, devices: Path = DEVICES) -> bool:
    """Tell whether drafters have no place of their own: no GPU that would be used, and few cores."""
    has_gpu = config.model.device != "cpu" and has_gpu_nodes(devices)
    return num_cores < FEWEST_CORES and not has_gpu


def fit_drafting(config: Config, *, num_cores: int, devices: Path = DEVICES) -> Config:
    """Return the configuration with drafts made in the verifier, if the machine is small and no option says who drafts.

    The embedded pair keeps its pool: it is for tests.
    """
    drafting, model = config.drafting, config.model.model
    is_named = config.drafters[0].is_named or drafting.learner is not None  # those in the verifier do not learn
    is_told = is_named or drafting.drafter_pools or is_embedded(model)
    if is_told or drafting.num_drafters.most == 0 or not is_small(config, num_cores=num_cores, devices=devices):
        return config
    return config.with_options(speculative_config={**LOOK_UPS, **drafting.speculative_config})


def num_busy_ranks(config: PoolsConfig) -> int:
    """Return how many ranks compute, of all pools at their largest: look-ups take next to nothing."""
    idle = (pool for pool in config.pools.values() if pool.speculative.looks_up_only)
    return max(1, config.num_ranks - sum(pool.num_drafters.most for pool in idle))


def share_cores(config: Config, *, num_ranks: int, num_cores: int) -> Config:
    """Return the configuration with the threads of each of `num_ranks` ranks on one machine."""
    fair = max(1, num_cores // num_ranks)
    asked = config.model.threads_per_rank
    if asked is not None and asked > fair:
        logger.warning("threads_per_rank: %d ranks share %d cores: %d each, not %d", num_ranks, num_cores, fair, asked)
    return config.with_options(threads_per_rank=fair if asked is None else min(asked, fair))
