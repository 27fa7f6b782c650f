"""Definitions of metrics, and the gateway's own metrics; the fleet's are in `fleet_metrics`.

A metric is defined once; its help text is its formula. Names begin with `outrider_`. Some families are also shown under
vLLM's names, for `vllm bench serve`, llm-d and dashboards: an alias is a second name at scrape time, not a second
counter. No label has a prompt or a request id.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from outrider.verifier_service.messages.request import SpeculationMetrics

MetricT = TypeVar("MetricT", Counter, Histogram)

OWN_PREFIX, VLLM_PREFIX = "outrider_", "vllm:"
LABELS = ("model_name", "engine")
TIME_TO_FIRST_TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80)
INTER_TOKEN_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)
E2E_BUCKETS_S = (0.1, 0.2, 0.4, 0.8, 1.5, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
CHOICE_BUCKETS = (1, 2, 5, 10, 20, 50, 100)
TOKEN_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A metric: its name, Prometheus type, formula and labels."""

    name: str  # without `outrider_`, and without a counter's `_total`
    kind: str  # counter | gauge | histogram
    formula: str
    labels: tuple[str, ...] = LABELS
    buckets: tuple[float, ...] = ()
    has_alias: bool = False  # shown under vLLM's name too

    @property
    def names(self) -> tuple[str, ...]:
        """Return the family's name and, if it has one, its alias, as exposed."""
        suffix = "_total" if self.kind == "counter" else ""
        prefixes = (OWN_PREFIX, VLLM_PREFIX) if self.has_alias else (OWN_PREFIX,)
        return tuple(f"{prefix}{self.name}{suffix}" for prefix in prefixes)


def _counter(name: str, formula: str, *labels: str, has_alias: bool = False) -> Definition:
    return Definition(name=name, kind="counter", formula=formula, labels=(*LABELS, *labels), has_alias=has_alias)


def _histogram(name: str, formula: str, *, buckets: tuple[float, ...], has_alias: bool = False) -> Definition:
    return Definition(name=name, kind="histogram", formula=formula, buckets=buckets, has_alias=has_alias)


SUCCESS = _counter(
    "request_success",
    "Choices that ended with a finish reason; = sum over reasons stop, length, abort",
    "finished_reason",
    has_alias=True,
)
FAILURES = _counter(
    "gateway_request_failures", "Accepted prompts that ended in an error; reason is the error's class", "reason"
)
IN_PROGRESS = Definition(
    kind="gauge",
    name="gateway_requests_in_progress",
    formula="Prompts being generated: accepted and neither finished, failed nor cancelled",
)
PROMPT_TOKENS = _counter(
    "prompt_tokens", "Prompt tokens of accepted requests, once per prompt whatever n is", has_alias=True
)
GENERATION_TOKENS = _counter(
    "generation_tokens",
    "Tokens published to clients, the stop token included, those behind a stop string left out",
    has_alias=True,
)
REQUEST_PROMPT_TOKENS = _histogram(
    "request_prompt_tokens", "Prompt tokens of an accepted prompt", buckets=TOKEN_BUCKETS, has_alias=True
)
REQUEST_PARAMS_N = _histogram(
    "request_params_n", "Choices asked for of an accepted prompt", buckets=CHOICE_BUCKETS, has_alias=True
)
REQUEST_PARAMS_MAX_TOKENS = _histogram(
    "request_params_max_tokens",
    "Output tokens that a choice of an accepted prompt may have",
    buckets=TOKEN_BUCKETS,
    has_alias=True,
)
TIME_TO_FIRST_TOKEN = _histogram(
    "time_to_first_token_seconds",
    "Time of a choice's first tokens - time the gateway accepted the request",
    buckets=TIME_TO_FIRST_TOKEN_BUCKETS_S,
    has_alias=True,
)
INTER_TOKEN_LATENCY = _histogram(
    "inter_token_latency_seconds",
    "Time between two consecutive outputs of a choice, each of one or (speculation) several tokens",
    buckets=INTER_TOKEN_BUCKETS_S,
    has_alias=True,
)
E2E_LATENCY = _histogram(
    "e2e_request_latency_seconds",
    "Time of a choice's finish reason - time the gateway accepted the request",
    buckets=E2E_BUCKETS_S,
    has_alias=True,
)
HANDOVERS = _counter(
    "handovers",
    "Requests that another verifier took over with their KV (taken: from the one that computed the prompt; "
    "moved: from one that drained or was crowded), or could not take (not_taken, with the reason)",
    "outcome",
    "reason",
)
HANDOVER_WAIT = _histogram(
    "handover_wait_seconds",
    "Time of the first output of the verifier that took a request over - time from which it stood still",
    buckets=INTER_TOKEN_BUCKETS_S,
)
NUM_DRAFTS = _counter(
    "spec_decode_num_drafts", "Verifications with a draft that was not empty, of requests that ended", has_alias=True
)
NUM_DRAFT_TOKENS = _counter(
    "spec_decode_num_draft_tokens", "Draft tokens scheduled for verification, of requests that ended", has_alias=True
)
NUM_ACCEPTED_TOKENS = _counter(
    "spec_decode_num_accepted_tokens",
    "Draft tokens accepted; rate = this / num_draft_tokens, mean acceptance length = 1 + this / num_drafts",
    has_alias=True,
)
NUM_ACCEPTED_PER_POSITION = _counter(
    "spec_decode_num_accepted_tokens_per_pos",
    "Draft tokens accepted at each position of a draft, from 0; sums to num_accepted_tokens",
    "position",
    has_alias=True,
)
NEXT_TURN_PREFILLS = _counter(
    "next_turn_prefills",
    "Chats that ended with --next-turn-prefill on; outcome done: the beginning of the next turn is cached, "
    "late: no verifier was idle in time, failed: by an error, skipped: it is too long, its verifier is not known, or "
    "too many others are under way",
    "outcome",
)
NEXT_TURN_TOKENS = _counter(
    "next_turn_prefilled_tokens",
    "Tokens computed ahead: over prefills that are done, tokens of the beginning - those found in the cache",
)
GATEWAY_DEFINITIONS = (
    SUCCESS,
    FAILURES,
    IN_PROGRESS,
    PROMPT_TOKENS,
    GENERATION_TOKENS,
    REQUEST_PROMPT_TOKENS,
    REQUEST_PARAMS_N,
    REQUEST_PARAMS_MAX_TOKENS,
    TIME_TO_FIRST_TOKEN,
    INTER_TOKEN_LATENCY,
    E2E_LATENCY,
    HANDOVERS,
    HANDOVER_WAIT,
    NUM_DRAFTS,
    NUM_DRAFT_TOKENS,
    NUM_ACCEPTED_TOKENS,
    NUM_ACCEPTED_PER_POSITION,
    NEXT_TURN_PREFILLS,
    NEXT_TURN_TOKENS,
)


class GatewayMetrics:
    """Counters of a gateway."""

    def __init__(
        self, registry: CollectorRegistry, *, model_name: str, engine: str = "0", vllm_aliases: bool = True
    ) -> None:
        self.registry = registry
        self._labels = {"model_name": model_name, "engine": engine}
        self._counters = {
            d: Counter(OWN_PREFIX + d.name, d.formula, d.labels, registry=registry) for d in _of("counter")
        }
        self._gauges = {d: Gauge(OWN_PREFIX + d.name, d.formula, d.labels, registry=registry) for d in _of("gauge")}
        self._histograms = {
            d: Histogram(OWN_PREFIX + d.name, d.formula, d.labels, registry=registry, buckets=d.buckets)
            for d in _of("histogram")
        }
        self._children: dict[tuple[Any, ...], Any] = {}
        if vllm_aliases:
            metrics = {**self._counters, **self._gauges, **self._histograms}
            registry.register(_Aliases([metric for definition, metric in metrics.items() if definition.has_alias]))

    def request_began(self, num_prompt_tokens: int, *, num_choices: int, max_tokens: int) -> None:
        self._gauges[IN_PROGRESS].labels(**self._labels).inc()
        self._count(PROMPT_TOKENS, num_prompt_tokens)
        self._observe(REQUEST_PROMPT_TOKENS, num_prompt_tokens)
        self._observe(REQUEST_PARAMS_N, num_choices)
        self._observe(REQUEST_PARAMS_MAX_TOKENS, max_tokens)

    def request_ended(self) -> None:
        self._gauges[IN_PROGRESS].labels(**self._labels).dec()

    def request_failed(self, reason: str) -> None:
        self._count(FAILURES, 1, reason=reason)

    def tokens_published(self, num_tokens: int, *, since_arrival_s: float, since_previous_s: float | None) -> None:
        """Count one output of a choice; `since_previous_s` is None for its first one."""
        self._count(GENERATION_TOKENS, num_tokens)
        if since_previous_s is None:
            self._observe(TIME_TO_FIRST_TOKEN, since_arrival_s)
        else:
            self._observe(INTER_TOKEN_LATENCY, since_previous_s)

    def choice_finished(self, finished_reason: str, *, since_arrival_s: float) -> None:
        self._count(SUCCESS, 1, finished_reason=finished_reason)
        self._observe(E2E_LATENCY, since_arrival_s)

    def handover_ended(self, outcome: str, reason: str = "", *, waited_s: float | None = None) -> None:
        """Count a request that changed its verifier, or could not; `waited_s` where its client waited for it."""
        self._count(HANDOVERS, 1, outcome=outcome, reason=reason)
        if waited_s is not None:
            self._observe(HANDOVER_WAIT, waited_s)

    def speculation_ended(self, speculation: SpeculationMetrics) -> None:
        """Add a finished choice's speculation."""
        self._count(NUM_DRAFTS, speculation.num_drafts)
        self._count(NUM_DRAFT_TOKENS, speculation.num_draft_tokens)
        self._count(NUM_ACCEPTED_TOKENS, speculation.num_accepted_tokens)
        for position, num_accepted in enumerate(speculation.num_accepted_per_position):
            self._count(NUM_ACCEPTED_PER_POSITION, num_accepted, position=str(position))

    def next_turn_ended(self, outcome: str, num_tokens: int = 0) -> None:
        """Count a chat whose next turn was to be prefilled, and the tokens that were computed for it."""
        self._count(NEXT_TURN_PREFILLS, 1, outcome=outcome)
        self._count(NEXT_TURN_TOKENS, num_tokens)

    def _count(self, definition: Definition, amount: float, **labels: str) -> None:
        self._child(self._counters[definition], labels).inc(amount)

    def _observe(self, definition: Definition, value: float) -> None:
        self._child(self._histograms[definition], {}).observe(value)

    def _child(self, metric: MetricT, labels: Mapping[str, str]) -> MetricT:
        """Return a metric's child: the library's own look-up takes longer than to count."""
        key = (metric, *labels.values())
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(**self._labels, **labels)
        return child


def _of(kind: str) -> list[Definition]:
    return [definition for definition in GATEWAY_DEFINITIONS if definition.kind == kind]


class _Aliases(Collector):
    """Show metric families also as `vllm:x` for `outrider_x`."""

    def __init__(self, metrics: Iterable[Collector]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterator[Metric]:
        for metric in self._metrics:
            for family in metric.collect():
                yield alias_of(family)


def alias_of(family: Metric) -> Metric:
    """Return a family under vLLM's name."""
    alias = Metric(_vllm_name(family.name), family.documentation, family.type)
    alias.samples = [
        Sample(_vllm_name(sample.name), *sample[1:])
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]
    return alias


def _vllm_name(name: str) -> str:
    return VLLM_PREFIX + name.removeprefix(OWN_PREFIX)
