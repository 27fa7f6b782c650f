from __future__ import annotations

import itertools
import struct

import pytest

from outrider.verifier_service.scheduling.prefix_cache import ROOT_HASH, block_hash, extend_hashes, root_hash


def test_same_prefix_same_hash_on_every_host():
    # A literal, so that a change of the packing (which would split a running cluster's caches) is noticed.
    assert block_hash(ROOT_HASH, [1, 2, 3, 4]).hex() == "0942c1f23dc74e8fadff93e4dfe78016"
    assert block_hash(ROOT_HASH, (1, 2, 3, 4)) == block_hash(ROOT_HASH, [1, 2, 3, 4])


def test_hash_depends_on_the_whole_prefix():
    first, other = block_hash(ROOT_HASH, [1, 2]), block_hash(ROOT_HASH, [9, 2])
    assert block_hash(first, [3, 4]) != block_hash(other, [3, 4])


def test_no_two_inputs_pack_alike():
    parents = [ROOT_HASH, b"a", b"ab", bytes(8), bytes(16)]
    salts = ["", "a", "b", "ba", "\0" * 8]
    blocks = [[], [0], [0, 0], [1, 0], [0, 1], [256], [1 << 40], [-1]]
    inputs = list(itertools.product(parents, blocks, salts))
    assert len({block_hash(*each) for each in inputs}) == len(inputs)


def test_ids_beyond_64_bits_are_refused_not_folded():
    with pytest.raises(struct.error):
        block_hash(ROOT_HASH, [1 << 63])


def test_a_salt_keeps_prefixes_apart():
    plain: list[bytes] = []
    salted: list[bytes] = []
    extend_hashes(plain, [1, 2, 3, 4], block_size=2, num_blocks=2)
    extend_hashes(salted, [1, 2, 3, 4], block_size=2, num_blocks=2, salt="s")
    assert not set(plain) & set(salted)
    assert salted[1] == block_hash(block_hash(ROOT_HASH, [1, 2], "s"), [3, 4], "s")


def test_extend_hashes_grows_lazily_and_chains():
    tokens = [5, 6, 7, 8, 9]
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, block_size=2, num_blocks=1)
    assert hashes == [block_hash(ROOT_HASH, [5, 6])]
    extend_hashes(hashes, tokens, block_size=2, num_blocks=2)
    assert hashes == [block_hash(ROOT_HASH, [5, 6]), block_hash(hashes[0], [7, 8])]
    extend_hashes(hashes, tokens, block_size=2, num_blocks=1)
    assert len(hashes) == 2


def test_other_weights_have_other_roots_and_so_other_hashes():
    versions = [("default", 1), ("default", 2), ("v1", 1), ("v1", 2), ("", 1)]
    roots = [ROOT_HASH, *(root_hash(version, num_updates) for version, num_updates in versions)]
    firsts = []
    for root in roots:
        hashes: list[bytes] = []
        extend_hashes(hashes, [1, 2, 3, 4], 2, 2, "salt", root)
        firsts += hashes
    assert len({*firsts}) == 2 * len(roots)
