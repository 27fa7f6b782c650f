"""Who of a tensor-parallel group talks to the drafters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from outrider.cluster.hosted.plugin import HostStep, RankPlugin

DRAFTS = [[5, 6], []]


@dataclass
class Group:
    """vLLM's `GroupCoordinator`; `said` is what the first rank tells the others."""

    rank_in_group: int
    world_size: int
    said: Any = None
    broadcasts: list[tuple[Any, int]] = field(default_factory=list)

    def broadcast_object(self, value: Any, src: int) -> Any:
        self.broadcasts.append((value, src))
        return value if self.rank_in_group == src else self.said


class Asking:
    """A plug-in that has an answer."""

    def propose(self, num_rows: int, read: Any) -> list[list[int]]:
        assert (num_rows, read()) == (2, "a step")
        return DRAFTS


def read() -> HostStep:
    return "a step"  # type: ignore[return-value]


def unwanted() -> Any:
    raise AssertionError("of the first rank alone")


def test_the_first_rank_asks_and_tells_the_others():
    group = Group(rank_in_group=0, world_size=2)
    assert RankPlugin(group, Asking).propose(2, read) == DRAFTS  # type: ignore[arg-type]
    assert group.broadcasts == [(DRAFTS, 0)]


def test_another_rank_makes_no_plug_in_reads_nothing_and_has_what_the_first_one_says():
    group = Group(rank_in_group=1, world_size=2, said=DRAFTS)
    assert RankPlugin(group, unwanted).propose(2, unwanted) == DRAFTS
    assert group.broadcasts == [(None, 0)]


def test_a_rank_by_itself_tells_nobody():
    group = Group(rank_in_group=0, world_size=1)
    assert RankPlugin(group, Asking).propose(2, read) == DRAFTS  # type: ignore[arg-type]
    assert group.broadcasts == []
