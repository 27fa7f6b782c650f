"""The gRPC interface `outrider.v1.Inference`: translates between protobuf and a gateway."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from outrider import __version__
from outrider.cluster.api.grpc_errors import abort
from outrider.cluster.api.malformed_calls import MalformedCallInterceptor
from outrider.cluster.common.errors import InvalidRequest, OutriderError
from outrider.cluster.common.extras import missing_extra
from outrider.cluster.common.security import bind
from outrider.cluster.gateway.choice import GatewayChunk, Usage
from outrider.cluster.gateway.gateway import Gateway
from outrider.cluster.gateway.request_parser import RequestInput
from outrider.cluster.gateway.structured_format import message_structure
from outrider.cluster.peers.every_gateway import EveryGateway
from outrider.proto import generation_pb2 as pb
from outrider.proto import generation_pb2_grpc
from outrider.verifier_service.messages.request import (
    FinishReason,
    SpeculationMetrics,
    TokenLogprobs,
    TokenOrigin,
)

logger = logging.getLogger(__name__)

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["Inference"].full_name
MAX_MESSAGE_BYTES = 16 << 20
SERVER_OPTIONS: Mapping[str, int] = {
    "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
    "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
    "grpc.keepalive_time_ms": 30_000,
    "grpc.keepalive_timeout_ms": 10_000,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.min_ping_interval_without_data_ms": 10_000,  # clients that ping more often are disconnected
    "grpc.so_reuseport": 0,  # two servers on one port would share its calls unnoticed
}
FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}
TOKEN_ORIGINS = {
    TokenOrigin.ACCEPTED: pb.TOKEN_ORIGIN_ACCEPTED,
    TokenOrigin.RECOVERED: pb.TOKEN_ORIGIN_RECOVERED,
    TokenOrigin.BONUS: pb.TOKEN_ORIGIN_BONUS,
    TokenOrigin.PLAIN: pb.TOKEN_ORIGIN_PLAIN,
}

Context: TypeAlias = grpc.aio.ServicerContext


class InferenceServicer(generation_pb2_grpc.InferenceServicer):
    """The service's calls. A cancelled or expired call stops its generation."""

    def __init__(self, gateway: Gateway, every: EveryGateway) -> None:
        self._gateway, self._every = gateway, every

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateChunk]:
        try:
            valid = await self._gateway.parse(request_input(request))
            warnings = valid.warnings
            async with aclosing(self._gateway.generate(valid)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    yield _chunk_message(chunk, warnings)
                    warnings = ()
        except OutriderError as error:
            await abort(context, error)

    async def GenerateUnary(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        try:
            valid = await self._gateway.parse(request_input(request))
            choices = await self._gateway.whole(valid)
        except OutriderError as error:
            await abort(context, error)
        return _response_message(choices, valid.warnings)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        return pb.AbortResponse(aborted=await self._every.abort(request.request_ids))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        model = self._gateway.model
        return pb.GetModelInfoResponse(
            model_name=model.name,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        parts = self._gateway.batch_dependent
        info = pb.GetServerInfoResponse(
            version=__version__,
            is_draining=self._gateway.is_draining,
            num_running_requests=self._gateway.num_running,
            batch_dependent=parts or (),
        )
        if parts is not None:
            info.is_batch_invariant = not parts
        return info

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        return json_format.ParseDict({"load": self._gateway.load()}, pb.GetLoadsResponse())


def request_input(request: pb.GenerateRequest) -> RequestInput:
    """Read a message; an absent field stays absent: proto3's zero is no default of ours."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("prompt must be given as text or token_ids", "prompt")
    sampling = request.sampling
    return RequestInput(
        request_id=request.request_id or None,
        prompt=request.text if kind == "text" else list(request.token_ids.ids),
        prompt_field=kind,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        logit_bias=dict(sampling.logit_bias),
        bad_words=list(sampling.bad_words),
        **message_structure(sampling, sampling.WhichOneof("structured_output")),
        **_optional_fields(sampling),
        **_optional_fields(request),
    )


def _optional_fields(message: pb.SamplingParams | pb.GenerateRequest) -> dict[str, Any]:
    """Return the `optional` fields that are set; they have the same names in `RequestInput`."""
    names = [
        field.name
        for field in message.DESCRIPTOR.fields
        if field.has_presence and field.message_type is None and field.containing_oneof.name.startswith("_")
    ]
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def _chunk_message(chunk: GatewayChunk, warnings: Sequence[str]) -> pb.GenerateChunk:
    message = pb.GenerateChunk(request_id=chunk.request_id, index=chunk.index, warnings=warnings)
    _fill(message, chunk)
    if chunk.usage is not None:
        message.usage.CopyFrom(_usage_message([chunk.usage]))
    return message


def _response_message(choices: list[GatewayChunk], warnings: Sequence[str]) -> pb.GenerateResponse:
    message = pb.GenerateResponse(
        request_id=choices[0].request_id,
        usage=_usage_message([chunk.usage for chunk in choices if chunk.usage is not None]),
        warnings=warnings,
    )
    for chunk in choices:
        _fill(message.choices.add(index=chunk.index), chunk)
    return message


def _fill(message: pb.GenerateChunk | pb.Choice, chunk: GatewayChunk) -> None:
    """Set the fields that a chunk and a whole choice share."""
    message.text = chunk.text
    message.token_ids.extend(chunk.token_ids)
    message.token_origins.extend([TOKEN_ORIGINS[origin] for origin in chunk.origins])
    if chunk.logprobs:
        message.logprobs.extend(_logprobs_message(entry) for entry in chunk.logprobs)
    if chunk.prompt_logprobs:
        message.prompt_logprobs.extend(
            pb.TokenLogprobs() if entry is None else _logprobs_message(entry) for entry in chunk.prompt_logprobs
        )
    if any(chunk.weight_versions):
        message.weight_versions.extend(
            pb.WeightSpan(version=span.version, start=span.start, end=span.end)
            for span in chunk.weight_spans
            if span.version
        )
    if chunk.finish_reason is not None:
        message.finish_reason = FINISH_REASONS[chunk.finish_reason]
    if chunk.speculation is not None:
        message.speculative_decoding.CopyFrom(_speculation_message(chunk.speculation))


def _logprobs_message(entry: TokenLogprobs) -> pb.TokenLogprobs:
    top = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
    return pb.TokenLogprobs(
        token_id=entry.token_id,
        logprob=entry.logprob,
        rank=entry.rank,
        top=[pb.TopLogprob(token_id=id_, logprob=logprob) for id_, logprob in top],
    )


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
        rejection_sample_method=speculation.acceptance.value,
        is_lossy=speculation.is_lossy,
    )


@dataclass(frozen=True, slots=True)
class RunningGrpcServer:
    """A started server; `port` is the bound port, even if port 0 was requested."""

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
    every: EveryGateway | None = None,
    credentials: grpc.ServerCredentials | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    options: Mapping[str, int] = SERVER_OPTIONS,
) -> RunningGrpcServer:
    """Serve the gateway at `address` ("host:port"), with health and reflection; plaintext without credentials.

    `every`: this gateway and the others; None: it is alone. Raises `RuntimeError` if the address cannot be bound.
    """
    server = grpc.aio.server(interceptors=(*interceptors, MalformedCallInterceptor()), options=list(options.items()))
    every = every or EveryGateway(gateway)
    generation_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(gateway, every), server)
    vllm_names = _add_vllm_engine(every, server)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
    names = (SERVICE_NAME, *vllm_names, health_name, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    port = bind(server, address, credentials)
    for name in ("", *names):
        await health.set(name, health_pb2.HealthCheckResponse.SERVING)
    await server.start()
    return RunningGrpcServer(server, port, health)


def _add_vllm_engine(every: EveryGateway, server: grpc.aio.Server) -> tuple[str, ...]:
    """Serve vLLM's interface if its messages are installed; return its name."""
    if (remedy := missing_extra("vllm-grpc")) is not None:
        logger.warning("the gRPC interface vllm.grpc.engine.VllmEngine is not served: %s", remedy)
        return ()
    from outrider.cluster.api import vllm_grpc

    vllm_grpc.add_to_server(every, server)
    return (vllm_grpc.SERVICE_NAME,)
