"""Each request's block table: filled from prefix cache or sibling, grown, rolled back, published, freed."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.scheduling.kv_cache import BlockPool
from outrider.verifier_service.scheduling.prefix_cache import ROOT_HASH, extend_hashes


class BlockTables:
    """Updates `Request.block_table`, `num_computed_tokens` and `block_hashes`, over one pool."""

    def __init__(self, pool: BlockPool, enable_prefix_caching: bool) -> None:
        self._pool = pool
        self._enable_prefix_caching = enable_prefix_caching
        self._root = ROOT_HASH

    def change_root(self, root: bytes) -> None:
        """Find and publish no KV of before: the weights have changed. `root`: see `root_hash`.

        A request that holds KV keeps it, and publishes nothing more: its later KV follows from KV of older weights.
        """
        self._root = root

    # --- admission ---

    def has_cached(self, request: Request, index: int) -> bool:
        """Return whether the prefix cache holds block `index` of a request; False for the last token's block."""
        if not self._enable_prefix_caching or index >= (request.num_tokens - 1) // self._pool.block_size:
            return False
        self._extend_hashes(request, index + 1)
        return self._pool.is_cached(request.block_hashes[index])

    def take_nothing(self, request: Request) -> bool:
        """Start from the first token. As `take_cached` and `fork`, return False if the request does not fit."""
        self._begin_hashes(request)
        return self._fits(request, 0)

    def take_cached(self, request: Request) -> bool:
        """Take the cached prefix.

        |<- cached: whole blocks ->|<- to compute, in chunks: at least the last token, whose logits are needed ->|
        """
        # The whole prompt must fit, though only a chunk is allocated now: preempting half a prefill would waste it.
        num_missing = self._pool.num_blocks_for(request.num_tokens) - self._pool.num_free_blocks
        if num_missing > 0 and not self.has_cached(request, num_missing - 1):
            return False  # fast path while the pool is full: does not walk the prefix at every step
        cached = self._pool.match_prefix(self._prefix_hashes(request))
        if not self._fits(request, len(cached)):
            self._pool.release(cached)  # matched blocks without other users were counted as free already
            return False
        request.block_table = cached
        request.num_computed_tokens = len(cached) * self._pool.block_size
        return True

    def fork(self, request: Request, source: Request) -> bool:
        """Share the blocks of a sibling's prompt.

        |<- shared: all of the prompt but its last token ->|<- to compute ->|
        |<- whole blocks ->|<- part of a block: copied before the first write (copy on write)
        """
        self._begin_hashes(request)
        num_shared = request.num_prompt_tokens - 1
        if not self._fits(request, num_shared // self._pool.block_size):
            return False
        request.block_table = source.block_table[: self._pool.num_blocks_for(num_shared)]
        request.num_computed_tokens = num_shared
        self._pool.share(request.block_table)
        return True

    def go_on(self, requests: Sequence[Request], parents: Sequence[Request]) -> None:
        """Have each request share all KV of its parent, one of them or another, in place of its own.

        As in `fork`, part of a block is copied before the first write.
        """
        held = [request.block_table for request in requests]
        taken = [(list(p.block_table), list(p.block_hashes), p.num_computed_tokens, p.root_hash) for p in parents]
        for request, own in zip(requests, taken, strict=True):
            self._pool.share(own[0])
            request.block_table, request.block_hashes, request.num_computed_tokens, request.root_hash = own
        for table in held:
            self._pool.release(table)

    def place_arrived(self, request: Request, num_tokens: int) -> int:
        """Give blocks to KV of the first `num_tokens` that came from elsewhere; return from where on to write it.

        Call it after `take_cached`: what the cache has is not written again.
        """
        start = request.num_computed_tokens
        if start < num_tokens:
            self.reserve(request, num_tokens - start)
            request.num_computed_tokens = num_tokens
        return start

    def is_current(self, request: Request) -> bool:
        """Return whether a request's KV began under the weights of now."""
        return request.root_hash == self._root

    def _fits(self, request: Request, num_held_blocks: int) -> bool:
        return self._pool.num_blocks_for(request.num_tokens) - num_held_blocks <= self._pool.num_free_blocks

    def _prefix_hashes(self, request: Request) -> Sequence[bytes]:
        if not self._enable_prefix_caching:
            return ()
        num_blocks = (request.num_tokens - 1) // self._pool.block_size
        self._extend_hashes(request, num_blocks)
        return request.block_hashes[:num_blocks]

    def _extend_hashes(self, request: Request, num_blocks: int) -> None:
        if not request.block_table:
            self._begin_hashes(request)
        size, salt, root = self._pool.block_size, request.cache_salt, request.root_hash
        extend_hashes(request.block_hashes, request.token_ids, size, num_blocks, salt, root)

    def _begin_hashes(self, request: Request) -> None:
        """Put the hashes of a request that holds no KV under the present root."""
        if request.root_hash != self._root:
            request.root_hash = self._root
            request.block_hashes.clear()

    # --- growing and shrinking ---

    def room(self, request: Request) -> int:
        """Return how many more tokens fit into the request's own blocks and all free ones."""
        num_blocks = len(request.block_table) + self._pool.num_free_blocks - self._must_copy(request)
        return max(0, num_blocks * self._pool.block_size - request.num_computed_tokens)

    def reserve(self, request: Request, num_new_tokens: int) -> list[tuple[int, int]]:
        """Allocate blocks for the next tokens; return (source, target) of each shared block to copy first."""
        copies = [self._copy_last_block(request)] if self._must_copy(request) else []
        num_blocks = self._pool.num_blocks_for(request.num_computed_tokens + num_new_tokens)
        num_missing = num_blocks - len(request.block_table)
        if num_missing > 0:
            request.block_table.extend(self._pool.allocate(num_missing))
        return copies

    def _must_copy(self, request: Request) -> bool:
        """Return whether the block that the request writes into next is shared."""
        index = request.num_computed_tokens // self._pool.block_size
        return index < len(request.block_table) and self._pool.is_shared(request.block_table[index])

    def _copy_last_block(self, request: Request) -> tuple[int, int]:
        (shared,) = request.block_table[request.num_computed_tokens // self._pool.block_size :]
        (own,) = self._pool.allocate(1)
        self._pool.release([shared])
        request.block_table[-1] = own
        return shared, own

    def roll_back(self, request: Request) -> None:
        """Release the blocks beyond the computed tokens."""
        self._pool.trim(request.block_table, request.num_computed_tokens)

    def publish(self, request: Request, first: int) -> None:
        """Publish, from block `first` on, the blocks that are full of committed tokens; never KV of rejected tokens."""
        num_full = request.num_computed_tokens // self._pool.block_size
        if num_full == first or not self._enable_prefix_caching or request.root_hash != self._root:
            return
        self._extend_hashes(request, num_full)
        for index in range(first, num_full):
            self._pool.publish(request.block_table[index], request.block_hashes[index])

    def free(self, request: Request) -> None:
        """Release all blocks."""
        self._pool.release(request.block_table)
        request.block_table = []  # a new list: the old one may belong to a batch in flight
        request.num_computed_tokens = 0
