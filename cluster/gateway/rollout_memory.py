"""What a gateway remembers of rollouts: the last responses of each key, and which verifiers have them.

Drafters forget with their verifier, and a request may go to another one. So a request takes along the responses of its
key that its verifier lacks. Every gateway has a memory of its own, and tells the others what it records: what one has
not heard yet costs drafts, and no token.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from outrider.verifier_service.messages.history import PastResponse, filed_under
from outrider.verifier_service.messages.request import GenerationRequest, RequestOutput

MAX_CARRIED_TOKENS = 1 << 14  # of one request: a drafter in a verifier's process holds its step up to learn them
MIN_COUNTED = 32  # tokens
MAX_VERIFIERS = 1024  # of which the memory knows what they have


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """Bounds of a gateway's memory, and of the drafters' own, which forget what was not used for longest."""

    num_versions: int = 4  # of the weights, whose responses are kept, as in drafters
    max_responses: int = 64  # of one key
    max_keys: int = 1 << 16
    max_tokens: int = 1 << 24  # of all keys, in 4 bytes each; see `counted`
    max_drafter_responses: int = 10_000  # of all keys, as in drafters; 0: they keep none, and none is sent
    max_drafter_tokens: int = 500_000


class Remembered(NamedTuple):
    """A response that has ended."""

    number: int  # in the order in which the memory got them
    version: int  # number of the version of the weights that drew it
    token_ids: array[int]

    @property
    def counted(self) -> int:
        """How many tokens it counts as: what surrounds them takes as much memory as `MIN_COUNTED`."""
        return max(MIN_COUNTED, len(self.token_ids))


class Exported(NamedTuple):
    """A response as it leaves the memory."""

    key: str
    weight_version: str | None  # None: it was given without one
    token_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A response as one gateway tells it to another; the fields are arguments of `RolloutMemory.record`."""

    key: str
    token_ids: tuple[int, ...]
    weight_version: str | None = None
    verifier_id: str | None = None


@dataclass(slots=True)
class _Verifier:
    """What a verifier's drafters have, unless they have forgotten it: the least recently used key goes first."""

    drafters: frozenset[str]  # in pools
    keys: OrderedDict[str, dict[int, int]] = field(default_factory=OrderedDict)  # number to tokens, of each response
    num_responses: int = 0
    num_tokens: int = 0

    def add(self, key: str, responses: Sequence[Remembered], limits: MemoryLimits) -> None:
        held = self.keys.setdefault(key, {})
        self.keys.move_to_end(key)
        held.update({one.number: len(one.token_ids) for one in responses})
        self.num_responses += len(responses)
        self.num_tokens += sum(len(one.token_ids) for one in responses)
        while self.num_responses > limits.max_drafter_responses or self.num_tokens > limits.max_drafter_tokens:
            oldest = next(iter(self.keys))
            if len(self.keys) > 1:
                self.forget(oldest)
            else:
                self.num_responses -= 1
                self.num_tokens -= held.pop(next(iter(held)))

    def forget(self, key: str) -> None:
        held = self.keys.pop(key, {})
        self.num_responses -= len(held)
        self.num_tokens -= sum(held.values())


@dataclass(slots=True)
class Sample:
    """One request at one verifier."""

    request: GenerationRequest  # with the history that it takes along
    token_ids: list[int]
    weight_version: str = ""
    has_begun: bool = False  # the engine has the request, and so its history
    is_lost: bool = False  # it goes on elsewhere
    _has_ended: bool = False

    def hear(self, output: RequestOutput) -> None:
        """Note an output."""
        self.has_begun = True
        self.token_ids += output.token_ids
        self.weight_version = output.weight_version or self.weight_version
        self._has_ended = output.finish_reason is not None
        self.is_lost = output.is_held  # unless nobody takes it over

    def lose(self) -> None:
        """Note that the stream broke; behind its last output that is no loss."""
        self.is_lost = not self._has_ended


class RolloutMemory:
    """The last responses of each key, bounded: the least recently used key goes first."""

    def __init__(self, limits: MemoryLimits | None = None, tell: Callable[[Recorded], None] = lambda _: None) -> None:
        """`tell` hears of what is recorded here."""
        self.limits = limits or MemoryLimits()
        self._tell = tell
        self._keys: OrderedDict[str, deque[Remembered]] = OrderedDict()  # oldest response first
        self._versions: deque[str] = deque(maxlen=self.limits.num_versions)  # oldest first
        self._newest = 0  # number of the newest version
        self._num_recorded = 0
        self._num_tokens = 0
        self._verifiers: OrderedDict[str, _Verifier] = OrderedDict()

    @contextlib.contextmanager
    def sampling(
        self, request: GenerationRequest, verifier_id: str, drafters: frozenset[str] = frozenset()
    ) -> Iterator[Sample]:
        """Let a sample run at a verifier, with what that lacks of its key, and remember its response.

        `drafters`: those that the verifier has links to. A new one has nothing: all of it is sent again, and those that
        have it keep nothing twice. A response counts however it ended, unless the request moves to another verifier.
        """
        key = filed_under(request.history_key, request.prompt_token_ids, request.partition)
        verifier = self._verifier(verifier_id, drafters)
        history = self._take(key, verifier)
        sample = Sample(replace(request, history=history) if history else request, list(request.output_token_ids))
        try:
            yield sample
        finally:
            if sample.is_lost:
                self._verifiers.pop(verifier_id, None)
            elif sample.has_begun:
                self.record(key, sample.token_ids, sample.weight_version, verifier_id)
            else:
                verifier.forget(key)

    def record(
        self, key: str, token_ids: Sequence[int], weight_version: str | None = None, verifier_id: str | None = None
    ) -> None:
        """Remember a response, cut at the front to what a request may take along; without a version, of the newest.

        `verifier_id`: its drafters have the response.
        """
        if not key or len(token_ids) < 2:  # no token has a next one
            return
        kept = tuple(token_ids[-min(MAX_CARRIED_TOKENS, self.limits.max_tokens) :])
        told = Recorded(key=key, token_ids=kept, weight_version=weight_version, verifier_id=verifier_id)
        self.hear(told)
        self._tell(told)

    def hear(self, told: Recorded) -> None:
        """Remember a response that this gateway or another one has recorded."""
        key, verifier_id = told.key, told.verifier_id
        version = self._newest if told.weight_version is None else self._number_of(told.weight_version)
        self._use(key)
        responses = self._keys.setdefault(key, deque())
        if len(responses) == self.limits.max_responses:
            self._remove_oldest(responses)
        self._num_recorded += 1
        one = Remembered(self._num_recorded, version, array("i", told.token_ids))
        responses.append(one)
        self._num_tokens += one.counted
        while len(self._keys) > self.limits.max_keys or self._num_tokens > self.limits.max_tokens:
            self._drop_least_used()
        if verifier_id is not None and verifier_id in self._verifiers:
            self._verifiers[verifier_id].add(key, [one], self.limits)

    def knows(self, weight_version: str) -> bool:
        """Return whether responses of a version are kept: another one would be the newest, and end the oldest."""
        return weight_version in self._versions

    def exported(self) -> Iterator[Exported]:
        """Return all responses of now, those of older versions first: recorded in this order, they export the same.

        What takes long is done as the iterator goes on, which may be on another thread.
        """
        kept = [(key, tuple(responses)) for key, responses in self._keys.items()]
        names = dict(zip(range(self._newest - len(self._versions) + 1, self._newest + 1), self._versions, strict=True))
        return _in_order(kept, names, self._last_dropped)

    def clear(self) -> None:
        """Forget all responses. Drafters that have them drop them with their versions, or for others."""
        self._keys.clear()
        self._versions.clear()
        self._verifiers.clear()
        self._newest = self._num_tokens = 0

    def check_integrity(self) -> None:
        """Raise `AssertionError` if bounds are exceeded, or the sums are those of other responses."""
        known = [one for responses in self._keys.values() for one in responses]
        assert self._num_tokens == sum(one.counted for one in known) <= self.limits.max_tokens
        assert len(self._keys) <= self.limits.max_keys
        assert all(0 < len(responses) <= self.limits.max_responses for responses in self._keys.values())
        assert "" not in self._keys, "responses of requests that declined"
        for verifier in self._verifiers.values():
            held = [size for responses in verifier.keys.values() for size in responses.values()]
            assert verifier.num_responses == len(held) <= self.limits.max_drafter_responses
            assert verifier.num_tokens == sum(held) <= self.limits.max_drafter_tokens

    # --- verifiers ---

    def _verifier(self, verifier_id: str, drafters: frozenset[str]) -> _Verifier:
        """Return what is known of a verifier; where it has a new drafter, nothing is."""
        verifier = self._verifiers.get(verifier_id)
        if verifier is None or not drafters <= verifier.drafters:
            verifier = self._verifiers[verifier_id] = _Verifier(drafters)
        verifier.drafters = drafters
        self._verifiers.move_to_end(verifier_id)
        if len(self._verifiers) > MAX_VERIFIERS:
            self._verifiers.popitem(last=False)
        return verifier

    def _take(self, key: str, verifier: _Verifier) -> tuple[PastResponse, ...]:
        """Return the newest responses of a key that a verifier lacks, oldest first, and note that it has them now.

        What is too much for one request goes with the next ones.
        """
        if not key or not self.limits.max_drafter_responses:
            return ()
        self._use(key)
        held, chosen, num_left = verifier.keys.get(key, {}), list[Remembered](), MAX_CARRIED_TOKENS
        for one in reversed(self._keys.get(key, ())):
            if one.number in held:
                continue
            num_left -= len(one.token_ids)
            if num_left < 0:
                break
            chosen.append(one)
        chosen.reverse()
        if chosen or held:
            verifier.add(key, chosen, self.limits)
        return tuple(PastResponse(token_ids=tuple(one.token_ids), age=self._newest - one.version) for one in chosen)

    # --- responses ---

    @property
    def _last_dropped(self) -> int:
        """Number of the newest version whose responses are too old."""
        return self._newest - self.limits.num_versions

    def _number_of(self, weight_version: str) -> int:
        """Return a version's number; an unknown one is the newest."""
        if weight_version not in self._versions:
            self._versions.append(weight_version)
            self._newest += 1
        return self._newest - len(self._versions) + 1 + self._versions.index(weight_version)

    def _use(self, key: str) -> None:
        """Note that a key is used, and drop its responses of too old versions."""
        responses = self._keys.get(key)
        if responses is None:
            return
        self._keys.move_to_end(key)
        kept = [one for one in responses if one.version > self._last_dropped]
        self._num_tokens -= sum(one.counted for one in responses) - sum(one.counted for one in kept)
        self._keys[key] = deque(kept)
        if not kept:
            del self._keys[key]

    def _drop_least_used(self) -> None:
        """Drop the key that was not used for longest; of the only key, its oldest response."""
        if len(self._keys) == 1:
            self._remove_oldest(next(iter(self._keys.values())))
        else:
            _, responses = self._keys.popitem(last=False)
            self._num_tokens -= sum(one.counted for one in responses)

    def _remove_oldest(self, responses: deque[Remembered]) -> None:
        self._num_tokens -= responses.popleft().counted


def _in_order(
    kept: Sequence[tuple[str, Sequence[Remembered]]], names: Mapping[int, str], last_dropped: int
) -> Iterator[Exported]:
    """Yield responses, those of older versions first, but for those that are too old."""
    found = [(one.version, one.number, key, one.token_ids) for key, responses in kept for one in responses]
    for version, _, key, token_ids in sorted(found):
        if version > last_dropped:
            yield Exported(key, names.get(version), token_ids.tolist())
