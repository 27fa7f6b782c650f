from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc
import pytest
from httpx import ASGITransport, AsyncClient
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from prometheus_client import CollectorRegistry
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from outrider.cluster.common.errors import Unavailable
from outrider.cluster.gateway.gateway import Gateway
from outrider.cluster.gateway.request_parser import ModelInfo, RequestInput
from outrider.cluster.gateway.tracing import Tracing
from outrider.cluster.monitoring.metrics import GatewayMetrics
from outrider.verifier_service.messages.request import FinishReason, GenerationRequest, RequestOutput, StepTiming
from support.clock import Clock

PROMPT = (5, 6, 7)
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-01", f"00-{TRACE_ID}-{PARENT_ID}-00"
STEPS = (
    StepTiming(began_s=100.0, ended_s=100.5, num_scheduled_tokens=3),
    StepTiming(
        began_s=101.0,
        ended_s=101.25,
        num_scheduled_tokens=9,
        drafter_id="d0",
        draft_asked_s=100.5,
        draft_received_s=100.75,
    ),
)


class TimedBackend:
    """A plain step, then one that accepts two of three draft tokens; a verifier's times only for traced requests."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.requests: list[GenerationRequest] = []
        self._failure = failure

    async def generate(self, request: GenerationRequest, hear: Callable[[RequestOutput], None]) -> None:
        self.requests.append(request)
        if self._failure is not None:
            raise self._failure
        first, second = STEPS if request.trace_parent is not None else (None, None)
        hear(RequestOutput(request_id=request.request_id, token_ids=(8,), timing=first))
        hear(
            RequestOutput(
                request_id=request.request_id,
                token_ids=(8, 9, 10),
                num_draft_tokens=3,
                num_accepted_tokens=2,
                finish_reason=FinishReason.LENGTH,
                timing=second,
            )
        )


class Scene:
    """A traced gateway over a backend, and what it exported."""

    def __init__(self, tokenizer, *, sample_ratio: float = 1.0, failure: Exception | None = None) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(sample_ratio)))
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(provider)
        self.backend = TimedBackend(failure)
        model = ModelInfo(name="tiny", max_model_len=64, vocab_size=len(tokenizer), eos_token_ids=(), created=0)
        metrics = GatewayMetrics(CollectorRegistry(), model_name="tiny")
        self.gateway = Gateway(model, tokenizer, self.backend, metrics, Clock(tick_s=1.0), tracing=self.tracing)

    async def run(self, **fields) -> None:
        request = await self.gateway.parse(RequestInput(prompt=PROMPT, request_id="r", max_tokens=9, **fields))
        async for _ in self.gateway.generate(request):
            pass

    def spans(self, name: str) -> Sequence[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def all_spans(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()


@pytest.fixture
def scene(tokenizer) -> Scene:
    return Scene(tokenizer)


async def test_spans_nest_from_the_request_to_its_draft_rounds(scene: Scene):
    await scene.run()
    (request,), (generate,) = scene.spans("request"), scene.spans("verifier.generate")
    steps, (draft,) = scene.spans("verifier.step"), scene.spans("draft.round")
    assert request.parent is None
    assert generate.parent.span_id == request.context.span_id
    assert [step.parent.span_id for step in steps] == [generate.context.span_id] * 2
    assert draft.parent.span_id == steps[1].context.span_id
    assert len({span.context.trace_id for span in scene.all_spans()}) == 1
    (message,) = scene.backend.requests
    ids = f"00-{generate.context.trace_id:032x}-{generate.context.span_id:016x}"
    assert message.trace_parent.rpartition("-")[0] == ids


async def test_steps_and_draft_rounds_have_the_verifiers_times(scene: Scene):
    await scene.run()
    steps, (draft,) = scene.spans("verifier.step"), scene.spans("draft.round")
    seconds = [(span.start_time / 1e9, span.end_time / 1e9) for span in (*steps, draft)]
    assert seconds == [(100.0, 100.5), (101.0, 101.25), (100.5, 100.75)]
    assert draft.end_time <= steps[1].start_time
    (request,), (generate,) = scene.spans("request"), scene.spans("verifier.generate")
    assert request.start_time <= generate.start_time <= generate.end_time <= request.end_time


async def test_attributes_count_tokens_and_never_hold_the_prompt(scene: Scene):
    await scene.run()
    (request,), (generate,) = scene.spans("request"), scene.spans("verifier.generate")
    assert request.attributes == {
        "gen_ai.request.id": "r",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.usage.input_tokens": len(PROMPT),
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ("length",),
    }
    assert generate.attributes == {
        "outrider.choice_index": 0,
        "gen_ai.usage.output_tokens": 4,
        "outrider.num_accepted_tokens": 2,
    }
    assert scene.spans("verifier.step")[1].attributes == {
        "outrider.num_scheduled_tokens": 9,
        "outrider.num_tokens": 3,
        "outrider.num_draft_tokens": 3,
        "outrider.num_accepted_tokens": 2,
    }
    assert scene.spans("draft.round")[0].attributes == {"outrider.drafter_id": "d0", "outrider.num_draft_tokens": 3}


async def test_every_choice_has_a_span_of_its_own(scene: Scene):
    await scene.run(n=2)
    (request,) = scene.spans("request")
    generates = scene.spans("verifier.generate")
    assert sorted(span.attributes["outrider.choice_index"] for span in generates) == [0, 1]
    assert {span.parent.span_id for span in generates} == {request.context.span_id}


async def test_a_failure_is_marked_by_its_class_alone(tokenizer):
    scene = Scene(tokenizer, failure=Unavailable("secret"))
    with pytest.raises(Unavailable):
        await scene.run()
    for name in ("request", "verifier.generate"):
        (span,) = scene.spans(name)
        assert (span.status.status_code, span.status.description) == (trace.StatusCode.ERROR, "Unavailable")
        assert not span.events


async def test_a_request_that_is_left_ends_its_spans(scene: Scene):
    chunks = scene.gateway.generate(await scene.gateway.parse(RequestInput(prompt=PROMPT)))
    await anext(chunks)
    await chunks.aclose()
    assert len(scene.spans("request")) == 1


async def test_what_is_not_sampled_costs_nobody_anything(tokenizer):
    scene = Scene(tokenizer, sample_ratio=0.0)
    await scene.run()
    assert scene.backend.requests[0].trace_parent is None
    assert scene.all_spans() == ()


@pytest.mark.parametrize(("header", "is_traced"), [(SAMPLED, True), (NOT_SAMPLED, False), ("nonsense", False)])
async def test_an_http_clients_trace_goes_on_and_its_decision_holds(tokenizer, header: str, is_traced: bool):
    scene = Scene(tokenizer, sample_ratio=0.0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await scene.run()
        await PlainTextResponse("ok")(scope, receive, send)

    transport = ASGITransport(Tracing(TracerProvider()).middleware(app))
    async with AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.get("/", headers={"traceparent": header})).text == "ok"
    if is_traced:
        (request,) = scene.spans("request")
        assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE_ID, PARENT_ID)
    else:
        assert scene.all_spans() == ()
    assert not trace.get_current_span().get_span_context().is_valid, "the next request has no parent"


async def test_a_grpc_clients_trace_goes_on(tokenizer):
    scene = Scene(tokenizer, sample_ratio=0.0)

    async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await scene.run()
        return b"ok"

    server = grpc.aio.server(interceptors=[Tracing(TracerProvider()).interceptor()])
    handlers = {"Ask": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        ask = channel.unary_unary("/test.Service/Ask")
        assert await ask(b"", metadata=(("traceparent", SAMPLED),)) == b"ok"
        assert await ask(b"") == b"ok"
    await server.stop(None)
    (request,) = scene.spans("request")
    assert f"{request.context.trace_id:032x}" == TRACE_ID
