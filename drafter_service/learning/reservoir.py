"""Recent samples in memory, bounded in bytes and partitioned by salt. No text ever goes to disk.

When the reservoir is full, the oldest sample of the partition with the most bytes goes: no tenant crowds out another.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider.drafter_service.engine.learning_messages import ServedSample

HELD_OUT_EVERY = 8  # arrivals of a partition: one of them is for judging alone
MAX_PENDING_REWARDS = 4096  # rewards whose sample has not come yet
MIN_WEIGHT, MAX_WEIGHT = 0.1, 10.0  # of a reward: no sample is forgotten, and none is all that is learned


@dataclass(slots=True)
class Kept:
    """A sample in memory: its integers as arrays, which take the bytes that are counted."""

    sample: ServedSample  # without token ids and positions
    token_ids: np.ndarray  # int32 [num_tokens]
    state_positions: np.ndarray  # int32 [num_states], ascending
    num_bytes: int
    is_held_out: bool
    reward: float | None = None

    @classmethod
    def of(cls, sample: ServedSample, *, is_held_out: bool) -> Kept:
        """Take a sample. Raises `ValueError` if its parts do not fit together."""
        _check(sample)
        return cls(
            sample=replace(sample, token_ids=(), state_positions=()),
            token_ids=np.array(sample.token_ids, np.int32),
            state_positions=np.array(sample.state_positions, np.int32),
            num_bytes=sample.num_bytes,
            is_held_out=is_held_out,
        )

    def text(self) -> ServedSample:
        """Return the sample without states and rows of the target's law."""
        return ServedSample(
            request_id=self.sample.request_id,
            token_ids=tuple(self.token_ids.tolist()),
            num_prompt_tokens=self.sample.num_prompt_tokens,
            cache_salt=self.sample.cache_salt,
            weight_version=self.sample.weight_version,
        )


class Reservoir:
    """Samples by partition and request id, the oldest first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_seen = 0  # samples that came, ever
        self.num_refused = 0  # of them, those that did not fit together, or not into the whole reservoir
        self._partitions: dict[str, OrderedDict[str, Kept]] = {}
        self._partition_bytes: dict[str, int] = {}
        self._num_arrivals: dict[str, int] = {}
        # salt and request id, in order of arrival over all partitions; a client chooses its ids, and others may, too
        self._places: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._pending: OrderedDict[str, float] = OrderedDict()
        self._newest_version = ""

    def __len__(self) -> int:
        return len(self._places)

    def add(self, sample: ServedSample) -> None:
        """Keep a sample; an older one of the same request goes, whose place among the held-out ones stays."""
        self.num_seen += 1
        salt = sample.cache_salt
        replaced = self._remove(salt, sample.request_id)
        if sample.num_bytes > self.max_bytes:
            self.num_refused += 1
            return
        arrivals = self._num_arrivals.get(salt, 0) + 1
        is_held_out = arrivals % HELD_OUT_EVERY == 0 if replaced is None else replaced.is_held_out
        try:
            kept = Kept.of(sample, is_held_out=is_held_out)
        except ValueError:
            self.num_refused += 1
            return
        kept.reward = self._pending.pop(sample.request_id, None if replaced is None else replaced.reward)
        self._num_arrivals[salt] = arrivals
        self._partitions.setdefault(salt, OrderedDict())[sample.request_id] = kept
        self._partition_bytes[salt] = self._partition_bytes.get(salt, 0) + kept.num_bytes
        self._places[salt, sample.request_id] = None
        self.num_bytes += kept.num_bytes
        self._newest_version = sample.weight_version
        while self.num_bytes > self.max_bytes:
            largest = max(self._partition_bytes, key=self._partition_bytes.__getitem__)
            self._remove(largest, next(iter(self._partitions[largest])))

    def reward(self, request_id: str, reward: float) -> None:
        """Note a trainer's reward for the samples of a request that are here, or still to come. It must be finite."""
        if not math.isfinite(reward):
            raise ValueError(f"reward: {reward} is not finite")
        found = [partition[request_id] for partition in self._partitions.values() if request_id in partition]
        for kept in found:
            kept.reward = reward
        if found:
            return
        self._pending[request_id] = reward
        if len(self._pending) > MAX_PENDING_REWARDS:
            self._pending.popitem(last=False)

    def training(self, min_samples: int = 0) -> list[Kept]:
        """Return the samples to train on, oldest first: those of the target's newest weights if there are enough."""
        kept = self._all(is_held_out=False)
        newest = [each for each in kept if each.sample.weight_version == self._newest_version]
        return newest if len(newest) >= max(1, min_samples) else kept

    def held_out(self) -> list[Kept]:
        """Return the samples that are never trained on, oldest first."""
        return self._all(is_held_out=True)

    def texts(self, max_tokens: int) -> tuple[ServedSample, ...]:
        """Return the newest samples of up to `max_tokens` tokens, oldest first, without states."""
        texts: list[ServedSample] = []
        for salt, request_id in reversed(self._places):
            kept = self._partitions[salt][request_id]
            max_tokens -= len(kept.token_ids)
            if max_tokens < 0:
                break
            texts.append(kept.text())
        return tuple(reversed(texts))

    def check_integrity(self) -> None:
        """Raise `AssertionError` if counts and contents differ."""
        kept = [each for partition in self._partitions.values() for each in partition.values()]
        assert all(self._partitions.values()), "an empty partition is left"
        assert self.num_bytes == sum(each.num_bytes for each in kept) <= self.max_bytes
        assert self._partitions.keys() == self._partition_bytes.keys()
        for salt, partition in self._partitions.items():
            assert self._partition_bytes[salt] == sum(each.num_bytes for each in partition.values())
            assert all((salt, request_id) in self._places for request_id in partition)
        assert len(kept) == len(self._places)
        assert not self._pending.keys() & {request_id for _, request_id in self._places}

    def _all(self, *, is_held_out: bool) -> list[Kept]:
        every = (self._partitions[salt][request_id] for salt, request_id in self._places)
        return [kept for kept in every if kept.is_held_out == is_held_out]

    def _remove(self, salt: str, request_id: str) -> Kept | None:
        if (salt, request_id) not in self._places:
            return None
        del self._places[salt, request_id]
        kept = self._partitions[salt].pop(request_id)
        self.num_bytes -= kept.num_bytes
        self._partition_bytes[salt] -= kept.num_bytes
        if not self._partitions[salt]:
            del self._partitions[salt], self._partition_bytes[salt]
        if len(self._num_arrivals) > max(MAX_PENDING_REWARDS, len(self._partitions)):
            self._num_arrivals = {salt: self._num_arrivals[salt] for salt in self._partitions}
        return kept


def reward_weights(kept: Sequence[Kept]) -> list[float]:
    """Weigh samples by their rewards as ReSpec does (arXiv 2510.26475): exp of the standardised reward, clamped.

    A sample without a reward weighs 1, as one of the mean reward does.
    """
    rewards = [each.reward for each in kept if each.reward is not None]
    spread = statistics.pstdev(rewards) if rewards else 0.0
    if spread == 0.0:
        return [1.0] * len(kept)
    mean = statistics.fmean(rewards)
    low, high = math.log(MIN_WEIGHT), math.log(MAX_WEIGHT)
    scores = [0.0 if each.reward is None else (each.reward - mean) / spread for each in kept]
    return [math.exp(min(high, max(low, score))) for score in scores]


def _check(sample: ServedSample) -> None:
    """Raise `ValueError` if lengths do not fit together, or a position is none of the text."""
    num_tokens, num_states = len(sample.token_ids), len(sample.state_positions)
    if not 0 <= sample.num_prompt_tokens <= num_tokens:
        raise ValueError(f"num_prompt_tokens: {sample.num_prompt_tokens} of {num_tokens}")
    if len(sample.states) != 2 * num_states * sample.state_width:
        raise ValueError(f"states: {len(sample.states)} bytes, {num_states} states of width {sample.state_width}")
    steps = zip((-1, *sample.state_positions), (*sample.state_positions, num_tokens), strict=True)
    if any(here >= there for here, there in steps):
        raise ValueError("state_positions: they must ascend within the text")
    num_rows = (num_tokens - sample.num_prompt_tokens) * sample.num_top
    if {len(sample.top_ids), len(sample.top_weights)} != {4 * num_rows}:
        raise ValueError(f"top_ids, top_weights: {num_rows} numbers each are expected")
