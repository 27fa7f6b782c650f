"""The address on which the replicas of this node listen for each other, and what they ask who comes."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import ray
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from outrider.cluster.common.security import is_loopback
from outrider.cluster.config.pools_config import LinkOptions, PoolsConfig
from outrider.verifier_service.cache import cache_folder

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
    return config.with_options(link_secret_file=str(_written(cache_folder() / "links", secret())))


def _written(folder: Path, secret: bytes) -> Path:
    """Return a file of this user's alone that holds the secret; other processes may read it meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha256(secret).hexdigest()[:16]  # this cluster's, of several
    partial = folder / f".{secrets.token_hex(8)}"
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    partial.replace(path)
    return path
