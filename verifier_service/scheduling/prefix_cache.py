"""Hashes of full KV blocks, by which requests with the same prefix share them."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

ROOT_HASH = b""  # parent of a sequence's first block, under the weights of the start
_DIGEST_BYTES = 16


def block_hash(parent: bytes, token_ids: Sequence[int], salt: str = "") -> bytes:
    """Return the 16-byte hash of a full block's tokens, of the block before (`parent`) and of a salt.

    KV depends on the whole prefix, hence the chain. The hash is cryptographic, because a collision would silently serve
    another request's context, and has a fixed byte order, so that hosts agree. Different salts share nothing.
    """
    salt_bytes = salt.encode()
    # Lengths first: different (parent, salt, tokens) never pack to the same bytes.
    header = struct.pack("<II", len(parent), len(salt_bytes))
    tokens = struct.pack(f"<{len(token_ids)}q", *token_ids)
    return hashlib.blake2b(header + parent + salt_bytes + tokens, digest_size=_DIGEST_BYTES).digest()


def root_hash(version: str, num_updates: int) -> bytes:
    """Return the parent of first blocks under weights called `version`, the `num_updates`-th since the start.

    So KV of other weights is never found. The number tells apart weights that were given one name.
    """
    name = version.encode()
    return hashlib.blake2b(struct.pack("<QI", num_updates, len(name)) + name, digest_size=_DIGEST_BYTES).digest()


def extend_hashes(
    hashes: list[bytes],
    token_ids: Sequence[int],
    block_size: int,
    num_blocks: int,
    salt: str = "",
    root: bytes = ROOT_HASH,
) -> None:
    """Extend a sequence's chained hashes in place to its first `num_blocks` full blocks; `root`: see `root_hash`."""
    for index in range(len(hashes), num_blocks):
        parent = hashes[-1] if hashes else root
        hashes.append(block_hash(parent, token_ids[index * block_size : (index + 1) * block_size], salt))
