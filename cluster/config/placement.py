"""What a replica of a pool asks of the cluster: resource bundles, and labels of the nodes that they may be on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RANK_CPUS = 0.5  # what Ray reserves for a rank: the default pair must fit on the two cores of a small machine
LEARNER_CPUS = 0.01  # of a learner's process, which runs where nothing else does; Ray takes no bundle without any
SHELL_CPUS = 0.1  # gateways, routers and the shells of engines wait for I/O


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlacement:
    """One replica: a shell and its ranks on one node, because ranks meet through Unix sockets."""

    num_ranks: int
    gpus_per_rank: float = 0.0
    cpus_per_rank: float = RANK_CPUS
    resources: Mapping[str, float] = field(default_factory=dict)  # custom Ray resources, once per replica
    labels: Mapping[str, str] = field(default_factory=dict)  # Ray label selector of its node

    @property
    def serve_options(self) -> dict[str, Any]:
        """Return the options of Serve's `deployment` that place a replica; bundle 0 is the shell's."""
        rank = {"CPU": self.cpus_per_rank} | ({"GPU": self.gpus_per_rank} if self.gpus_per_rank else {})
        options: dict[str, Any] = {
            "placement_group_bundles": [{"CPU": SHELL_CPUS, **self.resources}, *[rank] * self.num_ranks],
            "placement_group_strategy": "STRICT_PACK",
        }
        if self.labels:
            options["placement_group_bundle_label_selector"] = [dict(self.labels)]
        return options
