"""Masks in the step that verifies, by which a model guesses its next draft: TiDAR (Liu et al. 2025, arXiv 2511.08923).

Behind a request's draft stand blocks of masks, one for each count of draft tokens that may be accepted. A block sees
the committed tokens, its count of draft tokens and all of itself; nothing else sees it. The block of the count that is
accepted has guessed on; the others, and the KV of all, are dropped.

    tokens      last committed | draft 0  draft 1 | mask  mask | mask  mask | mask  mask
    block of                                      |- none  ----|- draft 0 --|- both -----|
    position    n - 1            n        n + 1     n   n + 1    n + 1  n+2   n + 2  n+3

The first mask has the place of the token that the step draws after the accepted ones. As any row, that of a mask is for
the place after it, so that a block's rows are for the tokens after the drawn one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

FADE = 0.98  # of what was accepted, per observed draft: a memory of about 50


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskBlocks:
    """A model's mask, and how many a step may have."""

    token_id: int
    length: int  # masks of a block, which are as many tokens of the next draft
    num_blocks: int = 0  # at most, for each request; 0: one for each count of accepted tokens


class Tree(NamedTuple):
    """What one request has in a step after its last committed token; see `ScheduledBatch`."""

    parents: list[int]
    ends: list[int]  # empty: no token sees a later one


class PlacedMasks(NamedTuple):
    """The masks of one request in one step."""

    blocks: MaskBlocks
    counts: tuple[int, ...]  # of accepted draft tokens, rising: each has a block

    @property
    def num_tokens(self) -> int:
        return len(self.counts) * self.blocks.length

    def tree(self, num_drafted: int) -> Tree:
        """Return the tree of a draft, which is a chain, and the blocks."""
        parents, ends = list(range(-1, num_drafted - 1)), list(range(1, num_drafted + 1))
        for count in self.counts:
            first, end = len(parents), len(parents) + self.blocks.length
            parents += [count - 1, *range(first, end - 1)]
            ends += [end] * self.blocks.length
        return Tree(parents, ends)

    def rows_of(self, count: int) -> range | None:
        """Return which of the masks' rows guess on after so many accepted tokens; None: no block was there for them."""
        if count not in self.counts:
            return None
        first = self.counts.index(count) * self.blocks.length
        return range(first, first + self.blocks.length)


@dataclass(slots=True)
class MaskPlanner:
    """Chooses the blocks of a step: of all counts or, if there is no place for all, of those that come most often."""

    blocks: MaskBlocks
    _accepted: dict[int, list[float]] = field(default_factory=dict)  # by length of a draft: how often each count came

    def place(self, num_drafted: int, *, num_fitting: int, max_count: int) -> PlacedMasks | None:
        """Return the masks behind a draft of `num_drafted` tokens; None: not one block.

        `num_fitting` more tokens fit into the step; after more than `max_count` accepted ones no draft can follow.
        Earlier drafts alone decide.
        """
        counts = range(min(num_drafted, max_count) + 1)
        num_blocks = min(len(counts), num_fitting // self.blocks.length, self.blocks.num_blocks or len(counts))
        if num_blocks <= 0:
            return None
        seen = self._accepted.get(num_drafted, [0.0] * len(counts))
        likeliest = sorted(counts, key=lambda count: (-seen[count], -count))[:num_blocks]
        return PlacedMasks(self.blocks, tuple(sorted(likeliest)))

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Count how much of a draft was accepted."""
        seen = self._accepted.setdefault(num_drafted, [0.0] * (num_drafted + 1))
        seen[:] = [FADE * number for number in seen]
        seen[num_accepted] += 1.0
