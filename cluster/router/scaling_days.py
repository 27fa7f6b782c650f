"""Days of a service as its autoscaling saw them: what it was told and what it wanted, one moment a line of JSON.

An operator records one with `policy_kwargs: {recorded_to: FILE}` and can ask afterwards what another policy would have
wanted of the same figures, or why the pools were as large as they were. A busy day is some 50 MB, a tenth of that in
gzip.
"""

from __future__ import annotations

import gzip
import logging
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from outrider.cluster.router.autoscaling import FIRST_POOL, PoolSizes, PoolsLoad, PoolsPolicy

logger = logging.getLogger("ray.serve")  # the one that the controller, where policies run, writes to its log


@with_config(ConfigDict(extra="forbid", ser_json_inf_nan="constants"))  # of the dataclasses in it, too
@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One call of the policy."""

    at_s: float  # since the epoch
    pool: str = FIRST_POOL  # whose drafters they are
    load: PoolsLoad
    policy: PoolsPolicy
    sizes: PoolSizes


_MOMENT: TypeAdapter[Moment] = TypeAdapter(Moment)  # made once: making one takes longer than reading a line
INTERVAL_S = 1.0  # between moments in which only figures changed: a day has then 86,400 lines at most
_GZIP_MAGIC = b"\x1f\x8b"  # which a day that was packed since begins with (RFC 1952)


class DayRecorder:
    """Append moments to a file: when the policy wants other sizes, and once a second where its figures change.

    A file that cannot be written ends the recording, with an error in the log, and nothing else: Serve's controller
    calls this, and its pools matter more.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: dict[str, Moment] = {}  # by pool
        self._is_broken = False
        try:
            _end_line(path)
        except OSError as error:
            self._give_up(error)

    def record(self, moment: Moment) -> None:
        last = self._last.get(moment.pool)
        if self._is_broken or (last is not None and _says_nothing_new(moment, last)):
            return
        self._last[moment.pool] = moment
        try:
            with self._path.open("ab") as file:
                file.write(_MOMENT.dump_json(moment) + b"\n")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._is_broken = True
        logger.error("recorded_to: nothing is recorded any more: %s", error)


def _says_nothing_new(moment: Moment, last: Moment) -> bool:
    if (moment.sizes, moment.policy) != (last.sizes, last.policy):
        return False
    # (a clock that was set back says nothing of how long ago the last one was)
    return moment.load == last.load or 0.0 <= moment.at_s - last.at_s < INTERVAL_S


def _end_line(path: Path) -> None:
    """End a file's last line, or make the file: whoever wrote that line may have been killed over it."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(0)
            if file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC:
                raise OSError(f"{path} is packed")
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")


def _is_cut(error: ValidationError) -> bool:
    """Return whether a line is the beginning of a moment."""
    return any(part["type"] == "json_invalid" and "EOF" in part["msg"] for part in error.errors())


def read_day(path: Path) -> Iterator[Moment]:
    """Yield the moments of a recorded day, gzipped or not; `ValueError` names the line that is none.

    Lines that were cut short, where a controller was killed over them, are left out.
    """
    with path.open("rb") as start:
        is_gzip = start.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    number = 0
    with gzip.open(path) if is_gzip else path.open("rb") as file:
        try:
            for number, line in enumerate(file, start=1):
                try:
                    moment = _MOMENT.validate_json(line.rstrip(b"\n"))
                except ValidationError as error:
                    if not _is_cut(error):
                        raise ValueError(f"{path}, line {number}: {error}") from error
                else:
                    yield moment
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}, after line {number}: {error}") from error
