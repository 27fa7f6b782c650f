"""Name full KV blocks by what they hold, so that requests with the same prefix share them."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

ROOT_HASH = b""  # parent of a sequence's first block
_DIGEST_BYTES = 16


def block_hash(parent: bytes, token_ids: Sequence[int], salt: str = "") -> bytes:
    """Return the 16-byte name of a full block: its tokens, everything before them (`parent`), and a salt.

    KV depends on the whole prefix, hence the chain. A cryptographic hash, because a collision would silently serve
    another request's context; fixed byte order, so that hosts agree. `salt` keeps apart what must not be shared.
    """
    salt_bytes = salt.encode()
    # Lengths first: no two different (parent, salt, tokens) may pack to the same bytes.
    header = struct.pack("<II", len(parent), len(salt_bytes))
    tokens = struct.pack(f"<{len(token_ids)}q", *token_ids)
    return hashlib.blake2b(header + parent + salt_bytes + tokens, digest_size=_DIGEST_BYTES).digest()


def extend_hashes(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, num_blocks: int, salt: str = ""
) -> None:
    """Grow a sequence's list of chained hashes in place until it covers its first `num_blocks` full blocks."""
    for index in range(len(hashes), num_blocks):
        parent = hashes[-1] if hashes else ROOT_HASH
        hashes.append(block_hash(parent, token_ids[index * block_size : (index + 1) * block_size], salt))
