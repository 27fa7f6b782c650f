"""Which control calls an engine's shell takes over its links; imports no gRPC, for configurations name them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from outrider.verifier_service.folders import require_below
from outrider.verifier_service.messages.engine import Control, UpdateDraftWeights, UpdateWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRules:
    """Which calls a link's port takes. Every way that calls come by asks `admit`."""

    is_open: bool = False  # the service is for a trainer
    weights_root: str | None = None  # where folders of weights must lie; None: anywhere

    async def admit(self, message: Control) -> None:
        """Raise `PermissionError` where no trainer is served, `ValueError` for a folder beyond the root."""
        if not self.is_open:
            raise PermissionError("this service is not for rollouts: its engines take no orders over links")
        folder = message.folder if isinstance(message, UpdateWeights | UpdateDraftWeights) else None
        if folder is not None and self.weights_root is not None:
            await asyncio.to_thread(require_below, folder, self.weights_root, "model_path")


NO_ORDERS = ControlRules()
