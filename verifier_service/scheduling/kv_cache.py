"""The pool of KV blocks: reference counts, free list, and the prefix cache's index."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence


class OutOfBlocksError(RuntimeError):
    """More KV blocks were asked for than are free, cached ones included."""


class BlockPool:
    """Allocates KV blocks 0..num_blocks-1; every block is in exactly one of three states.

    empty   free, without useful content         allocated first
    cached  free, but published under a hash     evicted least recently used first, once no empty one is left
    used    referenced by one or more sequences

            allocate            release, last reference
    empty ------------> used ---------------------------> empty (no hash) or cached (published)
    cached -----------> used   by match_prefix (keeps its hash) or by allocate (evicted: loses its hash)

    A block with more than one reference is never written; `BlockTables.reserve` copies it first.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks of at least one token, not {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._empty = list(range(num_blocks - 1, -1, -1))  # a stack: low ids first, then recently used memory
        self._cached: dict[int, None] = {}  # an ordered set, least recently used first
        self._num_references = [0] * num_blocks
        self.references: Sequence[int] = self._num_references  # of each block
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free_blocks(self) -> int:
        """Empty blocks, and cached ones, which `allocate` evicts."""
        return len(self._empty) + len(self._cached)

    @property
    def usage(self) -> float:
        """Share of blocks in use, in [0, 1]."""
        return 1.0 - self.num_free_blocks / self.num_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks with one reference each, all or none; raises `OutOfBlocksError`."""
        if count > self.num_free_blocks:
            raise OutOfBlocksError(f"{count} KV blocks wanted, {self.num_free_blocks} of {self.num_blocks} are free")
        block_ids = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for block_id in block_ids:
            self._num_references[block_id] = 1
        return block_ids

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each block.

        The tail is released, and so evicted, first: a block is only found through its whole prefix.
        """
        for block_id in reversed(block_ids):
            assert self._num_references[block_id] > 0, f"block {block_id} released more often than taken"
            self._num_references[block_id] -= 1
            if self._num_references[block_id]:
                continue
            if self._hash_of[block_id] is None:
                self._empty.append(block_id)
            else:
                self._cached[block_id] = None

    def trim(self, block_table: list[int], num_tokens: int) -> None:
        """Release the blocks of a table beyond its first `num_tokens` tokens."""
        num_kept = self.num_blocks_for(num_tokens)
        if num_kept < len(block_table):
            self.release(block_table[num_kept:])
            del block_table[num_kept:]

    def share(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each of some used blocks."""
        for block_id in block_ids:
            assert self._num_references[block_id] > 0, f"block {block_id} shared by nobody"
            self._num_references[block_id] += 1

    def is_shared(self, block_id: int) -> bool:
        return self._num_references[block_id] > 1

    def is_cached(self, hash_: bytes) -> bool:
        """Return whether a block, used or free, is published under this hash."""
        return hash_ in self._block_of

    def match_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """Find the longest cached prefix; add a reference to each of its blocks and return them."""
        block_ids = []
        for hash_ in hashes:
            block_id = self._block_of.get(hash_)
            if block_id is None:
                break
            self._cached.pop(block_id, None)
            self._num_references[block_id] += 1
            block_ids.append(block_id)
        return block_ids

    def publish(self, block_id: int, hash_: bytes) -> None:
        """Put a full, computed block into the prefix cache.

        If the hash is already published, its first block stays: other requests may reference it.
        """
        assert self._num_references[block_id] > 0, f"block {block_id} published by nobody"
        if not self.enable_prefix_caching or hash_ in self._block_of:
            return
        assert self._hash_of[block_id] is None, f"block {block_id} published under a second hash"
        self._hash_of[block_id] = hash_
        self._block_of[hash_] = block_id

    def flush(self) -> None:
        """Empty the prefix cache. No block may be in use."""
        assert self.num_free_blocks == self.num_blocks, "blocks are in use"
        while self._cached:
            self._empty.append(self._evict())

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise `AssertionError` unless states, counts and index agree with each other and with all block tables."""
        empty, cached = set(self._empty), set(self._cached)
        references = {block_id: count for block_id, count in enumerate(self._num_references) if count}
        assert len(empty) == len(self._empty), "a block is in the free list twice"
        states = (empty, cached, references.keys())
        assert sum(map(len, states)) == self.num_blocks == len(set().union(*states)), (
            "empty {} + cached {} + used {} is not every block of {}".format(*map(len, states), self.num_blocks)
        )
        uses = Counter(itertools.chain.from_iterable(tables))
        wrong = {i: (references.get(i, 0), uses[i]) for i, _ in references.items() ^ uses.items()}
        assert not wrong, f"block id -> (references, uses in block tables) differ: {wrong}"
        hashes = {block_id: hash_ for block_id, hash_ in enumerate(self._hash_of) if hash_ is not None}
        assert {hash_: block_id for block_id, hash_ in hashes.items()} == self._block_of, (
            "the prefix index and the blocks' hashes differ"
        )
        assert not (cached - hashes.keys()) | (empty & hashes.keys()), "a free block is misfiled"

    def _evict(self) -> int:
        block_id = next(iter(self._cached))
        del self._cached[block_id]
        hash_ = self._hash_of[block_id]
        assert hash_ is not None
        del self._block_of[hash_]
        self._hash_of[block_id] = None
        return block_id
