"""The gateway's Prometheus metrics, each defined once; its help text is its formula.

Own names begin with `outrider_`. The same families are shown a second time under vLLM's names, so that `vllm bench
serve`, llm-d and dashboards read them unchanged; an alias is a second name at scrape time, never a second counter.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from outrider.verifier_service.request import SpeculationMetrics

LABELS = ("model_name", "engine")
TIME_TO_FIRST_TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80)
INTER_TOKEN_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)
E2E_BUCKETS_S = (0.1, 0.2, 0.4, 0.8, 1.5, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


class GatewayMetrics:
    """Count what a gateway publishes. Labels never carry a prompt or a request id."""

    def __init__(
        self, registry: CollectorRegistry, *, model_name: str, engine: str = "0", vllm_aliases: bool = True
    ) -> None:
        self.registry = registry
        self._labels = {"model_name": model_name, "engine": engine}
        self._define_requests(registry)
        self._define_latencies(registry)
        self._define_speculation(registry)
        if vllm_aliases:
            registry.register(_Aliases(self._aliased))

    def _define_requests(self, registry: CollectorRegistry) -> None:
        self._success = Counter(
            "outrider_request_success",
            "Choices that ended with a finish reason; = sum over reasons stop, length, abort",
            (*LABELS, "finished_reason"),
            registry=registry,
        )
        self._failures = Counter(
            "outrider_gateway_request_failures",
            "Accepted prompts that ended in an error; reason is the error's class",
            (*LABELS, "reason"),
            registry=registry,
        )
        self._in_progress = Gauge(
            "outrider_gateway_requests_in_progress",
            "Prompts being generated: accepted and neither finished, failed nor cancelled",
            LABELS,
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "outrider_prompt_tokens",
            "Prompt tokens of accepted requests, once per prompt whatever n is",
            LABELS,
            registry=registry,
        )
        self._generation_tokens = Counter(
            "outrider_generation_tokens",
            "Tokens published to clients, the stop token included, those behind a stop string left out",
            LABELS,
            registry=registry,
        )

    def _define_latencies(self, registry: CollectorRegistry) -> None:
        self._time_to_first_token = Histogram(
            "outrider_time_to_first_token_seconds",
            "Time of a choice's first tokens - time the gateway accepted the request",
            LABELS,
            registry=registry,
            buckets=TIME_TO_FIRST_TOKEN_BUCKETS_S,
        )
        self._inter_token_latency = Histogram(
            "outrider_inter_token_latency_seconds",
            "Time between two consecutive outputs of a choice, each of one or (speculation) several tokens",
            LABELS,
            registry=registry,
            buckets=INTER_TOKEN_BUCKETS_S,
        )
        self._e2e_latency = Histogram(
            "outrider_e2e_request_latency_seconds",
            "Time of a choice's finish reason - time the gateway accepted the request",
            LABELS,
            registry=registry,
            buckets=E2E_BUCKETS_S,
        )

    def _define_speculation(self, registry: CollectorRegistry) -> None:
        self._num_drafts = Counter(
            "outrider_spec_decode_num_drafts",
            "Verifications with a draft that was not empty, of requests that ended",
            LABELS,
            registry=registry,
        )
        self._num_draft_tokens = Counter(
            "outrider_spec_decode_num_draft_tokens",
            "Draft tokens scheduled for verification, of requests that ended",
            LABELS,
            registry=registry,
        )
        self._num_accepted_tokens = Counter(
            "outrider_spec_decode_num_accepted_tokens",
            "Draft tokens accepted; rate = this / num_draft_tokens, mean acceptance length = 1 + this / num_drafts",
            LABELS,
            registry=registry,
        )
        self._num_accepted_per_position = Counter(
            "outrider_spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted at each position of a draft, from 0; sums to num_accepted_tokens",
            (*LABELS, "position"),
            registry=registry,
        )

    @property
    def _aliased(self) -> tuple[Counter | Histogram, ...]:
        return (
            self._success,
            self._prompt_tokens,
            self._generation_tokens,
            self._time_to_first_token,
            self._inter_token_latency,
            self._e2e_latency,
            self._num_drafts,
            self._num_draft_tokens,
            self._num_accepted_tokens,
            self._num_accepted_per_position,
        )

    def request_began(self, num_prompt_tokens: int) -> None:
        self._in_progress.labels(**self._labels).inc()
        self._prompt_tokens.labels(**self._labels).inc(num_prompt_tokens)

    def request_ended(self) -> None:
        self._in_progress.labels(**self._labels).dec()

    def request_failed(self, reason: str) -> None:
        self._failures.labels(**self._labels, reason=reason).inc()

    def tokens_published(self, num_tokens: int, *, since_arrival_s: float, since_previous_s: float | None) -> None:
        """Count one output of a choice; `since_previous_s` is None for its first."""
        self._generation_tokens.labels(**self._labels).inc(num_tokens)
        if since_previous_s is None:
            self._time_to_first_token.labels(**self._labels).observe(since_arrival_s)
        else:
            self._inter_token_latency.labels(**self._labels).observe(since_previous_s)

    def choice_finished(self, finished_reason: str, *, since_arrival_s: float) -> None:
        self._success.labels(**self._labels, finished_reason=finished_reason).inc()
        self._e2e_latency.labels(**self._labels).observe(since_arrival_s)

    def speculation_ended(self, speculation: SpeculationMetrics) -> None:
        """Add one choice's speculation, once, when it is over."""
        self._num_drafts.labels(**self._labels).inc(speculation.num_drafts)
        self._num_draft_tokens.labels(**self._labels).inc(speculation.num_draft_tokens)
        self._num_accepted_tokens.labels(**self._labels).inc(speculation.num_accepted_tokens)
        for position, num_accepted in enumerate(speculation.num_accepted_per_position):
            self._num_accepted_per_position.labels(**self._labels, position=str(position)).inc(num_accepted)


class _Aliases(Collector):
    """Show metric families a second time, `outrider_x` as `vllm:x`."""

    def __init__(self, metrics: tuple[Counter | Histogram, ...]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        for metric in self._metrics:
            for family in metric.collect():
                yield _renamed(family)


def _renamed(family: Metric) -> Metric:
    alias = Metric(_vllm_name(family.name), family.documentation, family.type)
    alias.samples = [
        Sample(_vllm_name(sample.name), *sample[1:])
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]
    return alias


def _vllm_name(name: str) -> str:
    return "vllm:" + name.removeprefix("outrider_")
