"""A metric of the fleet: its definition, and how its samples are read from a snapshot."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from outrider.cluster.monitoring.metrics import LABELS, OWN_PREFIX, Definition
from outrider.cluster.router.fleet import DrafterReport, FleetSnapshot, VerifierReport, VerifierState
from outrider.verifier_service.messages.histogram import HistogramCounts

Value = float | HistogramCounts
Rows = Iterable[tuple[tuple[str, ...], Value]]  # (label values after model_name, sample)


@dataclass(frozen=True, slots=True)
class FleetMetric:
    definition: Definition
    read: Callable[[FleetSnapshot, float], Rows]  # the second argument is the time


def of_verifiers(
    name: str, kind: str, formula: str, read: Callable[[VerifierState], Value | None], has_alias: bool = False
) -> FleetMetric:
    """Define a metric with one value per verifier; None: no sample."""

    def rows(snapshot: FleetSnapshot, now_s: float) -> Rows:
        values = ((state.report.verifier_id, read(state)) for state in snapshot.verifiers)
        return [((verifier_id,), value) for verifier_id, value in values if value is not None]

    return FleetMetric(Definition(name=name, kind=kind, formula=formula, has_alias=has_alias), rows)


def of_drafters(name: str, kind: str, formula: str, read: Callable[[DrafterReport], Value]) -> FleetMetric:
    """Define a metric with one value per drafter."""

    def rows(snapshot: FleetSnapshot, now_s: float) -> Rows:
        return [((state.report.drafter_id,), read(state.report)) for state in snapshot.drafters]

    return FleetMetric(Definition(name=name, kind=kind, formula=formula), rows)


def of_verifiers_by(
    label: str,
    name: str,
    kind: str,
    formula: str,
    read: Callable[[VerifierReport], Iterable[tuple[str, Value]]],
) -> FleetMetric:
    """Define a metric of verifiers with one more label; `read` yields (label value, sample)."""

    def rows(snapshot: FleetSnapshot, now_s: float) -> Rows:
        reports = (state.report for state in snapshot.verifiers)
        return [((report.verifier_id, key), value) for report in reports for key, value in read(report)]

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
