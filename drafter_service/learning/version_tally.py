"""How each version's drafts fared, over all drafters and their restarts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace

from outrider.drafter_service.engine.learning_messages import VersionCounts

MAX_LAST = 1024  # counts by drafter and version that are told apart; older ones are added up


class VersionTally:
    """Sums of counts that every drafter reports since it took a version."""

    def __init__(self) -> None:
        self._past: dict[str, VersionCounts] = {}  # of drafters' earlier lives
        self._last: OrderedDict[tuple[str, str], VersionCounts] = OrderedDict()

    def take(self, drafter_id: str, reports: Iterable[VersionCounts]) -> None:
        """Take a drafter's counts; fewer rounds than before are those of a new life."""
        for counts in reports:
            key = (drafter_id, counts.version)
            before = self._last.pop(key, None)
            if before is not None and counts.num_rounds < before.num_rounds:
                self._add_to_past(before)
            self._last[key] = counts
        while len(self._last) > MAX_LAST:
            self._add_to_past(self._last.popitem(last=False)[1])

    def of(self, version: str) -> VersionCounts:
        """Return a version's counts, all drafters together."""
        total = self._past.get(version, VersionCounts(version=version))
        for (_, name), counts in self._last.items():
            if name == version:
                total = _sum(total, counts)
        return total

    def keep(self, versions: Iterable[str]) -> None:
        """Forget all other versions."""
        kept = set(versions)
        self._past = {name: counts for name, counts in self._past.items() if name in kept}
        self._last = OrderedDict((key, counts) for key, counts in self._last.items() if key[1] in kept)

    def _add_to_past(self, counts: VersionCounts) -> None:
        past = self._past.get(counts.version)
        self._past[counts.version] = counts if past is None else _sum(past, counts)


def _sum(one: VersionCounts, other: VersionCounts) -> VersionCounts:
    return replace(
        one,
        num_rounds=one.num_rounds + other.num_rounds,
        num_draft_tokens=one.num_draft_tokens + other.num_draft_tokens,
        num_named_tokens=one.num_named_tokens + other.num_named_tokens,
    )
