"""Errors in Anthropic's form, and which paths have it."""

from __future__ import annotations

from typing import Any

from outrider.cluster.common.errors import ContextTooLong, OutriderError, mapping_of, text_of
from outrider.cluster.common.logs import request_id

PATH = "/v1/messages"  # and all below it
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def is_messages_path(path: str) -> bool:
    """Return whether a path is the Messages API's."""
    return path == PATH or path.startswith(f"{PATH}/")


def error_object(error: OutriderError) -> dict[str, Any]:
    """Render an error as Anthropic does."""
    text = text_of(error)
    if isinstance(error, ContextTooLong):  # the words by which agents know that they must shorten their history
        text = f"prompt is too long: {text}"
    return status_object(mapping_of(error).http_status, text)


def status_object(status: int, message: str) -> dict[str, Any]:
    """Render an error of an HTTP status."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id.get()}
