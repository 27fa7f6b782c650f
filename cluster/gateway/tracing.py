"""OpenTelemetry traces of requests: four levels of spans.

    request                  the gateway, from accepting a prompt to its last chunk
      verifier.generate      one choice, failover included
        verifier.step        the step that committed some of its tokens, by the verifier's clock
          draft.round        from asking the drafter to the arrival of the draft that this step verified

A request span is a child of the client's W3C `traceparent`. Verifiers export nothing: they report a traced request's
step times with its tokens. A request that is not sampled has no `trace_parent`, and costs verifiers nothing. No
attribute holds a prompt or generated text. Needs the extra `otlp`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

import grpc
from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.cluster.common.errors import OutriderError
from outrider.verifier_service.messages.request import GenerationRequest, RequestOutput, StepTiming

if TYPE_CHECKING:
    from outrider.cluster.gateway.choice import Backend, GatewayChunk
    from outrider.cluster.gateway.request_parser import ValidRequest

EXPORT_TIMEOUT_S = 2  # an unreachable collector must not delay a stopping gateway
TRACE_PARENT = "traceparent"
TRACE_HEADERS = frozenset({TRACE_PARENT, "tracestate"})

_propagator = TraceContextTextMapPropagator()


def otlp_provider(endpoint: str, *, sample_ratio: float, replica: str) -> TracerProvider:
    """Return a provider that sends spans to a collector by OTLP over gRPC, unencrypted for an http:// endpoint.

    The client's sampling decision holds; of requests without one, `sample_ratio` is traced.
    """
    provider = TracerProvider(
        resource=Resource.create({"service.name": "outrider", "service.instance.id": replica}),
        sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=EXPORT_TIMEOUT_S)))
    return provider


class Tracing:
    """A gateway's spans."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("outrider")

    def backend(self, inner: Backend) -> Backend:
        """Return `inner`, traced."""
        return TracedBackend(inner, self._tracer)

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Return an application whose request spans are children of the HTTP client's."""
        return TraceContextMiddleware(app)

    def interceptor(self) -> grpc.aio.ServerInterceptor:
        """Return an interceptor that does the same for gRPC calls."""
        return TraceContextInterceptor()

    async def request(
        self, request: ValidRequest, generate: Callable[[ValidRequest], AsyncIterator[GatewayChunk]]
    ) -> AsyncIterator[GatewayChunk]:
        """Yield the chunks of `generate` within a span; its parent is the current task's context."""
        span = self._tracer.start_span("request", kind=SpanKind.SERVER, attributes=_request_attributes(request))
        num_tokens = 0
        reasons: list[str] = []
        try:
            message = dataclasses.replace(request.message, trace_parent=_trace_parent(span))
            traced = dataclasses.replace(request, message=message)
            async with aclosing(generate(traced)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    num_tokens += len(chunk.token_ids)
                    reasons += [chunk.finish_reason.value] if chunk.finish_reason is not None else []
                    yield chunk
        except OutriderError as error:
            _fail(span, error)
            raise
        finally:
            span.set_attribute("gen_ai.usage.output_tokens", num_tokens)
            span.set_attribute("gen_ai.response.finish_reasons", reasons)
            span.end()

    def close(self) -> None:
        """Export the remaining spans; waits for the collector for at most some seconds."""
        self._provider.shutdown()


class TracedBackend:
    """A backend whose generations are spans, each with a child per step."""

    def __init__(self, inner: Backend, tracer: trace.Tracer) -> None:
        self._inner = inner
        self._tracer = tracer

    async def generate(self, request: GenerationRequest, hear: Callable[[RequestOutput], None]) -> None:
        """Pass a request's outputs on; without a `trace_parent`, it is not traced."""
        if request.trace_parent is None:
            await self._inner.generate(request, hear)
        else:
            await self._traced(request, hear)

    async def _traced(self, request: GenerationRequest, hear: Callable[[RequestOutput], None]) -> None:
        span = self._tracer.start_span(
            "verifier.generate",
            context=_propagator.extract({TRACE_PARENT: request.trace_parent or ""}),
            kind=SpanKind.CLIENT,
            attributes={"outrider.choice_index": request.sampling.choice_index},
        )
        num_tokens = num_accepted_tokens = 0

        def note(output: RequestOutput) -> None:
            nonlocal num_tokens, num_accepted_tokens
            num_tokens += len(output.token_ids)
            num_accepted_tokens += output.num_accepted_tokens
            if output.timing is not None:
                self._step(span, output, output.timing)
            hear(output)

        try:
            await self._inner.generate(dataclasses.replace(request, trace_parent=_trace_parent(span)), note)
        except OutriderError as error:
            _fail(span, error)
            raise
        finally:
            span.set_attribute("gen_ai.usage.output_tokens", num_tokens)
            span.set_attribute("outrider.num_accepted_tokens", num_accepted_tokens)
            span.end()

    def _step(self, parent: Span, output: RequestOutput, timing: StepTiming) -> None:
        step = self._tracer.start_span(
            "verifier.step",
            context=trace.set_span_in_context(parent),
            start_time=_ns(timing.began_s),
            attributes={
                "outrider.num_scheduled_tokens": timing.num_scheduled_tokens,  # of the whole batch
                "outrider.num_tokens": len(output.token_ids),
                "outrider.num_draft_tokens": output.num_draft_tokens,
                "outrider.num_accepted_tokens": output.num_accepted_tokens,
            },
        )
        if timing.draft_asked_s is not None and timing.draft_received_s is not None:
            draft = self._tracer.start_span(
                "draft.round",
                context=trace.set_span_in_context(step),
                start_time=_ns(timing.draft_asked_s),
                attributes={
                    "outrider.drafter_id": timing.drafter_id or "",
                    "outrider.num_draft_tokens": output.num_draft_tokens,
                },
            )
            draft.end(_ns(timing.draft_received_s))
        step.end(_ns(timing.ended_s))


class TraceContextMiddleware:
    """Attach the HTTP client's trace context to the request's task."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope.get("headers", ())}
        token = context.attach(_extracted(headers))
        try:
            await self._app(scope, receive, send)
        finally:
            context.detach(token)


class TraceContextInterceptor(grpc.aio.ServerInterceptor):
    """Attach the trace context of a gRPC call's metadata to the call's task."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        context.attach(_extracted(dict(handler_call_details.invocation_metadata)))  # until the task ends
        return await continuation(handler_call_details)


def _extracted(headers: dict[str, str | bytes]) -> context.Context:
    given = {name: value for name, value in headers.items() if name in TRACE_HEADERS and isinstance(value, str)}
    return _propagator.extract(given)


def _request_attributes(request: ValidRequest) -> dict[str, str | int]:
    return {
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.n": request.n,
        "gen_ai.request.max_tokens": request.sampling.max_tokens,
        "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
    }


def _trace_parent(span: Span) -> str | None:
    """Return a span's `traceparent`; None: it is not sampled."""
    if not span.is_recording():
        return None
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(span))
    return carrier[TRACE_PARENT]


def _fail(span: Span, error: OutriderError) -> None:
    span.set_status(Status(StatusCode.ERROR, type(error).__name__))  # the class alone: the text may quote the request


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
