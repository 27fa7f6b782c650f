"""The bound of drafting: what the best method and length would have brought, known afterwards, on recorded acceptance.

Recorded is, for every method and every generated position, how many tokens a draft has there and how many of its first
ones are right. So a batch can be played a step at a time, with any method and length for each of its requests. One that
ends is replaced by the next, and a step takes what the machine takes for its rows and its drafts.

    fixed        one method and length for everybody, the best of all: what an operator could pin
    per request  each request has the method and length that a batch of requests like it would do best with
    one method   in each step a request drafts what will be accepted, no more, by the method that is best in that step
    per step     the same by the two methods that are best in that step: each request by the one that is right further
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

NUM_ROUNDS = 3  # of finding the rate by which a step's seconds are weighed
TOKENS_PER_REQUEST = 48  # played for each that runs
MIN_TOKENS = 1500

Ints = npt.NDArray[np.int64]
Recorded = Mapping[str, Sequence[Sequence[tuple[int, int]]]]  # by method, request, position: tokens drafted and right


class Machine(Protocol):
    """What steps take."""

    def step_s(self, num_rows: int, num_requests: int) -> float:
        """Return the seconds of a step of so many requests, what is not the model included."""

    def draft_s(self, method: str, num_requests: int, longest: int) -> float:
        """Return the seconds until so many requests have drafts of at most `longest` tokens."""


class Drafts(NamedTuple):
    """What every running request drafts: the number of its method, tokens, and how many of them are right."""

    methods: Ints
    drafted: Ints
    right: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Tokens per second by plain decoding's, at one number of requests."""

    num_requests: int
    fixed: float
    fixed_name: str  # method and length
    per_request: float
    one_method: float
    per_step: float
    by_method: Mapping[str, float]  # at the longest drafts, which is what `always` measures


class Hindsight:
    """Recorded drafts on a machine."""

    def __init__(self, recorded: Recorded, machine: Machine, max_length: int) -> None:
        """Take the positions that every method has; raise `ValueError` where no request has one."""
        self._names, self._machine, self._max_length = tuple(recorded), machine, max_length
        shortest = [min(map(len, own)) for own in zip(*recorded.values(), strict=True)]
        # of each request: [num_methods, num_positions, 2]
        self._requests = [
            np.array([recorded[name][index][:length] for name in self._names], np.int64)
            for index, length in enumerate(shortest)
            if length
        ]
        if not self._requests:
            raise ValueError(f"no request has recorded drafts of {' and '.join(self._names)}")

    def bound(self, num_requests: int) -> Bound:
        """Play every choice with so many requests."""
        plain = self._play(num_requests, lambda places, _: _cut(places, 0, 0, self._max_length))
        keys = [*itertools.product(range(len(self._names)), range(1, self._max_length + 1))]
        fixed = {key: self._play_fixed(num_requests, [key] * len(self._requests)) / plain for key in keys}
        best = max(keys, key=fixed.__getitem__)
        own = [self._best_for(request, num_requests, keys) for request in self._requests]
        per_request = max(1.0, fixed[best], self._play_fixed(num_requests, own) / plain)
        singles = [(method,) for method in range(len(self._names))]
        pairs = [*singles, *itertools.combinations(range(len(self._names)), 2)]
        one_method = max(per_request, self._play_known(num_requests, singles, plain) / plain)
        return Bound(
            num_requests=num_requests,
            fixed=max(1.0, fixed[best]),
            fixed_name=f"{self._names[best[0]]}, {best[1]}" if fixed[best] > 1.0 else "none",
            per_request=per_request,
            one_method=one_method,
            per_step=max(one_method, self._play_known(num_requests, pairs, plain) / plain),
            by_method={name: fixed[method, self._max_length] for method, name in enumerate(self._names)},
        )

    def _play(self, num_requests: int, choose: Callable[[Ints, Ints], Drafts]) -> float:
        """Return tokens per second; `choose` gets [num_methods, num_requests, 2] and the requests' numbers."""
        requests = np.arange(num_requests) % len(self._requests)
        positions = np.array([index * 7 % self._length(own) for index, own in enumerate(requests.tolist())])
        num_started, num_tokens, seconds = num_requests, 0, 0.0
        while num_tokens < max(MIN_TOKENS, num_requests * TOKENS_PER_REQUEST):
            here = zip(requests.tolist(), positions.tolist(), strict=True)
            places = np.stack([self._requests[own][:, at] for own, at in here], axis=1)
            drafts = choose(places, requests)
            seconds += self._seconds(drafts)
            positions = positions + drafts.right + 1
            num_tokens += num_requests + int(drafts.right.sum())
            for lane in range(num_requests):
                if (beyond := int(positions[lane]) - self._length(int(requests[lane]))) >= 0:
                    num_tokens -= beyond
                    requests[lane], positions[lane] = num_started % len(self._requests), 0
                    num_started += 1
        return num_tokens / seconds

    def _length(self, request: int) -> int:
        return int(self._requests[request].shape[1])

    def _seconds(self, drafts: Drafts) -> float:
        num_requests = len(drafts.methods)
        drafting_s = 0.0
        for method, name in enumerate(self._names):
            own = drafts.drafted[(drafts.methods == method) & (drafts.drafted > 0)]
            if len(own):
                drafting_s += self._machine.draft_s(name, len(own), min(int(own.max()), self._max_length))
        return self._machine.step_s(num_requests + int(drafts.drafted.sum()), num_requests) + drafting_s

    def _play_fixed(self, num_requests: int, keys: Sequence[tuple[int, int]]) -> float:
        """Play each request with a method and length of its own."""
        methods, lengths = (np.array(each, np.int64) for each in zip(*keys, strict=True))
        return self._play(num_requests, lambda places, own: _cut(places, methods[own], lengths[own], self._max_length))

    def _best_for(self, request: Ints, num_requests: int, keys: Iterable[tuple[int, int]]) -> tuple[int, int]:
        """Return the method and length with which a batch of such requests is fastest; a length of 0: none is."""

        def rate(key: tuple[int, int]) -> float:
            at, seconds = 0, 0.0
            while at < request.shape[1]:
                one = _cut(request[:, at : at + 1], *key, self._max_length)
                seconds += self._seconds(Drafts(*(np.repeat(each, num_requests) for each in one)))
                at += int(one.right[0]) + 1
            return request.shape[1] / seconds

        return max([(0, 0), *keys], key=rate)

    def _play_known(self, num_requests: int, sets: Sequence[tuple[int, ...]], plain: float) -> float:
        """Play with what each step does best: the most tokens, less its seconds at the rate that comes of it."""
        rate = plain
        for _ in range(NUM_ROUNDS):
            rate = self._play(num_requests, partial(self._best_step, sets, rate))
        return rate

    def _best_step(self, sets: Sequence[tuple[int, ...]], rate: float, places: Ints, _: Ints) -> Drafts:
        nothing = _cut(places, 0, 0, self._max_length)
        best, most = nothing, -rate * self._seconds(nothing)
        for methods in sets:
            known = np.minimum(places[list(methods), :, 1], self._max_length)
            chosen, furthest = np.array(methods)[known.argmax(axis=0)], known.max(axis=0)
            for longest in range(1, int(furthest.max()) + 1):
                right = np.minimum(furthest, longest)
                drafts = Drafts(chosen, right, right)
                worth = int(right.sum()) - rate * self._seconds(drafts)
                if worth > most:
                    best, most = drafts, worth
        return best


def _cut(places: Ints, method: Ints | int, length: Ints | int, max_length: int) -> Drafts:
    """Cut every request's draft to a length: a chain's tokens behind it are gone, of a tree an equal share."""
    lanes = np.arange(places.shape[1])
    methods, lengths = np.broadcast_to(method, lanes.shape), np.broadcast_to(length, lanes.shape)
    drafted, right = places[methods, lanes].T
    is_tree = drafted > max_length
    drafted = np.where(is_tree, drafted * lengths // max_length, np.minimum(drafted, lengths))
    return Drafts(methods, drafted, np.minimum(right, lengths))
