"""What an operator configures of a pool alone: drafters for verifiers of other engines, without any of ours."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cluster.config.service_config import ServiceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftersConfig(ServiceConfig):
    """Drafters, their router and their directory, which listens at `grpc_port`; `port` is HTTP's, for metrics.

    `num_verifiers` says how many engines, of `max_num_seqs` requests each, drafters keep sessions for. Raises
    `ValueError` naming the field.
    """

    def __post_init__(self) -> None:
        ServiceConfig.__post_init__(self)  # `super()` does not know a class with slots
        if not self.pools:
            raise ValueError("draft_model: nothing would draft")

    @property
    def num_ranks(self) -> int:
        """Return the ranks of all pools at their largest."""
        return sum(pool.drafter_range.most * pool.draft_tensor_parallel_size for pool in self.pools.values())

    @property
    def num_shells(self) -> int:
        """Return the replicas of all pools at their largest, and the directory."""
        return sum(pool.drafter_range.most for pool in self.pools.values()) + 1
