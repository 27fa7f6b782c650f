"""An accelerator that is played: forwards take what an H100 was seen to take, and nothing of the host's time.

Engines, drafters, their loops and links are the real ones. A device does what it is told in order; what a forward
returns is there at once and counts once its time has come, which whoever reads it waits for. Time is the machine's own,
where the host's work is measured, or virtual, where nothing but decisions matters: then the host's work takes none.

The target's token at a place is the same for every request (`token_at`), so that a verification needs no logits; the
draft model misses it as often as it is told to.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from exactness.references import along_choices
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.tree import VerifiedTokens
from outrider.verifier_service.model.step_graphs import Bucket, bucket_of
from outrider.verifier_service.sampling.entries import VerificationEntry
from outrider.verifier_service.sampling.unread import UnreadTokens
from outrider.verifier_service.sampling.verification import ChosenTokens

VOCAB_SIZE = 512
BLOCK_SIZE = 16
SURE = 8.5  # the logit of a drafted token, beside zeros: it is claimed to be right at 0.9
SECOND = 6.5  # that of the token which comes second
_HASH = 0x9E3779B97F4A7C15


def token_at(position: int) -> int:
    """Return the token that the target has at a place."""
    return (position * 31 + 7) % VOCAB_SIZE


# --- time ---


class Clock(Protocol):
    """Time as engines see it."""

    def now_s(self) -> float: ...

    def wait_until(self, at_s: float) -> None: ...


class WallClock:
    """The machine's own. Who waits spins, as CUDA does for an event where there are processors enough."""

    def now_s(self) -> float:
        return time.monotonic()

    def wait_until(self, at_s: float) -> None:
        while time.monotonic() < at_s:
            pass


class ProcessorClock:
    """The processor's time of this thread, which alone computes; a wait takes what is waited for and no processor.

    So the host's work counts and what else the machine does is left out: for what runs in one process.
    """

    def __init__(self) -> None:
        self._waited_s = 0.0

    def now_s(self) -> float:
        return time.thread_time() + self._waited_s

    def wait_until(self, at_s: float) -> None:
        self._waited_s += max(0.0, at_s - self.now_s())


class VirtualClock:
    """One that goes on when somebody waits."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def wait_until(self, at_s: float) -> None:
        self._now_s = max(self._now_s, at_s)


# --- what a device does ---


@dataclass(frozen=True, slots=True)
class ForwardTimes:
    """Seconds of a model's forwards, by rows."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    eager_s: float  # what a forward that is not captured takes besides: its launches
    context_s: float = 0.0  # per position of KV that is read

    def of(self, num_rows: int, *, is_captured: bool, num_context_tokens: int) -> float:
        """Return those of a forward; beyond the table they grow by its last slope."""
        left = max(0, min(bisect_right(self.rows, num_rows) - 1, len(self.rows) - 2))
        (low, high), (low_s, high_s) = self.rows[left : left + 2], self.seconds[left : left + 2]
        base_s = low_s + (num_rows - low) / (high - low) * (high_s - low_s)
        return base_s + self.context_s * num_context_tokens + self.eager_s * (not is_captured)


# One H100, bfloat16, as measured on 2026-11-27 (docs/gpu.md): 8 B by rows and by context, eager steps 12.3 ms dearer,
# prompts at 39,000 tokens/s. 1.4 B: a level's bytes take 0.85 ms; the rest of its row is the 8 B's, by parameters.
H100_8B = ForwardTimes(
    (1, 5, 16, 64, 256, 320, 512, 1024, 2048),
    (6.48e-3, 6.61e-3, 6.74e-3, 7.13e-3, 8.6e-3, 9.2e-3, 13.4e-3, 26.3e-3, 52.5e-3),
    eager_s=12.3e-3,
    context_s=5e-8,
)
H100_1B = ForwardTimes(
    (1, 16, 64, 256, 512, 1024, 2048),
    (0.9e-3, 0.92e-3, 1.0e-3, 1.5e-3, 2.4e-3, 4.6e-3, 9.2e-3),
    eager_s=1.9e-3,
    context_s=8e-9,
)


class PlayedDevice:
    """Does what it is told, in order. What it has not done yet (drafting, verifying drafts) takes `cold_s` more."""

    def __init__(self, clock: Clock, *, cold_s: float = 0.0) -> None:
        self.clock, self.cold_s = clock, cold_s
        self.free_s = 0.0  # when it will have done all
        self.num_cold = 0  # first calls
        self._met: set[object] = set()

    def launch(self, seconds: float, first: object = None) -> None:
        """Do something that takes so long; `first` names what is dear when it is met first. None: nothing."""
        if first is not None and first not in self._met:
            self._met.add(first)
            seconds += self.cold_s
            self.num_cold += 1
        self.free_s = max(self.free_s, self.clock.now_s()) + seconds

    def wait(self) -> None:
        """Wait until it has done all that it was told so far."""
        self.clock.wait_until(self.free_s)


class PlayedCopy:
    """What comes back from a device, once that has done all that it was told before."""

    def __init__(self, device: PlayedDevice, values: torch.Tensor) -> None:
        self._device, self._at_s, self._values = device, device.free_s, values

    def wait(self) -> torch.Tensor:
        self._device.clock.wait_until(self._at_s)
        return self._values


class PlayedModel:
    """A runner whose forwards take a device's time."""

    vocab_size, block_size = VOCAB_SIZE, BLOCK_SIZE
    eos_token_ids: tuple[int, ...] = ()
    states = None

    def __init__(
        self, device: PlayedDevice, times: ForwardTimes, *, max_model_len: int = 4096, num_blocks: int = 1 << 16
    ) -> None:
        self.device, self.max_model_len, self.num_blocks = device, max_model_len, num_blocks
        self._times = times

    def _launch(self, batch: ScheduledBatch, first: str | None = None) -> None:
        bucket = bucket_of(batch, batch_table_width(self.max_model_len))
        is_captured = isinstance(bucket, Bucket)
        num_rows = bucket.num_tokens if isinstance(bucket, Bucket) else batch.num_tokens
        seconds = self._times.of(num_rows, is_captured=is_captured, num_context_tokens=sum(batch.context_lengths))
        self.device.launch(seconds, first and (first, len(batch.query_lengths).bit_length()))


def batch_table_width(max_model_len: int) -> int:
    """Return the KV blocks of the longest sequence and a tree."""
    return -(-(max_model_len + 64) // BLOCK_SIZE)


class PlayedTarget(PlayedModel):
    """A `Runner`, whose `verify` is the engine's."""

    def execute(self, batch: ScheduledBatch, chosen: torch.Tensor | None = None) -> torch.Tensor:
        self._launch(batch)
        return torch.empty(len(batch.logits_indices), 1)

    def verify(
        self,
        logits: torch.Tensor,
        entries: Sequence[VerificationEntry],
        rng: torch.Generator,
        rows: Sequence[int] | None = None,
        unread: UnreadTokens | None = None,
    ) -> PlayedVerification:
        if any(entry.draft is not None for entry in entries):
            self.device.launch(0.0, ("verification", len(entries).bit_length()))
        numbers = [] if unread is None else unread.numbers.tolist()
        verified = [_verified(entry, numbers) for entry in entries]
        return PlayedVerification(self.device, self.device.free_s, entries, verified)


@dataclass(frozen=True, slots=True)
class PlayedVerification:
    """Ends with its forward. What the device finds is there before, so that it takes none of the host's time."""

    device: PlayedDevice
    at_s: float
    entries: Sequence[VerificationEntry]
    verified: list[VerifiedTokens]
    corrected: frozenset[int] = frozenset()

    @property
    def chosen(self) -> ChosenTokens | None:
        if not self.entries:
            return None
        numbers = torch.from_numpy(np.array([token_at(entry.position) for entry in self.entries]))
        return ChosenTokens(numbers, range(len(self.entries)))

    def collect(self) -> list[VerifiedTokens]:
        self.device.clock.wait_until(self.at_s)
        return self.verified


def _verified(entry: VerificationEntry, unread: Sequence[int]) -> VerifiedTokens:
    """Verify a draft, or what its placeholders stand for among the unread tokens."""
    draft = entry.draft
    if draft is None:
        return VerifiedTokens([token_at(entry.position)], ())
    if draft.is_unread:
        draft = replace(draft, token_ids=tuple(unread[-1 - placeholder] for placeholder in draft.token_ids))
    return along_choices(draft, [token_at(position) for position in entry.positions])


class PlayedDraftModel(PlayedModel):
    """A draft model's runner: it is sure of the target's next token, or, as often as said, of another.

    Half of the times that it is wrong, the right token comes second: what running ahead guesses by.
    """

    def __init__(self, device: PlayedDevice, times: ForwardTimes, *, share_right: float, **sizes: int) -> None:
        """`share_right`: of its tokens, given that those before are right."""
        super().__init__(device, times, **sizes)
        self._threshold = int(share_right * (1 << 32))

    def execute(self, batch: ScheduledBatch, chosen: torch.Tensor | None = None) -> torch.Tensor:
        self._launch(batch, "drafting")
        ends = np.cumsum(batch.query_lengths)
        wanted = np.array(batch.logits_indices, np.int64)
        first_blocks = np.array([table[0] for table in batch.block_tables], np.int64)
        owners = first_blocks[np.searchsorted(ends, wanted, side="right")].astype(np.uint64)
        places = np.array(batch.positions, np.int64)[wanted] + 1
        mixed = (owners << np.uint64(32) | places.astype(np.uint64)) * np.uint64(_HASH)
        mixed = (mixed ^ mixed >> np.uint64(32)) * np.uint64(_HASH)
        is_wrong = (mixed >> np.uint64(32)) >= self._threshold
        right, other = (places * 31 + 7) % VOCAB_SIZE, (places * 31 + 8) % VOCAB_SIZE
        is_known = is_wrong & (mixed & np.uint64(1)).astype(bool)  # the right one comes second, half of the times
        logits = torch.zeros(len(wanted), VOCAB_SIZE)
        logits.scatter_(1, torch.from_numpy(np.where(is_wrong, other, right))[:, None], SURE)
        logits[torch.from_numpy(is_known), torch.from_numpy(right[is_known])] = SECOND
        return logits

    def read_back(self, values: torch.Tensor) -> PlayedCopy:
        """As `CopyBack`, once the device has come so far."""
        return PlayedCopy(self.device, values)


class Awaited:
    """A runner whose steps have ended when `execute` returns, to be profiled."""

    def __init__(self, runner: PlayedModel) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def execute(self, batch: ScheduledBatch, chosen: torch.Tensor | None = None) -> torch.Tensor:
        logits = self._runner.execute(batch, chosen)
        self._runner.device.wait()
        return logits
