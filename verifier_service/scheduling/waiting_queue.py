"""Requests that wait for their turn, in order of seniority."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from outrider.verifier_service.messages.request import Request

Seniority = tuple[float, int]  # (seconds, order of arrival): the lower, the earlier it is served; never the same twice


class WaitingQueue:
    """A priority queue: O(log n) to push and to pop, O(1) on average to discard from anywhere."""

    def __init__(self) -> None:
        self._requests: dict[Seniority, Request] = {}
        self._heap: list[Seniority] = []  # what was discarded stays in it for a while

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, seniority: Seniority) -> bool:
        return seniority in self._requests

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests, the most senior first: O(n log n)."""
        return (self._requests[seniority] for seniority in sorted(self._requests))

    def push(self, seniority: Seniority, request: Request) -> None:
        assert seniority not in self._requests, f"{request.request_id} waits already"
        self._requests[seniority] = request
        heapq.heappush(self._heap, seniority)

    def first(self) -> Request | None:
        """Return the most senior request, which stays; None when nobody waits."""
        while self._heap and self._heap[0] not in self._requests:
            heapq.heappop(self._heap)
        return self._requests[self._heap[0]] if self._heap else None

    def pop(self) -> Request:
        """Take the most senior request out."""
        request = self.first()
        assert request is not None, "nobody waits"
        del self._requests[heapq.heappop(self._heap)]
        return request

    def discard(self, seniority: Seniority) -> None:
        """Take a request out from wherever it is."""
        del self._requests[seniority]
        if len(self._heap) > 2 * len(self._requests):  # a queue that does not move must not grow
            self._heap = sorted(self._requests)  # sorted is a heap
