"""What a drafting engine does with the time in which nothing is asked of it: it lets its drafter run ahead.

What is prepared answers at once, and what is being prepared holds up whoever asks meanwhile. Which of both weighs more
depends on the load, so it is tried: some answers with running ahead, some without, and then the quicker way for long.
"""

from __future__ import annotations

import enum
from contextlib import AbstractContextManager
from typing import Protocol

from outrider.drafter_service.engine.drafter import Ask, SessionKey
from outrider.drafter_service.engine.forward_cost import ForwardCost
from outrider.drafter_service.engine.outcomes import Pace
from outrider.verifier_service.messages.draft import Draft
from outrider.verifier_service.messages.drafter_load import DrafterCounters

TRIED_ANSWERS = 32  # of each way …
KEPT_ANSWERS = 1024  # … and of the one that was quicker, until both are tried again
MAX_AHEAD_TOKENS = 64  # of one forward in spare time, which an ask that has just come has to wait for


class RunsAhead(Protocol):
    """A drafter that uses its spare time to draft for what the verification of an answered draft may end in."""

    @property
    def num_forwards(self) -> int:
        """Return how many forwards it has run so far."""

    def expects(self, key: SessionKey) -> bool:
        """Tell whether there was time to prepare for a session's next ask."""

    def take(self, ask: Ask, pace: Pace | None) -> Draft | None:
        """Answer an ask from what was prepared, or, with nothing, where drafting it now is not worth the time.

        None: it is to be drafted as any other.
        """

    def forget_outcomes(self, key: SessionKey) -> None:
        """Prepare nothing for a session any more."""

    def has_spare_work(self) -> bool: ...

    def run_ahead(self, *, max_num_tokens: int) -> int:
        """Run one forward of at most `max_num_tokens` tokens over what is prepared; return how many it had."""


class _Phase(enum.Enum):
    """Which way is tried, or that the quicker one is kept."""

    AHEAD = enum.auto()
    WITHOUT = enum.auto()
    KEPT = enum.auto()


class SpareTime:
    """The spare time of one drafter; one that cannot run ahead (None) has no use for it."""

    def __init__(self, drafter: RunsAhead | None, *, cost: ForwardCost, counters: DrafterCounters) -> None:
        """`cost` says what drafting after a miss takes."""
        self._drafter = drafter
        self._cost = cost
        self._counters = counters
        self._phase = _Phase.AHEAD
        self._is_on = True
        self._num_left = TRIED_ANSWERS  # of the phase
        self._waited_s = 0.0  # for the answers of the phase …
        self._ahead_s = 0.0  # … and of the one with running ahead before it

    def timed(self) -> AbstractContextManager[None]:
        """Take the time of what the drafter does."""
        drafter = self._drafter
        return self._cost.timed(None if drafter is None else lambda: drafter.num_forwards)

    def has_work(self) -> bool:
        return self._drafter is not None and self._is_on and self._drafter.has_spare_work()

    def observe_answer(self, seconds: float) -> None:
        """Take in how long an ask was waited for."""
        self._waited_s += seconds
        self._num_left -= 1
        if self._num_left:
            return
        waited_s, self._waited_s = self._waited_s, 0.0
        match self._phase:
            case _Phase.AHEAD:
                self._phase, self._is_on, self._num_left = _Phase.WITHOUT, False, TRIED_ANSWERS
                self._ahead_s = waited_s
            case _Phase.WITHOUT:
                self._phase, self._is_on, self._num_left = _Phase.KEPT, self._ahead_s <= waited_s, KEPT_ANSWERS
            case _Phase.KEPT:
                self._phase, self._is_on, self._num_left = _Phase.AHEAD, True, TRIED_ANSWERS

    def spend(self, max_num_tokens: int) -> None:
        """Run one forward over what is prepared."""
        assert self._drafter is not None, "nothing is prepared"
        with self.timed():
            self._counters.num_ahead_tokens += self._drafter.run_ahead(max_num_tokens=max_num_tokens)

    def expects(self, key: SessionKey) -> bool:
        """Tell whether there was time to prepare for a session's next ask."""
        return self._drafter is not None and self._drafter.expects(key)

    def answer(self, ask: Ask, pause_s: float | None) -> Draft | None:
        """Answer an ask that was prepared for, and count how that went; None: it has to be drafted.

        `pause_s` is the time that its verifier takes between an answer and its next ask.
        """
        assert self._drafter is not None, "nothing is prepared"
        step_s = self._cost.next_s(len(ask.token_ids))
        pace = None if step_s is None or pause_s is None else Pace(step_s=step_s, round_s=pause_s)
        result = self._drafter.take(ask, pace)
        is_hit = result is not None and bool(result.token_ids)
        self._counters.num_cache_hits += is_hit
        self._counters.num_cache_misses += not is_hit
        return result

    def forget(self, key: SessionKey) -> None:
        """Prepare nothing for a session any more."""
        if self._drafter is not None:
            self._drafter.forget_outcomes(key)
