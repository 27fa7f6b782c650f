"""What all trainers' endpoints share: gateways, the control of their fleet, and the errors of control calls."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi.responses import JSONResponse

from outrider.cluster.common.errors import InvalidRequest, OutriderError, mapping_of, text_of
from outrider.cluster.gateway.fleet_control import FleetControl, FleetResult
from outrider.cluster.gateway.gateway import Gateway
from outrider.cluster.gateway.learner_control import LearnerControl
from outrider.cluster.peers.every_gateway import EveryGateway

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerDoors:
    """Everything that a trainer's endpoints need."""

    every: EveryGateway
    fleet: FleetControl
    is_healthy: Callable[[], Awaitable[bool]]
    model_path: str
    tensor_parallel_size: int
    learners: LearnerControl

    @property
    def gateway(self) -> Gateway:
        """This one."""
        return self.every.own

    @property
    def dtype(self) -> str | None:
        """Of the weights, as torch names it; None: no verifier has told."""
        return next((report.dtype for report in self.fleet.verifiers if report.dtype), None)


async def outcome(name: str, call: Awaitable[FleetResult]) -> JSONResponse:
    """Await a control call; return SGLang's answer, whose message says what failed."""
    try:
        result = await call
    except OutriderError as error:
        logger.warning("%s failed: %s", name, error)
        content = {"success": False, "message": text_of(error), "num_paused_requests": 0}
        return JSONResponse(content, status_code=mapping_of(error).http_status)
    missing = f"; {result.num_missing_tensors} tensors are missing" if result.num_missing_tensors else ""
    return JSONResponse(
        {
            "success": True,
            "message": f"{name} succeeded; weight version {result.weight_version}{missing}.",
            "num_paused_requests": result.num_requests,
        }
    )


def lease_of(given: object) -> float | None:
    """Return the seconds of a pause's lease; raises `InvalidRequest` for what is none. None: it has none."""
    try:
        lease_s = None if given is None else float(given)  # type: ignore[arg-type]  # what it cannot take it says
    except (TypeError, ValueError):
        lease_s = math.nan
    if lease_s is not None and not 0.0 < lease_s < math.inf:
        raise InvalidRequest("lease_s must be a positive number of seconds", "lease_s")
    return lease_s


def refusal(path: str, reason: str) -> InvalidRequest:
    """Return the error of an endpoint that is not served."""
    return InvalidRequest(f"{path} is not served: {reason}", path)
