"""Errors of a request, and their HTTP and gRPC status.

OutriderError                      500  INTERNAL
├── InvalidRequest(field)          400  INVALID_ARGUMENT    the client must change something
│   ├── ModelNotFound              404  NOT_FOUND
│   ├── ResponseNotFound           404  NOT_FOUND
│   ├── ContextTooLong             400  INVALID_ARGUMENT    agents shorten their history
│   ├── BodyTooLarge               413  INVALID_ARGUMENT
│   ├── BodyTooSlow                408  INVALID_ARGUMENT
│   └── NotJson                    415  INVALID_ARGUMENT
├── Conflict                       409  ABORTED             something else goes on that it cannot run beside
├── Unauthenticated                401  UNAUTHENTICATED     no API key, or not a known one
├── Forbidden                      403  PERMISSION_DENIED   it needs an admin's key, or comes from a foreign page
├── Overloaded(retry_after_s)      429  RESOURCE_EXHAUSTED  a queue is at its limit: try again later
├── Unavailable(retry_after_s)     503  UNAVAILABLE         no verifier can serve it now
└── RequestFailed                  500  INTERNAL            it was accepted, but did not finish
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import grpc

MAX_TEXT_CHARS = 1000  # an error may quote what the client sent


class OutriderError(Exception):
    """The base of all errors that clients see; the text is safe to show."""


class InvalidRequest(OutriderError):
    """The request can never succeed; `field` is the bad field's name on the wire."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


def require_field(condition: bool, field: str, expectation: str) -> None:
    """Raise `InvalidRequest` naming a field, unless the condition holds."""
    if not condition:
        raise InvalidRequest(f"{field} must be {expectation}", field)


class ModelNotFound(InvalidRequest):
    """The request names a model that is not served here."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the model {name!r} does not exist", field="model")


class ResponseNotFound(InvalidRequest):
    """The request names a response, or an item of one, that is not stored here."""

    def __init__(self, response_id: str, field: str | None = None) -> None:
        super().__init__(f"{response_id!r} is not stored here", field)


class ContextTooLong(InvalidRequest):
    """The prompt and one token of output do not fit the model; agents look for these words."""

    def __init__(self, max_model_len: int, found: str, field: str) -> None:
        super().__init__(
            f"{field}: this model's maximum context length is {max_model_len} tokens, with at least one of output; "
            f"the prompt has {found}",
            field,
        )


class BodyTooLarge(InvalidRequest):
    """The request's body is longer than the server reads."""


class BodyTooSlow(InvalidRequest):
    """The request's body did not arrive in time."""


class NotJson(InvalidRequest):
    """The request's body is not declared as JSON."""


class Conflict(OutriderError):
    """The request cannot run beside another one that goes on; after that it may be tried again."""


class Unauthenticated(OutriderError):
    """The request has no known API key."""


class Forbidden(OutriderError):
    """The request may not do this: it shows no admin's key, or comes from a page of somebody else."""


class Overloaded(OutriderError):
    """The request was refused for load; retry after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(OutriderError):
    """No verifier can take the request now; retry after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestFailed(OutriderError):
    """The request was accepted, and the cluster could not finish it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorMapping:
    """One class of errors in both protocols."""

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
    ResponseNotFound: ErrorMapping(
        http_status=404,
        grpc_status=grpc.StatusCode.NOT_FOUND,
        openai_type="invalid_request_error",
        openai_code="response_not_found",
    ),
    ContextTooLong: ErrorMapping(
        http_status=400,
        grpc_status=grpc.StatusCode.INVALID_ARGUMENT,
        openai_type="invalid_request_error",
        openai_code="context_length_exceeded",
    ),
    BodyTooLarge: ErrorMapping(
        http_status=413,
        grpc_status=grpc.StatusCode.INVALID_ARGUMENT,
        openai_type="invalid_request_error",
        openai_code="body_too_large",
    ),
    BodyTooSlow: ErrorMapping(
        http_status=408,
        grpc_status=grpc.StatusCode.INVALID_ARGUMENT,
        openai_type="invalid_request_error",
        openai_code="body_too_slow",
    ),
    NotJson: ErrorMapping(
        http_status=415,
        grpc_status=grpc.StatusCode.INVALID_ARGUMENT,
        openai_type="invalid_request_error",
        openai_code="not_json",
    ),
    InvalidRequest: ErrorMapping(
        http_status=400, grpc_status=grpc.StatusCode.INVALID_ARGUMENT, openai_type="invalid_request_error"
    ),
    Conflict: ErrorMapping(
        http_status=409,
        grpc_status=grpc.StatusCode.ABORTED,
        openai_type="invalid_request_error",
        openai_code="conflict",
    ),
    Unauthenticated: ErrorMapping(
        http_status=401,
        grpc_status=grpc.StatusCode.UNAUTHENTICATED,
        openai_type="authentication_error",
        openai_code="invalid_api_key",
    ),
    Forbidden: ErrorMapping(
        http_status=403,
        grpc_status=grpc.StatusCode.PERMISSION_DENIED,
        openai_type="permission_error",
        openai_code="forbidden",
    ),
    Overloaded: ErrorMapping(
        http_status=429,
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
    """Return the mapping of an error's class, else of its nearest base class."""
    return next(ERROR_MAPPINGS[kind] for kind in type(error).__mro__ if kind in ERROR_MAPPINGS)


def text_of(error: OutriderError) -> str:
    """Return the client's text, shortened: it may quote the client's input."""
    text = str(error)
    return text if len(text) <= MAX_TEXT_CHARS else text[:MAX_TEXT_CHARS] + "…"


def field_of(error: OutriderError) -> str | None:
    """Return the bad field's name on the wire, if there is one."""
    return error.field[:MAX_TEXT_CHARS] if isinstance(error, InvalidRequest) and error.field is not None else None


def retry_after(error: OutriderError) -> str | None:
    """Return the value of Retry-After in whole seconds, if it is known."""
    if isinstance(error, Overloaded | Unavailable):
        return str(max(1, math.ceil(error.retry_after_s)))
    return None
