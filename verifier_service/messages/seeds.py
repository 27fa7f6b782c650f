"""Seeds of the services' random number generators."""

from __future__ import annotations

import hashlib
import random


def derive_seed(seed: int | None, role: str) -> int:
    """Return a role's 63-bit seed; without `seed`, from the operating system.

    Target and drafter need independent streams: rejection sampling is exact only if the number that judges a draft
    token is independent of the one that drew it.
    """
    if seed is None:
        return random.SystemRandom().getrandbits(63)
    digest = hashlib.blake2b(f"{role}/{seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
