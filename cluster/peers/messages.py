"""What gateways of one service ask each other: each message is one call, answered by one message."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from outrider.cluster.gateway.rollout_memory import Recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Meet:
    """A gateway introduces itself."""

    gateway_id: str
    endpoint: str
    wants_history: bool = False  # it is new: the other tells it the responses of rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class AskAbort:
    """Abort requests that run at the other gateway."""

    request_ids: tuple[str, ...] | None  # None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class AskRunning:
    """Say how many prompts are being generated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskMetrics:
    """Say what is published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskResponse:
    """Give a stored response."""

    response_id: str
    is_removed: bool = False  # afterwards


@dataclass(frozen=True, slots=True, kw_only=True)
class TellHistory:
    """Remember responses of rollouts."""

    responses: tuple[Recorded, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetHistory:
    """Forget all responses of rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """It is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    """How many requests were running, and of those that were named, which."""

    count: int
    request_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The number of prompts that are being generated."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A stored response, as `StoredResponse.packed`; None: there is none of this name."""

    payload: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One sample of a metric."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric with its samples."""

    name: str
    documentation: str
    kind: str
    unit: str
    points: tuple[Point, ...]

    @classmethod
    def of(cls, metric: Metric) -> Family:
        points = tuple(
            Point(name=sample.name, labels=dict(sample.labels), value=sample.value) for sample in metric.samples
        )
        return cls(
            name=metric.name, documentation=metric.documentation, kind=metric.type, unit=metric.unit, points=points
        )

    @property
    def metric(self) -> Metric:
        """The metric again."""
        metric = Metric(self.name, self.documentation, self.kind, self.unit)
        metric.samples = [Sample(point.name, point.labels, point.value) for point in self.points]
        return metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What a gateway publishes."""

    families: tuple[Family, ...]


ANSWERS = (Done, Aborted, Running, Kept, Metrics)
