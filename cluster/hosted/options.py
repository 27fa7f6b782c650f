"""The plug-in's options, an object in the other engine's configuration."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from outrider.cluster.common.security import LinkTls
from outrider.verifier_service.messages.draft import FINAL_TAP


class PluginOptions(LinkTls):
    """The pool's address, and how to draft. Raises `ValueError` naming the field."""

    pool: str  # "host:port" of `outrider drafters`
    # who decides how much: prices and the router; always: the engine's longest draft, each
    speculation: Literal["auto", "always"] = "auto"
    max_wait_ms: Annotated[float, Field(gt=0, le=10_000)] = 100.0  # the longest that a step waits for drafts
    draft_seeded: bool = False  # draft for seeded requests, too: their tokens then depend on the drafts
    # a pool that learns may learn from requests that say "store": true; all: from those that say nothing, too
    learn: bool | Literal["all"] = False
    # layers whose inputs the pool's heads read; -1: what the output embedding sees
    state_taps: tuple[Annotated[int, Field(ge=FINAL_TAP)], ...] = ()

    @model_validator(mode="after")
    def _check_pool(self) -> Self:
        host, _, port = self.pool.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise ValueError(f'pool must be "host:port", not {self.pool!r}')
        return self
