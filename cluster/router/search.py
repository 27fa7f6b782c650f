"""A new request's search for room: verifiers know more of their queues than what gateways have heard of them.

Where a request should run at once, by what is known, it says that it does not wait. A verifier that has no room after
all, since other gateways were faster, refuses it, and it goes to the next one. After MAX_PASSED of them it waits where
it is sent, as far as the queue's limit allows: the limit of the last place, which two gateways cannot both take.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cluster.router.fleet import Assignment, PlacementReason, VerifierState

MAX_PASSED = 2  # verifiers that had no room after all: from then on a request waits
MAX_FULL = 8  # verifiers whose queues were full: from then on a request is refused


@dataclass(slots=True)
class Search:
    """Which verifiers have refused a request, and what it says to the next one."""

    may_wait: bool = False  # at the next one
    passed_ids: tuple[str, ...] = ()  # that had no room
    full_ids: tuple[str, ...] = ()  # whose queues were full
    _is_waiting: bool = False  # at the one that was asked last

    @property
    def excluded_ids(self) -> tuple[str, ...]:
        return (*self.passed_ids, *self.full_ids)

    def most_waiting(self, chosen: Assignment, state: VerifierState, limit: int | None) -> int | None:
        """Return how many may wait at a verifier, with this request, for it to be taken there; None: any number."""
        is_known = state.report.load.num_waiting > 0
        self._is_waiting = self.may_wait or is_known or chosen.reason is PlacementReason.ONLY
        return limit if self._is_waiting else 0

    def refused(self, verifier_id: str) -> bool:
        """Note that a verifier refused it; return whether to try another one."""
        if self._is_waiting:
            self.full_ids = (*self.full_ids, verifier_id)
        else:
            self.passed_ids = (*self.passed_ids, verifier_id)
            self.may_wait = len(self.passed_ids) >= MAX_PASSED
        return len(self.full_ids) < MAX_FULL

    def none_left(self) -> bool:
        """Return whether those that had no room are left, to wait at."""
        has_passed = bool(self.passed_ids)
        self.passed_ids, self.may_wait = (), True
        return has_passed
