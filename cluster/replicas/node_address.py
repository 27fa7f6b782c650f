"""The address on which the replicas of this node listen for each other, and what they ask who comes."""

from __future__ import annotations

import atexit
import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import ray
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from outrider.cluster.common.security import is_loopback
from outrider.cluster.config.pools_config import LinkOptions, PoolsConfig

NAMESPACE, KEY = b"outrider", b"link secret"
_Config = TypeVar("_Config", bound=PoolsConfig)


def internal_address(links: LinkOptions) -> str:
    """Return the address of internal ports: the configured one, or with `auto` this node's."""
    return ray.util.get_node_ip_address() if links.internal_host == "auto" else links.internal_host


def cluster_secret() -> bytes:
    """Return the secret that Ray's control plane keeps for all replicas; the first that asks draws it."""
    _internal_kv_put(KEY, secrets.token_hex(32).encode(), overwrite=False, namespace=NAMESPACE)
    return _internal_kv_get(KEY, namespace=NAMESPACE)


def with_closed_links(config: _Config, secret: Callable[[], bytes] = cluster_secret) -> _Config:
    """Return a configuration whose links ask who comes, if programs of other machines reach them.

    Without TLS and without a file they show the cluster's `secret`: who reaches Ray's control plane, which keeps it,
    can run programs on every node anyway.
    """
    if config.links.is_closed or is_loopback(internal_address(config.links)):
        return config
    return config.with_options(link_secret_file=_written(secret()))


def _written(secret: bytes) -> str:
    """Write the secret to a file of this user's alone, which lasts as long as this process; return its path."""
    number, path = tempfile.mkstemp(prefix="outrider-link-")
    with os.fdopen(number, "wb") as file:
        file.write(secret)
    atexit.register(Path(path).unlink, missing_ok=True)
    return path
