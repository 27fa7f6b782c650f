"""Learn step times from running steps, without a profile measured at start."""

from __future__ import annotations

import collections
import math
import statistics

from outrider.verifier_service.messages.engine import StepTime

MIN_STEPS = 8  # before steps without drafts are run for the profile
MIN_SAMPLES, MAX_SAMPLES = 3, 16  # per size: their median excludes stalls and cold starts
NUM_EXACT = 8  # up to 8 tokens, each number is a size class; a larger class spans a ratio of
SIZE_RATIO = 1.25
MIN_GAP, MAX_GAP = 16, 1024  # steps between two profiles: a new one resets the price


class SeenSteps:
    """Collect step times until they show the cost of a draft; update the profile as more arrive.

    Prefill steps are many times as large as verification steps, and often run other code. They show the cost of far
    larger steps, but not of a few more tokens: that takes steps with drafts and steps without.
    """

    def __init__(self) -> None:
        self.profile: tuple[StepTime, ...] = ()
        self._samples: dict[int, collections.deque[StepTime]] = {}  # by size class
        self._decoding: set[int] = set()  # sizes of steps without prefill
        self._num_steps = self._profiled_at = 0
        self._gap = MIN_GAP

    @property
    def wants_plain(self) -> bool:
        """Whether the profile lacks steps of another size, though enough steps were seen."""
        return not self.profile and self._num_steps >= MIN_STEPS

    def observe(self, num_tokens: int, seconds: float, *, has_prompts: bool = False) -> bool:
        """Add a step; return whether `profile` has changed."""
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
