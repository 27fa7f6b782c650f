"""What each drafter's last drafts said of themselves: what the next ones would, as far as anybody knows.

A drafter that knows which of its drafts are good is worth more than their mean: the good ones are verified and the
others are not. While nothing is drafted that does not show, so the last drafts are taken for what others would be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

NUM_DRAFTS = 32  # of a drafter that are remembered: as many as a price looks back on steps
MAX_DRAFTERS = 64  # remembered, for they come and go; the one unheard of for longest goes first


class RecentConfidences:
    """The confidences of the last chains of each drafter."""

    def __init__(self) -> None:
        self._drafts: dict[str, deque[Sequence[float]]] = {}

    def observe(self, drafter_id: str, confidences: Sequence[float]) -> None:
        """Take in those of a whole draft, whatever was verified of it."""
        drafts = self._drafts.pop(drafter_id, None) or deque(maxlen=NUM_DRAFTS)
        drafts.append(confidences)
        self._drafts[drafter_id] = drafts
        if len(self._drafts) > MAX_DRAFTERS:
            del self._drafts[next(iter(self._drafts))]

    def next(self, drafter_id: str) -> Sequence[float] | None:
        """Return those of one draft, each time of another, so that many steps or requests see all; None: no draft."""
        drafts = self._drafts.get(drafter_id)
        if not drafts:
            return None
        drafts.rotate(-1)
        return drafts[-1]
