"""Record the autoscaler's input and output: one call of the policy is one line of JSON.

An operator records a day with `policy_kwargs: {recorded_to: FILE}`, to see later why the pools had their sizes, or what
another policy would have wanted of the same figures. A busy day is some 50 MB, a tenth of that in gzip.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, with_config

from outrider.cluster.scaling.autoscaling import FIRST_POOL, PoolSizes, PoolsLoad, PoolsPolicy

logger = logging.getLogger("ray.serve")  # policies run in Serve's controller: this logger writes to its log


@with_config(ConfigDict(ser_json_inf_nan="constants"))  # also of the dataclasses in it
@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One call of the policy."""

    at_s: float  # since the epoch
    pool: str = FIRST_POOL  # of drafters
    load: PoolsLoad
    policy: PoolsPolicy
    sizes: PoolSizes


_MOMENT: TypeAdapter[Moment] = TypeAdapter(Moment)  # made once: construction takes longer than writing a line
INTERVAL_S = 1.0  # between moments whose figures alone differ: a day has at most 86,400 of them
_GZIP_MAGIC = b"\x1f\x8b"  # first bytes of a packed file (RFC 1952)


class DayRecorder:
    """Append moments to a file: whenever the policy wants other sizes, and once a second while its figures change.

    A file that cannot be written ends the recording with an error in the log. It raises nothing: the caller is Serve's
    controller, whose pools matter more.
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
        if self._is_broken or (last is not None and _is_repeated(moment, last)):
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


def _is_repeated(moment: Moment, last: Moment) -> bool:
    if (moment.sizes, moment.policy) != (last.sizes, last.policy):
        return False
    # a difference below 0: the clock was set back, so that the time since the last moment is unknown
    return moment.load == last.load or 0.0 <= moment.at_s - last.at_s < INTERVAL_S


def _end_line(path: Path) -> None:
    """Create the file, or end its last line: its writer may have been killed within that line."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(0)
            if file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC:
                raise OSError(f"{path} is packed")
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")
