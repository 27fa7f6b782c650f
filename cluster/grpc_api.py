"""The gRPC interface `outrider.v1.Inference`: a thin shell that translates between protobuf and a gateway."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from outrider.cluster.errors import InvalidRequest, OutriderError, Overloaded, mapping_of
from outrider.cluster.gateway import Gateway, GatewayChunk, RequestInput, Usage
from outrider.proto import generation_pb2 as pb
from outrider.proto import generation_pb2_grpc
from outrider.verifier_service.request import FinishReason, SpeculationMetrics

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["Inference"].full_name
MAX_MESSAGE_BYTES = 16 << 20
MAX_REQUEST_ID_CHARS = 128
SERVER_OPTIONS: Mapping[str, int] = {
    "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
    "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
    "grpc.keepalive_time_ms": 30_000,
    "grpc.keepalive_timeout_ms": 10_000,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.min_ping_interval_without_data_ms": 10_000,  # clients that ping more often are sent away
    "grpc.so_reuseport": 0,  # two servers on one port would share its calls unnoticed
}
FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}
OPTIONAL_FIELDS = (  # the same in the message and in RequestInput
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "max_tokens",
    "ignore_eos",
    "n",
    "num_speculative_tokens",
    "disable_spec_decode",
)

Context: TypeAlias = grpc.aio.ServicerContext


class InferenceServicer(generation_pb2_grpc.InferenceServicer):
    """The four calls of the service. A cancelled call, or one past its deadline, stops its generation."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateChunk]:
        try:
            async with aclosing(self._chunks(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    yield _chunk_message(chunk)
        except OutriderError as error:
            await _abort(context, error)

    async def GenerateUnary(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        choices: dict[int, list[GatewayChunk]] = {}
        try:
            async with aclosing(self._chunks(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    choices.setdefault(chunk.index, []).append(chunk)
        except OutriderError as error:
            await _abort(context, error)
        return _response_message([choices[index] for index in sorted(choices)])

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        return pb.AbortResponse(aborted=[id_ for id_ in request.request_ids if self._gateway.abort(id_)])

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        model = self._gateway.model
        return pb.GetModelInfoResponse(
            model_name=model.name,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
        )

    def _chunks(self, request: pb.GenerateRequest) -> AsyncIterator[GatewayChunk]:
        return self._gateway.generate(self._gateway.parse(request_input(request)))


def request_input(request: pb.GenerateRequest) -> RequestInput:
    """Read a message; absent fields stay absent, since proto3's zero is not a default."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("prompt must be given as text or token_ids", "prompt")
    if len(request.request_id) > MAX_REQUEST_ID_CHARS:
        raise InvalidRequest(f"request_id must be at most {MAX_REQUEST_ID_CHARS} characters", "request_id")
    sampling = request.sampling
    fields: dict[str, Any] = {name: getattr(sampling, name) for name in OPTIONAL_FIELDS if sampling.HasField(name)}
    return RequestInput(
        request_id=request.request_id or None,
        prompt=request.text if kind == "text" else list(request.token_ids.ids),
        prompt_field=kind,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        **fields,
    )


def _chunk_message(chunk: GatewayChunk) -> pb.GenerateChunk:
    message = pb.GenerateChunk(
        request_id=chunk.request_id, index=chunk.index, text=chunk.text, token_ids=chunk.token_ids
    )
    if chunk.finish_reason is not None:
        message.finish_reason = FINISH_REASONS[chunk.finish_reason]
    if chunk.usage is not None:
        message.usage.CopyFrom(_usage_message([chunk.usage]))
    if chunk.speculation is not None:
        message.speculative_decoding.CopyFrom(_speculation_message(chunk.speculation))
    return message


def _response_message(choices: list[list[GatewayChunk]]) -> pb.GenerateResponse:
    usages = [chunks[-1].usage for chunks in choices]
    return pb.GenerateResponse(
        request_id=choices[0][0].request_id,
        choices=[_choice_message(chunks) for chunks in choices],
        usage=_usage_message([usage for usage in usages if usage is not None]),
    )


def _choice_message(chunks: list[GatewayChunk]) -> pb.Choice:
    last = chunks[-1]
    message = pb.Choice(
        index=last.index,
        text="".join(chunk.text for chunk in chunks),
        token_ids=[token_id for chunk in chunks for token_id in chunk.token_ids],
    )
    if last.finish_reason is not None:
        message.finish_reason = FINISH_REASONS[last.finish_reason]
    if last.speculation is not None:
        message.speculative_decoding.CopyFrom(_speculation_message(last.speculation))
    return message


def _usage_message(usages: list[Usage]) -> pb.Usage:
    """Sum the output of one prompt's choices; the prompt counts once."""
    return pb.Usage(
        prompt_tokens=usages[0].num_prompt_tokens,
        completion_tokens=sum(usage.num_completion_tokens for usage in usages),
        cached_tokens=usages[0].num_cached_tokens,
    )


def _speculation_message(speculation: SpeculationMetrics) -> pb.SpeculativeDecodingMetrics:
    return pb.SpeculativeDecodingMetrics(
        enabled=speculation.enabled,
        disabled_reason=speculation.disabled_reason or "",
        mean_acceptance_length=speculation.mean_acceptance_length,
        draft_acceptance_rate=speculation.draft_acceptance_rate,
        num_drafts=speculation.num_drafts,
        num_draft_tokens=speculation.num_draft_tokens,
        num_accepted_tokens=speculation.num_accepted_tokens,
    )


async def _abort(context: Context, error: OutriderError) -> NoReturn:
    metadata: tuple[tuple[str, str], ...] = ()
    if isinstance(error, Overloaded):
        metadata = (("retry-after", str(max(1, math.ceil(error.retry_after_s)))),)
    await context.abort(mapping_of(error).grpc_status, str(error), trailing_metadata=metadata)
    raise AssertionError("context.abort returned")


@dataclass(frozen=True, slots=True)
class RunningGrpcServer:
    """A server that has started; `port` is the one that was bound, of interest when port 0 was asked for."""

    server: grpc.aio.Server
    port: int
    health: health_aio.HealthServicer

    async def drain(self, grace_s: float) -> None:
        """Answer NOT_SERVING, refuse new calls, give running ones `grace_s`, then stop."""
        await self.health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


async def start_grpc_server(
    gateway: Gateway,
    address: str,
    *,
    credentials: grpc.ServerCredentials | None = None,
    options: Mapping[str, int] = SERVER_OPTIONS,
) -> RunningGrpcServer:
    """Serve the gateway at `address` ("host:port"), with health and reflection; plaintext without credentials.

    Raises `RuntimeError` when the address cannot be bound.
    """
    server = grpc.aio.server(options=list(options.items()))
    generation_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(gateway), server)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = (SERVICE_NAME, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    port = _bind(server, address, credentials)
    for name in ("", SERVICE_NAME):
        await health.set(name, health_pb2.HealthCheckResponse.SERVING)
    await server.start()
    return RunningGrpcServer(server, port, health)


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    if credentials is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, credentials)
