"""What one more token is worth in each request: the time that it saves, in the mean of all requests 1.

A request has a number of tokens to come, whatever drafting does; a token that it gets now saves a part of a later step
of its own. If its steps bring three tokens each, that is a third of a step; if they bring one, it is a whole one. So
over the long run, where requests that end make room for others, the throughput is a harmonic mean of what requests get
per step, and to admit the slots that bring most tokens in *this* step would hurry on those that hurry anyway and leave
a batch of slow ones. (The value of a state in average-reward control: Puterman, "Markov Decision Processes", 1994,
chapter 8.) With c the seconds that a request's steps cost, its own drafts among them, and t the tokens that they bring,
a slot pays if

    survival · (c / t)  >  the seconds of one more token in the step

and `worths` are survivals times (c / t) over its mean. Everything is of earlier steps, as exactness requires.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

SHARE = 0.1  # of a round in its request's means: ten rounds, since a request is short
POOL_SHARE = 0.001  # of a round in the means that a new request starts with: a thousand rounds, of many requests
MAX_WORTH = 0.999  # below the price that nothing exceeds
MIN_WEIGHT, MAX_WEIGHT = 0.2, 5.0  # as far as means of ten rounds can be trusted
EQUAL = 0.02  # weights that differ from 1 by less are taken for it: equals cost nothing to price


@dataclass(slots=True)
class _Means:
    """Tokens and draft tokens of a round, fading."""

    num_tokens: float = 1.0
    num_draft_tokens: float = 0.0

    def add(self, num_tokens: float, num_draft_tokens: float, share: float) -> None:
        self.num_tokens += share * (num_tokens - self.num_tokens)
        self.num_draft_tokens += share * (num_draft_tokens - self.num_draft_tokens)


class TokenWorth:
    """The requests' means, and each one's weight as of the last step."""

    def __init__(self) -> None:
        self._pool = _Means()  # of all rounds, while they are few; then fading
        self._num_rounds = 0
        self._means: dict[str, _Means] = {}
        self._weights: dict[str, float] = {}

    @property
    def request_ids(self) -> set[str]:
        """The requests of which anything is kept."""
        return {*self._means}

    def weight(self, request_id: str) -> float:
        """Return what a token is worth in a request."""
        return self._weights.get(request_id, 1.0)

    def worths(self, request_id: str, survivals: Sequence[float]) -> Sequence[float]:
        """Return what a request's draft positions or tree nodes are worth, to be compared with the price."""
        weight = self.weight(request_id)
        if weight == 1.0:
            return survivals
        return [min(weight * survival, MAX_WORTH) for survival in survivals]

    def observe(self, rounds: Iterable[tuple[str, float, float]], price: float, num_steps: int = 1) -> None:
        """Take in a step: each request's committed and drafted tokens, and the price of a draft position then.

        It stands for `num_steps` that were alike.
        """
        share = 1.0 - (1.0 - SHARE) ** num_steps
        means: list[tuple[str, _Means]] = []
        for request_id, num_tokens, num_draft_tokens in rounds:
            self._num_rounds += num_steps
            self._pool.add(num_tokens, num_draft_tokens, num_steps * max(POOL_SHARE, 1.0 / self._num_rounds))
            if (own := self._means.get(request_id)) is None:
                own = self._means[request_id] = replace(self._pool)
            own.add(num_tokens, num_draft_tokens, share)
            means.append((request_id, own))
        if not means:
            return
        saved = _saved_by_a_token([own for _, own in means], price)
        mean = sum(saved) / len(saved)
        if max(saved) - min(saved) < EQUAL * mean:
            self._weights.clear()
            return
        for (request_id, _), value in zip(means, saved, strict=True):
            weight = value / mean
            self._weights[request_id] = 1.0 if abs(weight - 1.0) < EQUAL else min(max(weight, MIN_WEIGHT), MAX_WEIGHT)

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request."""
        self._means.pop(request_id, None)
        self._weights.pop(request_id, None)


def _saved_by_a_token(means: Sequence[_Means], price: float) -> list[float]:
    """Return c / t of each request, with the mean c of a step's requests as the unit.

    A draft token costs `price` times the mean c / t, which it is a part of itself: a linear equation. It cannot cost
    more than a request's mean share of a step divided by the tokens in it.
    """
    mean_drafted = sum(own.num_draft_tokens for own in means) / len(means)
    mean_inverse = sum(1.0 / own.num_tokens for own in means) / len(means)
    excess = sum((own.num_draft_tokens - mean_drafted) / own.num_tokens for own in means) / len(means)
    most = 1.0 / (1.0 + mean_drafted)
    left = 1.0 - price * excess
    slot_cost = min(price * mean_inverse / left, most) if left > 0.0 else most
    return [(1.0 + slot_cost * (own.num_draft_tokens - mean_drafted)) / own.num_tokens for own in means]
