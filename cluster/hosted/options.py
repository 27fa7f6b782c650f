"""The plug-in's options, an object in the other engine's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from outrider.cluster.common.hints import did_you_mean
from outrider.cluster.common.option_values import typed_value
from outrider.cluster.common.security import link_tls
from outrider.verifier_service.links.grpc_channel import LinkCredentials
from outrider.verifier_service.messages.draft import FINAL_TAP


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginOptions:
    """The pool's address, and how to draft. Raises `ValueError` naming the field."""

    pool: str  # "host:port" of `outrider drafters`
    speculation: str = "auto"  # auto: price and router set the length; always: the engine's longest draft
    max_wait_ms: float = 100.0  # longest wait of a step for drafts
    draft_seeded: bool = False  # also draft for seeded requests, whose tokens then depend on the drafts
    state_taps: tuple[int, ...] = ()  # layers whose inputs the pool's heads read; -1: the output embedding's
    link_ssl_certfile: str | None = None
    link_ssl_keyfile: str | None = None
    link_ssl_ca_certs: str | None = None
    link_ssl_server_name: str | None = None

    def __post_init__(self) -> None:
        host, _, port = self.pool.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise ValueError(f'pool must be "host:port", not {self.pool!r}')
        if self.speculation not in ("auto", "always"):
            raise ValueError("speculation must be auto or always")
        if not 0.0 < self.max_wait_ms <= 10_000.0:
            raise ValueError("max_wait_ms must be in (0, 10000]")
        if any(tap < FINAL_TAP for tap in self.state_taps):
            raise ValueError(f"state_taps must be layers, or {FINAL_TAP}")
        link_tls(self.link_ssl_certfile, self.link_ssl_keyfile, self.link_ssl_ca_certs)  # refuses an incomplete set

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> PluginOptions:
        """Build from plain values; an error names an unknown key's closest match."""
        kinds = get_type_hints(cls)
        for key in values:
            if key not in kinds:
                raise ValueError(f"unknown option {key!r}{did_you_mean(str(key), kinds)}")
        if "pool" not in values:
            raise ValueError('pool is missing: "host:port" of the pool that `outrider drafters` serves')
        return cls(**{key: typed_value(key, value, kinds[key]) for key, value in values.items()})

    @property
    def credentials(self) -> LinkCredentials | None:
        tls = link_tls(self.link_ssl_certfile, self.link_ssl_keyfile, self.link_ssl_ca_certs)
        return None if tls is None else tls.link_credentials(self.link_ssl_server_name)
