"""Sums of counts that drafters report since they began, over all drafters and their restarts."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Generic, TypeVar

from outrider.drafter_service.engine.learning_messages import TrialCounts, VersionCounts

MAX_LAST = 1024  # counts by drafter and name that are told apart; older ones are added up
Counts = TypeVar("Counts", VersionCounts, TrialCounts)


class Totals(Generic[Counts]):
    """Sums by name: of a version, or of a trial."""

    def __init__(self) -> None:
        self._past: dict[str, Counts] = {}  # of drafters' earlier lives
        self._last: OrderedDict[tuple[str, str], Counts] = OrderedDict()  # by drafter and name

    def take(self, drafter_id: str, name: str, counts: Counts) -> None:
        """Take a drafter's counts; fewer rounds than before are those of a new life."""
        before = self._last.pop((drafter_id, name), None)
        if before is not None and counts.num_rounds < before.num_rounds:
            self._add_to_past(name, before)
        self._last[drafter_id, name] = counts
        if len(self._last) > MAX_LAST:
            (_, oldest), ended = self._last.popitem(last=False)
            self._add_to_past(oldest, ended)

    def of(self, name: str, zero: Counts) -> Counts:
        """Return the sum of all drafters' counts; `zero` where there are none."""
        last = [counts for (_, each), counts in self._last.items() if each == name]
        return functools.reduce(_sum, last, self._past.get(name, zero))

    def keep(self, names: Iterable[str]) -> None:
        """Forget all others."""
        kept = set(names)
        self._past = {name: counts for name, counts in self._past.items() if name in kept}
        self._last = OrderedDict((key, counts) for key, counts in self._last.items() if key[1] in kept)

    def _add_to_past(self, name: str, counts: Counts) -> None:
        past = self._past.get(name)
        self._past[name] = counts if past is None else _sum(past, counts)


def _sum(one: Counts, other: Counts) -> Counts:
    """Add all numbers; what is compared stays."""
    values = {each.name: getattr(one, each.name) for each in fields(one)}
    numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
    return replace(one, **{name: value + getattr(other, name) for name, value in numbers.items()})
