"""The address on which the replicas of this node listen."""

from __future__ import annotations

import ray

from outrider.cluster.config.pools_config import LinkOptions


def internal_address(links: LinkOptions) -> str:
    """Return the address of internal ports: the configured one, or with `auto` this node's."""
    return ray.util.get_node_ip_address() if links.internal_host == "auto" else links.internal_host
