"""What a drafting engine does with the time in which nothing is asked of it: it lets its drafter run ahead.

A prepared draft answers at once. But an ask that arrives during a forward in spare time waits for that forward. Which
effect is larger depends on the load. So both ways are timed, each for some answers, and the quicker way is kept for
long.
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

TRIED_ANSWERS = 32  # that are timed with running ahead, and then as many without
KEPT_ANSWERS = 1024  # of the quicker way, until both are timed again
MAX_AHEAD_TOKENS = 64  # of one forward in spare time: an ask that arrives meanwhile waits for it


class RunsAhead(Protocol):
    """A drafter that drafts in its spare time for the outcomes of the verifications that run."""

    @property
    def num_forwards(self) -> int:
        """Return how many forwards it has run so far."""

    def expects(self, key: SessionKey) -> bool:
        """Return whether there was time to prepare for a session's next ask."""

    def take(self, ask: Ask, pace: Pace | None) -> Draft | None:
        """Answer an ask by a prepared draft, or by an empty one where drafting now is not worth the time.

        None: the ask is to be drafted as any other.
        """

    def forget_outcomes(self, key: SessionKey) -> None:
        """Prepare nothing for a session any more."""

    def has_spare_work(self) -> bool: ...

    def run_ahead(self, *, max_num_tokens: int) -> int:
        """Run one forward of at most `max_num_tokens` tokens over what is prepared; return how many it had."""


class _Phase(enum.Enum):
    """Which way is timed; or the quicker one is kept."""

    AHEAD = enum.auto()
    WITHOUT = enum.auto()
    KEPT = enum.auto()


class SpareTime:
    """The spare time of one drafter; None: the drafter cannot run ahead."""

    def __init__(self, drafter: RunsAhead | None, *, cost: ForwardCost, counters: DrafterCounters) -> None:
        """`cost` estimates the forwards that drafting after a miss takes."""
        self._drafter = drafter
        self._cost = cost
        self._counters = counters
        self._phase = _Phase.AHEAD
        self._is_on = True
        self._num_left = TRIED_ANSWERS  # answers until the phase ends
        self._waited_s = 0.0  # for the answers of this phase
        self._ahead_s = 0.0  # for those of the last phase AHEAD

    def timed(self) -> AbstractContextManager[None]:
        """Time what the drafter does."""
        drafter = self._drafter
        return self._cost.timed(None if drafter is None else lambda: drafter.num_forwards)

    def has_work(self) -> bool:
        return self._drafter is not None and self._is_on and self._drafter.has_spare_work()

    def observe_answer(self, seconds: float) -> None:
        """Note how long an ask waited for its answer, and move to the next phase after the last answer of this one."""
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
        """Run one forward ahead."""
        assert self._drafter is not None, "nothing is prepared"
        with self.timed():
            self._counters.num_ahead_tokens += self._drafter.run_ahead(max_num_tokens=max_num_tokens)

    def expects(self, key: SessionKey) -> bool:
        """Return whether there was time to prepare for a session's next ask."""
        return self._drafter is not None and self._drafter.expects(key)

    def answer(self, ask: Ask, pause_s: float | None) -> Draft | None:
        """Answer an ask that was prepared for, and count the hit or miss; None: it has to be drafted.

        `pause_s` is the time from an answer to the verifier's next ask.
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
