"""The plug-in of a tensor-parallel engine, whose first rank alone talks to the pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.cluster.hosted.plugin import HostStep, Plugin


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
