"""How often drafted tokens of a kind are accepted: the one estimate of all drafters that learn from outcomes."""

from __future__ import annotations

from collections.abc import Hashable


class AcceptanceEstimate:
    """Running acceptance rates by kind of guess, shrunk towards a prior.

    rate = (accepted + prior_weight · prior) / (seen + prior_weight). After `memory` outcomes the counts are halved, so
    that the rate follows a changing load.
    """

    def __init__(self, *, prior_weight: float = 8.0, memory: int = 1024) -> None:
        self._prior_weight = prior_weight
        self._memory = memory
        self._outcomes: dict[Hashable, tuple[float, float]] = {}  # kind: (accepted, seen)

    def rate(self, kind: Hashable, prior: float) -> float:
        accepted, seen = self._outcomes.get(kind, (0.0, 0.0))
        return (accepted + self._prior_weight * prior) / (seen + self._prior_weight)

    def observe(self, kind: Hashable, *, is_accepted: bool) -> None:
        accepted, seen = self._outcomes.get(kind, (0.0, 0.0))
        if seen >= self._memory:
            accepted, seen = accepted / 2, seen / 2
        self._outcomes[kind] = (accepted + is_accepted, seen + 1)

    @property
    def overall(self) -> float:
        """The rate over all kinds; one half before the first outcome."""
        num_accepted = sum(accepted for accepted, _ in self._outcomes.values())
        num_seen = sum(seen for _, seen in self._outcomes.values())
        return (num_accepted + 0.5) / (num_seen + 1.0)
