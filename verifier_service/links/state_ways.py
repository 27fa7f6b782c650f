"""Which way hidden states go over a link that has a channel beside it: the one with the shorter round trips, by size.

What a way costs is not modelled but measured, link by link: from ask to draft, rounds whose states went in the link's
frames against rounds whose states went through the channel. Sizes are told apart by powers of two, since a frame is
faster for a few KiB and a channel for many MiB (`docs/results/remote_states.md`), and where one overtakes the other
depends on the network between the two. Both ways are tried a few times, then the slower one now and then.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MIN_CHANNEL_BYTES = 8 << 10  # fewer are never worth a transfer of their own
LIKELY_CHANNEL_BYTES = 512 << 10  # from here the channel is tried first: on one machine it was faster from 600 KiB on
NUM_TRIES = 4  # of each way, before one is preferred
RETRY_EVERY = 64  # rounds of a size, of which one goes the slower way: conditions change
SMOOTHING = 1 / 8
STALL = 4.0  # times the mean: what takes longer counts as no more, a machine that stood still is no way's fault


@dataclass(slots=True)
class _Way:
    mean_s: float = 0.0
    num_rounds: int = 0

    def observe(self, seconds: float) -> None:
        self.num_rounds += 1
        if self.num_rounds <= NUM_TRIES:  # the quickest of the first: a connection's very first rounds are cold
            self.mean_s = seconds if self.num_rounds == 1 else min(seconds, self.mean_s)
        else:
            self.mean_s += SMOOTHING * (min(seconds, STALL * self.mean_s) - self.mean_s)


@dataclass(slots=True)
class _Size:
    """Rounds with states of about one size."""

    frames: _Way = field(default_factory=_Way)
    channel: _Way = field(default_factory=_Way)
    num_chosen: int = 0


class StateWays:
    """The choice of one link, round by round."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}

    def takes_channel(self, num_bytes: int) -> bool:
        """Return whether a round's states should go through the channel, not in frames."""
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
        """Take in the round trip of a round whose states, of so many bytes, all went one way."""
        if num_bytes < MIN_CHANNEL_BYTES:
            return
        size = self._sizes.setdefault(num_bytes.bit_length(), _Size())
        (size.channel if by_channel else size.frames).observe(seconds)
