"""Columns: arrays as fields of a message, one number for each of its rows, or for each token of all rows.

In a process they are numpy arrays, on the wire their bytes, little-endian; the field's type says of what. Where a row
has several numbers, its numbers follow those of the row before, and another column counts them:

counts   2        0   3
values   a0  a1       c0  c1  c2
"""

from __future__ import annotations

from dataclasses import fields
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
