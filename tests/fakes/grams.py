"""Runs of words or tokens, by which two texts are told to share a passage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

GRAM = 13  # in a row: no two texts share so many by chance
PartT = TypeVar("PartT")


def grams_of(parts: Sequence[PartT]) -> list[tuple[PartT, ...]]:
    """Return every run of `GRAM` of a text's parts."""
    return [tuple(parts[start : start + GRAM]) for start in range(len(parts) - GRAM + 1)]
