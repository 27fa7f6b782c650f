"""A field of a report, declared with its metric."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Metric:
    """How a field is shown: its name without `outrider_` and `_total`, and its formula."""

    name: str
    formula: str
    by: str = ""  # the label of a field that counts by something; "": it is one value
    is_gauge: bool = False
    has_alias: bool = False  # under vLLM's name, too


def shown(
    name: str, formula: str, *, by: str = "", default: Any = 0, is_gauge: bool = False, has_alias: bool = False
) -> Any:
    """Declare a field with its `Metric`; what counts by a label begins as an empty dictionary."""
    metadata = {"metric": Metric(name, formula, by, is_gauge, has_alias)}
    return field(default_factory=dict, metadata=metadata) if by else field(default=default, metadata=metadata)


def metrics_of(kind: type) -> dict[str, Metric]:
    """Return the metrics of a dataclass's fields, by the fields' names."""
    return {each.name: each.metadata["metric"] for each in fields(kind) if "metric" in each.metadata}
