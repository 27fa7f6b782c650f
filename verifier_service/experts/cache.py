"""Experts in host memory: a bounded number of each layer's lies on the device, and others are fetched.

    layer     | gate | fetch what is missing | products of its experts | attention of the next layer | gate | …
    copies           | missing here | what the next layer's gate puts first for this layer's rows    |

The least recently taken make room. A step that takes more experts than a cache holds runs in rounds. Copies keep their
order, so the last one into a slot is what the slot holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from torch import nn

from outrider.verifier_service.gpu.transfers import upload_rows
from outrider.verifier_service.messages.counts import FetchCounts

Pair = tuple[torch.Tensor, torch.Tensor]  # target on the device, source in host memory; of one shape and dtype
Wait = Callable[[], object]  # return once a copy has arrived, or let the device wait for it


class Copier(Protocol):
    """Copies experts in the background, in the order of the calls."""

    def copy(self, pairs: Sequence[Pair]) -> Wait: ...


class ThreadCopier:
    """A thread of the host, where the device is the host itself."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "experts")

    def copy(self, pairs: Sequence[Pair]) -> Wait:
        return self._thread.submit(_copy_all, pairs).result


class StreamCopier:
    """A stream beside the one that computes; sources lie in pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def copy(self, pairs: Sequence[Pair]) -> Wait:
        """What was launched before may still read the targets: the copy waits for it."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        arrived = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            _copy_all(pairs)
            arrived.record()
        return lambda: torch.cuda.current_stream(self._device).wait_event(arrived)


def _copy_all(pairs: Sequence[Pair]) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)


def copier_of(device: torch.device) -> Copier:
    """Return a device's way to copy."""
    return StreamCopier(device) if device.type == "cuda" else ThreadCopier()


class ExpertCache:
    """One layer's experts: all in host memory, `num_slots` of them on the device."""

    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        num_slots: int,
        device: torch.device,
        copier: Copier,
        counts: FetchCounts,
    ) -> None:
        """`gate_up` [num_experts, 2 * inner_size, hidden_size], `down` [num_experts, hidden_size, inner_size].

        Where the device is CUDA, they are copied into pinned memory. All layers share `copier` and `counts`.
        """
        is_pinned = device.type == "cuda"
        self._host = tuple(part.contiguous().pin_memory() if is_pinned else part for part in (gate_up, down))
        self.num_slots = min(num_slots, len(gate_up))
        self._held = tuple(
            torch.zeros(self.num_slots, *part.shape[1:], dtype=part.dtype, device=device) for part in self._host
        )
        self.gate_up, self.down = (part.transpose(1, 2) for part in self._held)  # by slot, as products want them
        self.counts, self._device, self._copier = counts, device, copier
        self._slots: OrderedDict[int, int] = OrderedDict()  # by expert, the least recently taken first
        self._free = [*range(self.num_slots)]
        self._arrivals: dict[int, Wait] = {}  # by slot

    def rounds(self, experts: Sequence[int]) -> list[list[int]]:
        """Part a step's experts into rounds that fit, those on the device first."""
        ordered = sorted(experts, key=lambda expert: expert not in self._slots)
        self.counts.num_taken += len(experts)
        self.counts.num_hits += sum(expert in self._slots for expert in experts)
        return [ordered[start : start + self.num_slots] for start in range(0, len(ordered), self.num_slots)]

    def fetch(self, experts: Sequence[int]) -> None:
        """Begin to copy those that are not there, `num_slots` experts at most; the others of them stay meanwhile."""
        assert len(experts) <= self.num_slots
        for expert in experts:
            if expert in self._slots:
                self._slots.move_to_end(expert)  # behind all that may make room
        for expert in experts:
            if expert not in self._slots:
                slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
                self._slots[expert] = slot
                pairs = [(held[slot], host[expert]) for held, host in zip(self._held, self._host, strict=True)]
                self._arrivals[slot] = self._copier.copy(pairs)
                self.counts.num_fetched += 1

    def arrived(self, experts: Sequence[int]) -> torch.Tensor:
        """Wait for a round's experts; return each expert's slot, `num_slots` for all others: int64 [num_experts]."""
        slots = [self.num_slots] * len(self._host[0])
        for expert in experts:
            slots[expert] = slot = self._slots[expert]
            if (wait := self._arrivals.pop(slot, None)) is not None:
                wait()
        return upload_rows(slots, self._device)


def foreseen(rows: torch.Tensor, router: nn.Module, num_active: int) -> torch.Tensor:
    """Return the experts that a later layer's router would put first for these rows: half of what each token takes.

    Hidden states change little from layer to layer (Libra, ICLR 2026). The first of them are nearly always taken, the
    last of them hardly more often than not, and a copy in vain delays others: docs/results/index.md.
    """
    return router(rows).topk(max(1, num_active // 2), dim=-1).indices


def num_tokens_each(chosen: Sequence[torch.Tensor], num_experts: int) -> list[list[int]]:
    """Read back at once how many tokens take each expert, of several choices [num_tokens, any number]."""
    counts = torch.zeros(len(chosen), num_experts, dtype=torch.int64, device=chosen[0].device)
    for row, experts in zip(counts, chosen, strict=True):
        row.scatter_add_(0, experts.flatten(), torch.ones_like(experts.flatten()))
    return counts.tolist()


def likeliest(counts: Sequence[int], num_slots: int) -> list[int]:
    """Return the experts that most tokens take, as many as fit."""
    taken = [expert for expert, count in enumerate(counts) if count]
    return sorted(taken, key=lambda expert: -counts[expert])[:num_slots]
