"""Block tables alone: what a request may still write where a part of a block is shared."""

from __future__ import annotations

from outrider.verifier_service.scheduling.block_tables import BlockTables
from outrider.verifier_service.scheduling.kv_cache import BlockPool
from outrider.verifier_service.scheduling.prefix_cache import extend_hashes
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


def test_what_follows_from_kv_of_older_weights_takes_no_room_in_the_cache():
    pool = BlockPool(num_blocks=4, block_size=4)
    tables = BlockTables(pool, enable_prefix_caching=True)
    request = parts.request("a", PROMPT)
    assert tables.take_cached(request)
    for index, root in enumerate((None, b"new")):
        if root is not None:
            tables.change_root(root)
        tables.reserve(request, 4)
        request.num_computed_tokens += 4
        tables.publish(request, index)
    hashes: list[bytes] = []
    extend_hashes(hashes, request.token_ids, 4, 2, request.cache_salt, request.root_hash)
    assert [pool.is_cached(hash_) for hash_ in hashes] == [True, False]
