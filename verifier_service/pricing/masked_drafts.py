"""Drafts by masks: a draft costs its own rows and those of the masks for the next one.

The masks: `verifier_service/scheduling/masks.py`. All rows of a step are counted: with blocks of k masks for every
outcome, a draft of n tokens takes n + (n + 1) k rows. So a request drafts by what it expects to bring per second with
its masks, beside a plain step without any. A probe takes two rounds: a step with masks and no draft yet, and one that
verifies what they have guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from outrider.verifier_service.pricing.cost_model import CostModel, StepShape
from outrider.verifier_service.pricing.probes import PROBE_LENGTH, ProbeBudget
from outrider.verifier_service.scheduling.masks import MaskBlocks


@dataclass(slots=True)
class MaskedDrafts:
    """The length to ask for."""

    blocks: MaskBlocks
    _probing: set[str] = field(default_factory=set)  # requests whose next step has the masks of a probe

    def num_rows(self, length: int) -> int:
        """Return how many rows a draft and the masks behind it take."""
        return length + self.blocks.length * min(length + 1, self.blocks.num_blocks or length + 1)

    def best_length(self, cost: CostModel, base: StepShape, survivals: Sequence[float]) -> int:
        """Return the length that brings most per second; 0: without masks."""
        seconds = cost.seconds_with(base, self.num_rows(len(survivals)))
        tokens = list(accumulate(survivals, initial=float(base.num_tokens)))
        rates = [tokens[0] / seconds[0]]
        rates += [tokens[length] / seconds[self.num_rows(length)] for length in range(1, len(tokens))]
        return rates.index(max(rates))

    def ask_length(
        self,
        request_id: str,
        cost: CostModel,
        base: StepShape,
        survivals: Sequence[float],
        probes: ProbeBudget,
        num_rounds_off: int,
    ) -> int:
        """Return how many tokens to ask for: what pays, else now and then those of a probe, which is charged."""
        length = self.best_length(cost, base, survivals)
        is_probing = request_id in self._probing
        self._probing.discard(request_id)
        if length or not (is_probing or probes.allow(num_rounds_off)):
            return length
        if not is_probing:
            self._probing.add(request_id)
        length = min(PROBE_LENGTH, len(survivals))
        times = cost.seconds_with(base, self.num_rows(length))
        probes.spend(times[-1] - times[0])
        return length

    def forget(self, request_id: str) -> None:
        self._probing.discard(request_id)
