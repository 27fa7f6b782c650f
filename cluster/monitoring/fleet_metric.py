"""A metric of the fleet: its definition, and how its samples are read from a snapshot."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from outrider.cluster.monitoring.metrics import LABELS, OWN_PREFIX, Definition
from outrider.cluster.router.fleet import DrafterReport, FleetSnapshot, VerifierReport, VerifierState
from outrider.verifier_service.messages.counts import NO_VALUES, EngineCounters, FetchCounts, HistogramCounts
from outrider.verifier_service.messages.drafter_load import DrafterCounters, DrafterLoad
from outrider.verifier_service.messages.engine import EngineLoad
from outrider.verifier_service.messages.metric import Metric, metrics_of

Value = float | HistogramCounts
Rows = Iterable[tuple[tuple[str, ...], Value]]  # (label values after model_name, sample)


@dataclass(frozen=True, slots=True)
class FleetMetric:
    definition: Definition
    read: Callable[[FleetSnapshot, float], Rows]  # the second argument is the time


@dataclass(frozen=True, slots=True)
class Shown:
    """Dataclasses of a snapshot whose fields have metrics: their class, and each with the values of its labels."""

    kind: type
    owners: Callable[[FleetSnapshot], Iterable[tuple[tuple[str, ...], Any]]]
    labels: tuple[str, ...] = LABELS

    def metrics(self, *names: str) -> list[FleetMetric]:
        """Return the metrics of these fields, in order."""
        return [self._metric(name, metrics_of(self.kind)[name]) for name in names]

    def _metric(self, name: str, metric: Metric) -> FleetMetric:
        default = next(each.default for each in fields(self.kind) if each.name == name)
        definition = Definition(
            name=metric.name,
            kind="gauge" if metric.is_gauge else "histogram" if default is NO_VALUES else "counter",
            formula=metric.formula,
            labels=(*self.labels, metric.by) if metric.by else self.labels,
            has_alias=metric.has_alias,
        )

        def rows(snapshot: FleetSnapshot, now_s: float) -> Rows:
            for labels, owner in self.owners(snapshot):
                value: Any = None if owner is None else getattr(owner, name)
                if metric.by:
                    yield from (((*labels, key), count) for key, count in value.items())
                elif value is not None:
                    yield labels, value

        return FleetMetric(definition, rows)


LOAD = Shown(EngineLoad, lambda snapshot: (((each.verifier_id,), each.load) for each in _verifiers(snapshot)))
COUNTERS = Shown(
    EngineCounters, lambda snapshot: (((each.verifier_id,), each.load.counters) for each in _verifiers(snapshot))
)
FETCHES = Shown(
    FetchCounts, lambda snapshot: (((each.verifier_id,), each.load.counters.fetches) for each in _verifiers(snapshot))
)
DRAFTER_LOAD = Shown(DrafterLoad, lambda snapshot: (((each.drafter_id,), each.load) for each in _drafters(snapshot)))
DRAFTER_COUNTERS = Shown(
    DrafterCounters, lambda snapshot: (((each.drafter_id,), each.load.counters) for each in _drafters(snapshot))
)


def _verifiers(snapshot: FleetSnapshot) -> Iterator[VerifierReport]:
    return (state.report for state in snapshot.verifiers)


def _drafters(snapshot: FleetSnapshot) -> Iterator[DrafterReport]:
    return (state.report for state in snapshot.drafters)


def of_fleet(
    name: str, kind: str, formula: str, labels: Sequence[str], read: Callable[[FleetSnapshot], Rows]
) -> FleetMetric:
    """Define a metric with these labels behind the model's name."""
    definition = Definition(name=name, kind=kind, formula=formula, labels=("model_name", *labels))
    return FleetMetric(definition, lambda snapshot, now_s: read(snapshot))


def of_verifiers(name: str, formula: str, read: Callable[[VerifierState], float | None]) -> FleetMetric:
    """Define a gauge with one value per verifier; None: no sample."""

    def rows(snapshot: FleetSnapshot, now_s: float) -> Rows:
        values = ((state.report.verifier_id, read(state)) for state in snapshot.verifiers)
        return [((verifier_id,), value) for verifier_id, value in values if value is not None]

    return FleetMetric(Definition(name=name, kind="gauge", formula=formula), rows)


def of_verifiers_by(
    label: str, name: str, kind: str, formula: str, read: Callable[[VerifierReport], Iterable[tuple[str, float | None]]]
) -> FleetMetric:
    """Define a metric of verifiers with one more label; `read` yields (label value, sample). None: no sample."""

    def rows(snapshot: FleetSnapshot, now_s: float) -> Rows:
        values = ((report.verifier_id, key, value) for report in _verifiers(snapshot) for key, value in read(report))
        return [((verifier_id, key), value) for verifier_id, key, value in values if value is not None]

    return FleetMetric(Definition(name=name, kind=kind, formula=formula, labels=(*LABELS, label)), rows)


Family = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily


def family_of(definition: Definition) -> Family:
    types = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}
    family: Family = types[definition.kind](OWN_PREFIX + definition.name, definition.formula, labels=definition.labels)
    return family


def add_sample(family: Family, labels: tuple[str, ...], value: Value) -> None:
    if isinstance(family, HistogramMetricFamily):
        assert isinstance(value, HistogramCounts)
        bounds = (*map(floatToGoString, value.bounds), floatToGoString(math.inf))
        cumulative = itertools.accumulate(value.counts or (0,))
        family.add_metric(labels, list(zip(bounds, cumulative, strict=True)), value.total)
    else:
        assert not isinstance(value, HistogramCounts)
        family.add_metric(labels, value)
