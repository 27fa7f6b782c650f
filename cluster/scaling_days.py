"""Days of a service as its autoscaling saw them: what it was told and what it wanted, one moment a line of JSON.

An operator records one with `policy_kwargs: {recorded_to: FILE}` and can ask afterwards what another policy would have
wanted of the same figures, or why the pools were as large as they were.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from outrider.cluster.autoscaling import PoolSizes, PoolsLoad, PoolsPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One call of the policy."""

    at_s: float  # since the epoch
    load: PoolsLoad
    policy: PoolsPolicy
    sizes: PoolSizes


_MOMENT: TypeAdapter[Moment] = TypeAdapter(Moment)


INTERVAL_S = 1.0


class DayRecorder:
    """Append moments to a file: when the policy wants other sizes, and once a second where its figures change."""

    def __init__(self, path: Path) -> None:
        """Raise `OSError` if the file cannot be written."""
        self._path = path
        self._last: Moment | None = None
        path.open("ab").close()

    def record(self, moment: Moment) -> None:
        last = self._last
        is_alike = last is not None and (moment.sizes, moment.policy) == (last.sizes, last.policy)
        if last is not None and is_alike and (moment.load == last.load or moment.at_s < last.at_s + INTERVAL_S):
            return
        self._last = moment
        with self._path.open("ab") as file:
            file.write(_MOMENT.dump_json(moment) + b"\n")


def read_day(path: Path) -> Iterator[Moment]:
    """Yield the moments of a recorded day, gzipped or not; `ValueError` names the line that is none."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield _MOMENT.validate_json(line)
            except ValidationError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
