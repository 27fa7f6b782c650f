"""Drafters for verifiers of another engine: no verifier and no gateway of ours."""

from __future__ import annotations

from typing import Any, Self

from pydantic import model_validator

from outrider.cluster.common.api_keys import KeyOptions
from outrider.cluster.common.security import is_loopback
from outrider.cluster.config.pools_config import PoolsConfig


class DraftersConfig(PoolsConfig):
    """Drafters, their router and their directory, which listens at `grpc_port`; `port` is HTTP's, for metrics.

    `num_verifiers` says how many engines, of `max_num_seqs` requests each, drafters keep sessions for.
    """

    access: KeyOptions
    own_proxy: bool = False  # of Ray Serve, started for this pool at `host`; `outrider drafters` sets it

    def __init__(self, **options: Any) -> None:  # or mypy takes the parts for parameters
        super().__init__(**options)

    @model_validator(mode="after")
    def _check_that_somebody_drafts(self) -> Self:
        if not self.pools:
            raise ValueError("draft_model: nothing would draft")
        return self

    @model_validator(mode="after")
    def _check_links(self) -> Self:
        """Refuse links of other engines beyond this machine that ask nobody who comes."""
        for name, host in (("host", self.host), ("internal_host", self.links.internal_host)):
            if not is_loopback(host) and not self.links.is_closed:
                needed = "add --link-secret-file, which engines give as link_secret_file, or --link-ssl-*"
                raise ValueError(f"{name}: at {host} whoever comes could link to drafters; {needed}")
        return self

    @property
    def is_private(self) -> bool:
        """Whether only this machine's programs reach the HTTP port, as far as a replica can know."""
        return self.own_proxy and is_loopback(self.host)

    @property
    def num_shells(self) -> int:
        """The replicas of all pools at their largest, and the directory."""
        return super().num_shells + 1
