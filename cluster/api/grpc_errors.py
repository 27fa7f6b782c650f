"""Errors as a gRPC call's status, text, retry-after and bad field."""

from __future__ import annotations

from typing import NoReturn

import grpc
from google.rpc import error_details_pb2, status_pb2

from outrider.cluster.common.errors import OutriderError, field_of, mapping_of, retry_after, text_of


async def abort(context: grpc.aio.ServicerContext, error: OutriderError) -> NoReturn:
    """End a call with an error's status, and details in the trailing metadata."""
    status, text = mapping_of(error).grpc_status, text_of(error)
    metadata: list[tuple[str, str | bytes]] = []
    if (seconds := retry_after(error)) is not None:
        metadata.append(("retry-after", seconds))
    if (field := field_of(error)) is not None:
        metadata.append(("grpc-status-details-bin", _bad_field(status, text, field)))
    await context.abort(status, text, trailing_metadata=tuple(metadata))
    raise AssertionError("context.abort returned")


def _bad_field(status: grpc.StatusCode, text: str, field: str) -> bytes:
    """Return google.rpc's rich error, which names the field."""
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=text)
    message = status_pb2.Status(code=status.value[0], message=text)
    message.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    return bytes(message.SerializeToString())
