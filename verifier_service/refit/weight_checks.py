"""Whether tensors may be weights: finite, and about as large as those that serve.

A trainer that diverges sends NaN; one whose dtype is told wrongly, numbers that are plausible one by one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from outrider.verifier_service.formats.checkpoint import TensorSource, WeightError

# of a matrix's root mean square, from one update to the next, either way; training moves it by a percent. Of matrices
# of 0.3 or less, bfloat16 read as float16 has five times as much or more, and float16 as bfloat16 a hundredth
MAX_FACTOR = 4.0
PART = 1 << 22  # numbers that are squared at a time


class Checked(NamedTuple):
    """What a tensor was found to be."""

    rms: float  # root mean square
    digest: bytes  # of dtype, shape and bytes


class WeightChecks:
    """Knows how large each tensor is that serves, by its name in checkpoints."""

    def __init__(self) -> None:
        self._rms: dict[str, float] = {}

    def check(self, source: TensorSource, names: Iterable[str], first: TensorSource | None) -> dict[str, Checked]:
        """Read tensors of a source; raises `WeightError` naming the first that cannot be a weight.

        `first`: the tensors that served at the start; None: nothing is known of those.
        """
        return {name: self._check(name, source.read(name), first) for name in names}

    def accept(self, checked: Mapping[str, Checked]) -> None:
        """Note that these tensors serve now."""
        self._rms |= {name: found.rms for name, found in checked.items()}

    def _check(self, name: str, tensor: torch.Tensor, first: TensorSource | None) -> Checked:
        rms = rms_of(tensor)
        if not math.isfinite(rms):
            raise WeightError(f"tensor {name!r} has numbers that are not finite{_unsent(tensor)}")
        if name not in self._rms and first is not None and name in first:
            self._rms[name] = rms_of(first.read(name))
        old = self._rms.get(name, 0.0)
        if tensor.dim() > 1 and rms > 0.0 and old > 0.0 and not old / MAX_FACTOR <= rms <= old * MAX_FACTOR:
            raise WeightError(
                f"tensor {name!r} has a root mean square of {rms:.3g}, that of the one that serves is {old:.3g}: "
                f"a wrong dtype, or weights that have diverged"
            )
        return Checked(rms, _digest(tensor))


def rms_of(tensor: torch.Tensor) -> float:
    """Return the root mean square of a tensor's numbers; NaN or infinity if any of them is not finite, 0.0 of none."""
    flat = tensor.detach().flatten()
    total = sum(float(part.to(torch.float64).square().sum()) for part in flat.split(PART))
    return math.sqrt(total / flat.numel()) if flat.numel() and total >= 0.0 else total


def digest_of(checked: Mapping[str, Checked]) -> str:
    """Return a hash of tensors and their names, in hex."""
    whole = hashlib.sha256()
    for name, found in sorted(checked.items()):
        whole.update(f"{name}\n".encode() + found.digest)
    return whole.hexdigest()[:32]


def _unsent(tensor: torch.Tensor) -> str:
    """Say what explains a tensor whose last number is as the room was before anything came."""
    last = tensor.detach().flatten()[-1:].view(torch.uint8)
    return ": the trainer sent fewer bytes than dtypes and shapes say" if bool((last == 0xFF).all()) else ""


def _digest(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().cpu().contiguous()
    found = hashlib.sha256(f"{plain.dtype} {list(plain.shape)}".encode())
    found.update(plain.flatten().view(torch.uint8).numpy().data)
    return found.digest()
