"""Choose a share of the requests by their ids, so that the choice depends neither on their order nor on the process."""

from __future__ import annotations

import hashlib

_DIGEST_BYTES = 8


def is_in_share(request_id: str, share: float, *, purpose: str) -> bool:
    """Return whether a request is among a `share` in [0, 1] of all; a larger share has all of a smaller one.

    Choices for different purposes are independent of each other.
    """
    digest = hashlib.blake2b(request_id.encode(), digest_size=_DIGEST_BYTES, person=purpose.encode()).digest()
    return int.from_bytes(digest) < share * (1 << 8 * _DIGEST_BYTES)
