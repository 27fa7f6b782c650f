"""The shape of a mixture of experts, for the cost model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """A mixture of experts; a step reads the weights of every expert that one of its tokens is routed to."""

    num_experts: int
    num_active: int  # per token

    def uniform_share(self, num_tokens: int) -> float:
        """Return the expected share of experts that `num_tokens` take, if routing is uniform."""
        return 1.0 - (1.0 - self.num_active / self.num_experts) ** num_tokens
