"""What a step reads of a mixture of experts, by its number of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from outrider.verifier_service.messages.expert_shape import ExpertShape

MAX_TOKENS = 1024  # a larger step is expected to read as much


@dataclass(slots=True)
class ExpertsRead:
    """The expected share of experts; all levels of load have this one, since tokens are routed alike at any load."""

    shape: ExpertShape
    shares: NDArray[np.float64] = field(init=False, compare=False)  # by number of tokens, from 0 on

    def __post_init__(self) -> None:
        self.shares = np.array([self.shape.uniform_share(count) for count in range(MAX_TOKENS + 1)])

    def share(self, num_tokens: ArrayLike) -> NDArray[np.float64]:
        """Return the share that so many tokens read."""
        return self.shares[np.minimum(num_tokens, len(self.shares) - 1)]
