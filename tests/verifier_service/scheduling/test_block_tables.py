"""Block tables alone: what a request may still write where a part of a block is shared."""

from __future__ import annotations

from outrider.verifier_service.scheduling.block_tables import BlockTables
from outrider.verifier_service.scheduling.kv_cache import BlockPool
from support import parts

PROMPT = range(1, 12)


def test_a_shared_part_of_a_block_is_no_room_until_its_copy_has_a_block():
    pool = BlockPool(num_blocks=4, block_size=4)
    tables = BlockTables(pool, enable_prefix_caching=False)
    first, second = (parts.request(name, PROMPT) for name in "ab")
    tables.reserve(first, len(PROMPT))
    assert tables.fork(second, first)
    taken = pool.allocate(1)  # somebody else was quicker
    assert tables.room(second) == 0
    pool.release(taken)
    assert tables.room(second) == 12 - second.num_computed_tokens == 2
