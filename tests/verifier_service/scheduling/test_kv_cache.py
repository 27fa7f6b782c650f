from __future__ import annotations

import random

import pytest

from outrider.verifier_service.scheduling.kv_cache import BlockPool, OutOfBlocksError

A, B, C, D = b"a", b"ab", b"abc", b"abcd"


def published(pool: BlockPool, *hashes: bytes) -> list[int]:
    """Allocate one block per hash, published in order."""
    block_ids = pool.allocate(len(hashes))
    for block_id, hash_ in zip(block_ids, hashes, strict=True):
        pool.publish(block_id, hash_)
    return block_ids


def test_allocates_every_block_once_and_then_refuses():
    pool = BlockPool(3, 4)
    assert (pool.num_free_blocks, pool.usage) == (3, 0.0)
    first = pool.allocate(2)
    assert pool.usage == pytest.approx(2 / 3)
    with pytest.raises(OutOfBlocksError, match=r"2 KV blocks wanted, 1 of 3"):
        pool.allocate(2)
    assert pool.num_free_blocks == 1, "a refused allocation takes nothing"
    second = pool.allocate(1)
    assert sorted(first + second) == [0, 1, 2]
    pool.check_integrity([first, second])
    assert pool.allocate(0) == []


def test_a_pool_has_blocks_of_at_least_one_token():
    for sizes in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="blocks of at least one token"):
            BlockPool(*sizes)


def test_match_is_a_chain_from_the_start():
    pool = BlockPool(4, 4)
    table = published(pool, A, C)
    assert pool.match_prefix([A, B, C]) == table[:1]
    assert pool.match_prefix([B, C]) == []
    pool.check_integrity([table, table[:1]])


def test_sharing_takes_a_reference_without_a_hash():
    pool = BlockPool(2, 4, enable_prefix_caching=False)
    table = pool.allocate(1)
    assert not pool.is_shared(table[0])
    pool.share(table)
    assert pool.is_shared(table[0])
    pool.check_integrity([table, table])
    pool.release(table)
    assert (pool.is_shared(table[0]), pool.num_free_blocks) == (False, 1)
    pool.release(table)
    assert pool.num_free_blocks == 2
    with pytest.raises(AssertionError, match="shared by nobody"):
        pool.share(table)


def test_empty_blocks_are_taken_before_cached_ones():
    pool = BlockPool(2, 4)
    pool.release(published(pool, A))
    pool.allocate(1)
    assert pool.is_cached(A)
    pool.allocate(1)
    assert not pool.is_cached(A)


def test_evicts_least_recently_used_first():
    pool = BlockPool(3, 4)
    for hash_ in (A, B, C):
        pool.release(published(pool, hash_))
    pool.release(pool.match_prefix([A]))  # touched: now the most recent
    pool.allocate(1)
    assert [pool.is_cached(hash_) for hash_ in (A, B, C)] == [True, False, True]
    pool.allocate(1)
    assert [pool.is_cached(hash_) for hash_ in (A, B, C)] == [True, False, False]


def test_a_sequence_is_evicted_from_its_tail():
    pool = BlockPool(3, 4)
    table = published(pool, A, B, C)
    pool.release(table)
    assert pool.allocate(1) == table[2:]
    assert pool.match_prefix([A, B, C]) == table[:2]


def test_a_flushed_pool_has_empty_blocks_alone():
    pool = BlockPool(4, 4)
    used = published(pool, A, B)
    with pytest.raises(AssertionError, match="in use"):
        pool.flush()
    pool.release(used)
    pool.flush()
    assert (pool.match_prefix([A]), pool.num_free_blocks) == ([], 4)
    pool.check_integrity([])


def test_duplicate_hash_keeps_the_first_block():
    pool = BlockPool(2, 4)
    (first,) = published(pool, A)
    (second,) = published(pool, A)
    pool.check_integrity([[first], [second]])
    pool.release([second])
    assert pool.allocate(1) == [second], "the duplicate went back unnamed, so it is taken first"
    assert pool.match_prefix([A]) == [first]


def test_without_prefix_caching_nothing_is_found():
    pool = BlockPool(2, 4, enable_prefix_caching=False)
    pool.release(published(pool, A))
    assert pool.match_prefix([A]) == []
    pool.check_integrity([])


def test_misuse_is_caught():
    pool = BlockPool(2, 4)
    (block_id,) = published(pool, A)
    with pytest.raises(AssertionError, match="second hash"):
        pool.publish(block_id, B)
    pool.release([block_id])
    with pytest.raises(AssertionError, match="more often than taken"):
        pool.release([block_id])
    with pytest.raises(AssertionError, match="published by nobody"):
        pool.publish(block_id, C)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda pool: pool._empty.append(pool._empty[0]), "free list twice"),
        (lambda pool: pool._empty.pop(), "is not every block of 4"),
        (lambda pool: pool._cached.clear(), "is not every block of 4"),
        (lambda pool: pool._block_of.pop(A), "prefix index"),
        (lambda pool: pool._cached.update({pool._empty.pop(): None}), "misfiled"),
        (lambda pool: pool._num_references.__setitem__(0, 2), r"differ: \{0: \(2, 1\)\}"),
    ],
)
def test_check_integrity_names_each_kind_of_damage(damage, text):
    pool = BlockPool(4, 4)
    table = published(pool, A, B)
    pool.release(table[1:])
    pool.check_integrity([table[:1]])
    damage(pool)
    with pytest.raises(AssertionError, match=text):
        pool.check_integrity([table[:1]])


def test_random_use_keeps_the_books():
    rng = random.Random(0)
    pool = BlockPool(12, 4)
    tables: list[list[int]] = []
    for _ in range(3000):
        action = rng.random()
        if action < 0.4 and tables:
            pool.release(tables.pop(rng.randrange(len(tables))))
        elif action < 0.6:
            chain = [bytes([rng.randrange(3), depth]) for depth in range(4)]
            tables.append(pool.match_prefix(chain))
        elif action < 0.8 and tables and tables[-1]:
            depth = len(tables[-1]) - 1
            block_id = tables[-1][-1]
            if pool._hash_of[block_id] is None:
                pool.publish(block_id, bytes([rng.randrange(3), depth]))
        elif action < 0.85 and tables:
            pool.share(tables[-1])
            tables.append(list(tables[-1]))
        elif (count := rng.randint(1, 4)) <= pool.num_free_blocks:
            tables.append(pool.allocate(count))
        pool.check_integrity(tables)
