"""Rows of a mask: one bit per token, low bit first, in words of 32."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

ALL_TOKENS = -1  # every bit of a word


def row_of(token_ids: Iterable[int], num_words: int) -> np.ndarray:
    """Return a row that allows these tokens: int32 [num_words]."""
    bits = np.zeros(num_words * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    row: np.ndarray = np.packbits(bits, bitorder="little").view(np.int32)
    return row


def has_token(row: np.ndarray, token_id: int) -> bool:
    """Return whether a row int32 [num_words] allows a token."""
    return 0 <= token_id < 32 * len(row) and bool(int(row[token_id // 32]) >> token_id % 32 & 1)
