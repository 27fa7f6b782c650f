"""Which experts committed tokens took: what a step is expected to read of a mixture.

    forward   every mixture layer writes its tokens' experts into this record, on the device
    commit    the rows of committed tokens are added to counts by layer and expert, on the device
    seldom    shares of experts by number of tokens are computed there, and copied to the host meanwhile

Only committed tokens are counted, after their step: so the length of a draft follows from the past alone, and never
from which experts its own tokens would take.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.verifier_service.gpu.transfers import CopyBack, upload_rows

MAX_TOKENS = 2048  # of a recorded step; larger ones are prompts, and are left out
PRIOR_TOKENS = 8.0  # weight of uniform routing
MEMORY_TOKENS = 1024.0  # beyond so many, older ones count half
STEPS_PER_READING = 32
# token counts that shares are computed for; between them they are interpolated
POINTS = (*range(17), 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024)


class ExpertRouting:
    """The experts of the last step's tokens, and how often recent committed tokens took each."""

    def __init__(self, num_layers: int, num_experts: int, num_active: int, device: torch.device) -> None:
        """`num_layers`: those that have experts."""
        self.chosen = torch.zeros(num_layers, MAX_TOKENS, num_active, dtype=torch.int64, device=device)
        self._counts = torch.zeros(num_layers, num_experts, device=device)
        self._points = torch.tensor(POINTS, dtype=torch.float32, device=device)[:, None, None]
        self._uniform, self._device = num_active / num_experts, device
        self._num_tokens, self._num_steps = 0.0, 0
        self._reading: CopyBack | None = None

    def topk(self, layer: int, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's experts, weights first, as `torch.topk` of [num_tokens, num_experts]; keep the experts.

        Written in place: a captured step needs no further launch for it.
        """
        num_tokens, num_active = probs.shape[0], self.chosen.shape[2]
        if num_tokens > MAX_TOKENS:
            return torch.topk(probs, num_active, dim=-1)
        kept = self.chosen[layer, :num_tokens]
        weights = probs.new_empty(num_tokens, num_active)
        return torch.topk(probs, num_active, dim=-1, out=(weights, kept))

    @torch.inference_mode()
    def count(self, tokens: Sequence[int], num_tokens: int) -> NDArray[np.float64] | None:
        """Count the committed ones of the last step's `num_tokens` packed tokens.

        Now and then, return the expected shares of experts that 0, 1, 2 … tokens read, the mean over layers.
        """
        if not tokens or num_tokens > MAX_TOKENS:
            return None
        taken = self.chosen[:, upload_rows(tokens, self._device)].flatten(1)  # [num_layers, len(tokens) * num_active]
        self._counts.scatter_add_(1, taken, self._counts.new_ones(1, 1).expand_as(taken))
        self._num_tokens += len(tokens)
        self._num_steps += 1
        reading, self._reading = self._reading, None
        if self._num_steps % STEPS_PER_READING == 0:
            self._reading = CopyBack(self.shares())
            self._fade()
        return None if reading is None else _interpolated(reading.wait())

    def shares(self) -> torch.Tensor:
        """Return the shares of experts that `POINTS` tokens are expected to read: float32 [num_points].

        With f_e the frequency of expert e, m tokens read 1 - (1 - f_e)^m of it.
        """
        counts = self._counts + PRIOR_TOKENS * self._uniform
        frequencies = (counts / (self._num_tokens + PRIOR_TOKENS)).clamp(max=1.0)
        return 1.0 - ((1.0 - frequencies) ** self._points).mean(dim=(1, 2))

    def _fade(self) -> None:
        if self._num_tokens > MEMORY_TOKENS:
            self._counts.mul_(0.5)
            self._num_tokens *= 0.5


def _interpolated(shares: torch.Tensor) -> NDArray[np.float64]:
    return np.interp(np.arange(POINTS[-1] + 1), POINTS, shares.numpy())
