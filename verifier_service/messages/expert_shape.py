"""What the cost model must know of a mixture of experts, and a model's files tell."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """A mixture of experts: a step reads the weights of every expert that one of its tokens is sent to."""

    num_experts: int
    num_active: int  # per token

    def covered_share(self, num_tokens: float) -> float:
        """Return the share of the experts that `num_tokens` are expected to use, each sent anywhere alike."""
        return 1.0 - (1.0 - self.num_active / self.num_experts) ** num_tokens
