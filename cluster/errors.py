"""What can go wrong with a request, and how each kind is told to an HTTP and to a gRPC client.

OutriderError                      500  INTERNAL
├── InvalidRequest(field)          400  INVALID_ARGUMENT    the client must change something
│   └── ModelNotFound              404  NOT_FOUND
├── Overloaded(retry_after_s)      503  RESOURCE_EXHAUSTED  try again later
├── Unavailable                    503  UNAVAILABLE         no verifier can serve it now
└── RequestFailed                  500  INTERNAL            it was accepted and did not finish
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc


class OutriderError(Exception):
    """The root of every error that a client is told about; its text is safe to show."""


class InvalidRequest(OutriderError):
    """A request that can never succeed as it stands; `field` is the wire name of what is wrong."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ModelNotFound(InvalidRequest):
    """The request names a model that is not served here."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the model {name!r} does not exist", field="model")


class Overloaded(OutriderError):
    """Refused for load; worth another try after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(OutriderError):
    """No verifier can take the request at the moment."""


class RequestFailed(OutriderError):
    """The request was accepted and the cluster could not finish it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorMapping:
    """One kind of error as the two protocols spell it."""

    http_status: int
    grpc_status: grpc.StatusCode
    openai_type: str
    openai_code: str | None = None


ERROR_MAPPINGS: dict[type[OutriderError], ErrorMapping] = {
    ModelNotFound: ErrorMapping(
        http_status=404,
        grpc_status=grpc.StatusCode.NOT_FOUND,
        openai_type="invalid_request_error",
        openai_code="model_not_found",
    ),
    InvalidRequest: ErrorMapping(
        http_status=400, grpc_status=grpc.StatusCode.INVALID_ARGUMENT, openai_type="invalid_request_error"
    ),
    Overloaded: ErrorMapping(
        http_status=503,
        grpc_status=grpc.StatusCode.RESOURCE_EXHAUSTED,
        openai_type="overloaded_error",
        openai_code="overloaded",
    ),
    Unavailable: ErrorMapping(
        http_status=503,
        grpc_status=grpc.StatusCode.UNAVAILABLE,
        openai_type="service_unavailable_error",
        openai_code="unavailable",
    ),
    RequestFailed: ErrorMapping(
        http_status=500, grpc_status=grpc.StatusCode.INTERNAL, openai_type="server_error", openai_code="request_failed"
    ),
    OutriderError: ErrorMapping(http_status=500, grpc_status=grpc.StatusCode.INTERNAL, openai_type="server_error"),
}


def mapping_of(error: OutriderError) -> ErrorMapping:
    """Return the table's row for an error: that of its own class, else of the nearest base class."""
    return next(ERROR_MAPPINGS[kind] for kind in type(error).__mro__ if kind in ERROR_MAPPINGS)
