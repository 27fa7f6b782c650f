"""Choose how hidden states travel to a drafter, in frames or through the tensor channel, by measured round trips.

Each link measures both ways, from ask to draft, by size in powers of two: frames are faster for a few KiB, the channel
for many MiB (`docs/results/remote_states.md`), and the crossover depends on the network. Both ways are tried a few
times, then the slower one now and then.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MIN_CHANNEL_BYTES = 8 << 10  # smaller states always go in frames
LIKELY_CHANNEL_BYTES = 512 << 10  # from here the channel is tried first; on one machine it was faster from 600 KiB
NUM_TRIES = 4  # of each way, before one is preferred
RETRY_EVERY = 64  # one round in so many of a size takes the slower way, since conditions change
SMOOTHING = 1 / 8
STALL = 4.0  # clamp: a round trip counts at most this many means, so that a stall of the machine weighs little


@dataclass(slots=True)
class _Way:
    mean_s: float = 0.0
    num_rounds: int = 0

    def observe(self, seconds: float) -> None:
        self.num_rounds += 1
        if self.num_rounds <= NUM_TRIES:  # the minimum of the first rounds, which are cold
            self.mean_s = seconds if self.num_rounds == 1 else min(seconds, self.mean_s)
        else:
            self.mean_s += SMOOTHING * (min(seconds, STALL * self.mean_s) - self.mean_s)


@dataclass(slots=True)
class _Size:
    """Both ways for states of about one size."""

    frames: _Way = field(default_factory=_Way)
    channel: _Way = field(default_factory=_Way)
    num_chosen: int = 0


class StateWays:
    """Frames or channel, for each round of one link."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}

    def choose_channel(self, num_bytes: int) -> bool:
        """Choose the way of a round's states: True for the channel, False for frames."""
        if num_bytes < MIN_CHANNEL_BYTES:
            return False
        size = self._sizes.setdefault(num_bytes.bit_length(), _Size())
        size.num_chosen += 1
        frames, channel = size.frames, size.channel
        if min(frames.num_rounds, channel.num_rounds) < NUM_TRIES:
            is_likely = num_bytes >= LIKELY_CHANNEL_BYTES
            return is_likely if frames.num_rounds == channel.num_rounds else channel.num_rounds < frames.num_rounds
        is_faster = channel.mean_s < frames.mean_s
        return is_faster != (size.num_chosen % RETRY_EVERY == 0)

    def observe(self, num_bytes: int, seconds: float, *, by_channel: bool) -> None:
        """Learn from the round trip of a round whose states all went one way."""
        if num_bytes < MIN_CHANNEL_BYTES:
            return
        size = self._sizes.setdefault(num_bytes.bit_length(), _Size())
        (size.channel if by_channel else size.frames).observe(seconds)
