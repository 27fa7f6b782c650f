"""Token ids that a drafter's vocabulary has or does not have."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def first_bad_token(token_ids: Sequence[int], vocab_size: int) -> int | None:
    """Return the first id outside [0, vocab_size), or None."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return None
    return next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)


def known_prefix(token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Return the ids before the first one outside [0, vocab_size)."""
    return tuple(itertools.takewhile(lambda token_id: 0 <= token_id < vocab_size, token_ids))
