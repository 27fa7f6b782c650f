"""What a step reads of a mixture of experts, by its number of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.verifier_service.messages.expert_shape import ExpertShape

MAX_TOKENS = 1024  # a larger step is expected to read as much


@dataclass(slots=True)
class ExpertsRead:
    """The expected share of experts; all levels of load have this one, since tokens are routed alike at any load."""

    shape: ExpertShape
    shares: list[float] = field(init=False)  # by number of tokens, from 0 on

    def __post_init__(self) -> None:
        self.shares = [self.shape.uniform_share(count) for count in range(MAX_TOKENS + 1)]

    def share(self, num_tokens: int) -> float:
        """Return the share that so many tokens read."""
        return self.shares[min(num_tokens, len(self.shares) - 1)]
