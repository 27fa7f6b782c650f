"""The queue of waiting requests, by seniority."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from outrider.verifier_service.messages.request import Request

Seniority = tuple[float, int]  # (seconds, order of arrival), unique; lower is served earlier


class WaitingQueue:
    """A priority queue: O(log n) to push and to pop, O(1) on average to discard any request."""

    def __init__(self) -> None:
        self._requests: dict[Seniority, Request] = {}
        self._heap: list[Seniority] = []  # may still contain discarded requests

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, seniority: Seniority) -> bool:
        return seniority in self._requests

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests, most senior first: O(n log n)."""
        return (self._requests[seniority] for seniority in sorted(self._requests))

    def push(self, seniority: Seniority, request: Request) -> None:
        assert seniority not in self._requests, f"{request.request_id} waits already"
        self._requests[seniority] = request
        heapq.heappush(self._heap, seniority)

    def first(self) -> Request | None:
        """Return the most senior request without removing it; None if the queue is empty."""
        while self._heap and self._heap[0] not in self._requests:
            heapq.heappop(self._heap)
        return self._requests[self._heap[0]] if self._heap else None

    def pop(self) -> Request:
        """Remove and return the most senior request."""
        request = self.first()
        assert request is not None, "nobody waits"
        del self._requests[heapq.heappop(self._heap)]
        return request

    def discard(self, seniority: Seniority) -> None:
        """Remove a request."""
        del self._requests[seniority]
        if len(self._heap) > 2 * len(self._requests):  # drop discarded entries, also while nothing is popped
            self._heap = sorted(self._requests)  # a sorted list is a heap
