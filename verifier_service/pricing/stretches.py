"""Stretches of accepted drafts: how much of what one more draft token brings, the next step would have brought as well.

Acceptance comes in stretches. Inside one, where a text copies itself, a request gets many tokens in the next step, too,
so a token that it has already saves less there than the mean of its request says. After a draft that was accepted
whole, steps bring t' tokens instead of t: one more position behind it saves t / t' of the mean. That was compared with
exact values on recorded acceptance (`../shared/traces`, each length fixed in turn): a fourth token saves 0.43 of the
mean with n-gram on gsm8k, where t / t' is 0.57, 0.37 on ShareGPT (0.43), 0.95 and 0.81 with EAGLE (0.93 and 0.81).

The discount is spread evenly over a draft's positions, each of which is worth `decay` times the one before, such that
one more position is worth t / t' and accepted tokens keep a mean of 1: whether to draft at all is judged by what drafts
bring. Everything is of earlier steps.
"""

from __future__ import annotations

from collections.abc import Sequence

SHARE = 0.003  # of a round in the means
PRIOR_ROUNDS = 20.0  # that there are no stretches is worth so many rounds at first
MIN_DECAY = 0.5


class Stretches:
    """Rounds after drafts that were accepted whole, against the means of the requests that had them."""

    def __init__(self) -> None:
        self._num_rounds = 0
        self._num_tokens = self._num_usual = 1.0  # of such a round, and of its request's rounds
        self._num_drafted = 1.0  # before such a round
        self._num_accepted = self._num_discounted = 1.0  # tokens of a draft; and in shares of the first one's worth
        self._decay = self._first = 1.0
        self._factors: Sequence[float] = ()

    def factors(self, length: int) -> Sequence[float]:
        """Return what a token at each of `length` positions, or more, is worth, in the mean of accepted ones 1."""
        if len(self._factors) < length:
            self._factors = [self._first * self._decay**position for position in range(length)]
        return self._factors

    @property
    def are_seen(self) -> bool:
        """Whether the factors differ from 1."""
        return self._decay < 1.0

    def observe_next(self, num_tokens: float, num_usual: float, num_drafted: float) -> None:
        """Take in a round after a draft of `num_drafted` tokens that was accepted whole: its tokens, and the mean."""
        share = max(1.0 / (self._num_rounds + PRIOR_ROUNDS), SHARE)
        self._num_rounds += 1
        self._num_tokens += share * (num_tokens - self._num_tokens)
        self._num_usual += share * (num_usual - self._num_usual)
        self._num_drafted += share * (num_drafted - self._num_drafted)
        saved = self._num_usual / self._num_tokens / self._first
        decay = saved ** (1.0 / max(self._num_drafted, 1.0))
        self._decay = min(max(decay, MIN_DECAY), 1.0)
        self._factors = ()

    def observe_accepted(self, num_accepted: float) -> None:
        """Take in how many of a draft's tokens were accepted."""
        decay = self._decay
        num_discounted = num_accepted if decay == 1.0 else (1.0 - decay**num_accepted) / (1.0 - decay)
        self._num_accepted += SHARE * (num_accepted - self._num_accepted)
        self._num_discounted += SHARE * (num_discounted - self._num_discounted)
        self._first = self._num_accepted / self._num_discounted
        self._factors = ()
