"""Columns: arrays as fields of a message, one number for each of its rows, or for each token of all rows.

In a process they are numpy arrays, on the wire their bytes, little-endian; the field's type says of what. Where a row
has several numbers, its numbers follow those of the row before, and another column counts them:

counts   2        0   3
values   a0  a1       c0  c1  c2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Float64s = npt.NDArray[np.float64]


class Columns:
    """A message of columns; equal to another if all columns are."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]  # subclasses are dataclasses
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names)

    __hash__ = None  # type: ignore[assignment]  # arrays have none


def packed_column(column: object) -> bytes:
    """Return a column as it crosses the wire."""
    if not isinstance(column, np.ndarray):
        raise NotImplementedError(f"{type(column).__name__} does not cross a wire")
    return column.tobytes()


def unpacked_column(declared: type, value: object) -> npt.NDArray[Any]:
    """Return the column of a declared type, such as `Int64s`; raises `TypeError` or `ValueError`."""
    if not isinstance(value, bytes):
        raise TypeError("a column must be bytes")
    _, element_type = get_args(declared)
    return np.frombuffer(value, *get_args(element_type)).copy()  # a buffer of a frame may be unaligned


def starts_of(counts: Int64s) -> Int64s:
    """Return where each row's numbers begin: int64 [num_rows]."""
    return counts.cumsum() - counts


def spans(starts: Int64s, counts: Int64s) -> Int64s:
    """Return the indices of the numbers of some rows, row after row: `counts` from `starts` on, of each."""
    first = np.repeat(starts - starts_of(counts), counts)
    return first + np.arange(len(first))


def check_columns(num_rows: int, **columns: npt.NDArray[Any]) -> None:
    """Raise `ValueError` naming a column that has not one number for each row."""
    for name, column in columns.items():
        if column.shape != (num_rows,):
            raise ValueError(f"{name} must have one number for each of {num_rows} rows, not shape {column.shape}")


def check_counts(num_values: int, **columns: Int64s) -> None:
    """Raise `ValueError` naming a column of counts that are negative or do not sum to `num_values`."""
    for name, counts in columns.items():
        # of counts that large, the sum might overflow
        if counts.min(initial=0) < 0 or counts.max(initial=0) > num_values or counts.sum() != num_values:
            raise ValueError(f"{name} must be at least 0 and sum to {num_values}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chains(Columns):
    """Drafted chains, one in each row: either all of point masses or all with `draft_probs`."""

    lengths: Int64s  # [num_rows] tokens
    token_ids: Int64s  # [num_tokens]
    confidences: Float64s  # [num_tokens], or empty
    row_sizes: Int64s  # [num_tokens] ids of each token's row of `draft_probs`; empty for point masses
    row_ids: Int32s  # [sum of `row_sizes`]
    row_weights: Int32s  # [sum of `row_sizes`]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def has_rows(self) -> bool:
        return len(self.row_sizes) > 0

    def columns_of(self, rows: Sequence[int] | None = None) -> dict[str, npt.NDArray[Any]]:
        """Return the columns of some of the chains (None: of all), by name."""
        if rows is None:
            return {field.name: getattr(self, field.name) for field in fields(Chains)}
        lengths = self.lengths[rows]
        tokens = spans(starts_of(self.lengths)[rows], lengths)
        sizes = self.row_sizes[tokens] if self.has_rows else self.row_sizes
        of_rows = spans(starts_of(self.row_sizes)[tokens], sizes) if self.has_rows else slice(0)
        return {
            "lengths": lengths,
            "token_ids": self.token_ids[tokens],
            "confidences": self.confidences[tokens] if len(self.confidences) else self.confidences,
            "row_sizes": sizes,
            "row_ids": self.row_ids[of_rows],
            "row_weights": self.row_weights[of_rows],
        }
