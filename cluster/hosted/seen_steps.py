"""Learn what steps take from those that run, where no profile was measured at start."""

from __future__ import annotations

import collections
import math
import statistics

from outrider.verifier_service.messages.engine import StepTime

MIN_STEPS = 8  # before anybody goes without drafts for the sake of the profile
MIN_SAMPLES, MAX_SAMPLES = 3, 16  # of steps of about one size: their median is of no stall and no cold start
NUM_EXACT = 8  # steps of up to so many tokens are told apart by each, larger ones by
SIZE_RATIO = 1.25
MIN_GAP, MAX_GAP = 16, 1024  # steps between two profiles: each replaces what prices were made of


class SeenSteps:
    """Gather step times until they say what a draft costs, and say it anew as more is known.

    Prompts are read in steps many times as large as those that verify, often by other code. They tell what comes far
    beyond, but nothing of a few tokens more: for that steps with drafts and steps without are needed.
    """

    def __init__(self) -> None:
        self.profile: tuple[StepTime, ...] = ()
        self._samples: dict[int, collections.deque[StepTime]] = {}  # by size
        self._decoding: set[int] = set()  # the sizes that were seen without prompts
        self._num_steps = self._profiled_at = 0
        self._gap = MIN_GAP

    @property
    def wants_plain(self) -> bool:
        """Whether enough steps were seen, but too few of another size than most."""
        return not self.profile and self._num_steps >= MIN_STEPS

    def observe(self, num_tokens: int, seconds: float, *, has_prompts: bool = False) -> bool:
        """Take in a step; return whether `profile` has just become another."""
        if num_tokens < 1 or seconds <= 0.0:
            return False
        self._num_steps += 1
        size = _size_of(num_tokens)
        samples = self._samples.setdefault(size, collections.deque(maxlen=MAX_SAMPLES))
        samples.append(StepTime(num_tokens=num_tokens, seconds=seconds))
        if not has_prompts:
            self._decoding.add(size)
        known = [size for size, samples in self._samples.items() if len(samples) >= MIN_SAMPLES]
        if len(self._decoding.intersection(known)) < 2:
            return False
        num_since = self._num_steps - self._profiled_at
        if self.profile and num_since < (MIN_GAP if len(known) > len(self.profile) else self._gap):
            return False
        self._gap = min(MAX_GAP, max(MIN_GAP, 2 * num_since))
        self._profiled_at = self._num_steps
        self.profile = tuple(_typical(self._samples[size]) for size in sorted(known))
        return True


def _size_of(num_tokens: int) -> int:
    if num_tokens <= NUM_EXACT:
        return num_tokens
    return NUM_EXACT + 1 + math.floor(math.log(num_tokens / (NUM_EXACT + 1), SIZE_RATIO))


def _typical(samples: collections.deque[StepTime]) -> StepTime:
    return StepTime(
        num_tokens=statistics.median_high(sample.num_tokens for sample in samples),
        seconds=statistics.median(sample.seconds for sample in samples),
    )
