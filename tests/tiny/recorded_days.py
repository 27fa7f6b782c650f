"""Read what `DayRecorder` wrote."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from pydantic import TypeAdapter

from outrider.cluster.scaling.days import Moment


def read_day(path: Path) -> list[Moment]:
    """Return a day's moments, without lines whose writer was killed within them; a file in `.gz` is unpacked."""
    data = path.read_bytes()
    lines = (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()
    moment = TypeAdapter(Moment)
    return [moment.validate_json(line) for line in lines if _is_whole(line)]


def _is_whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except json.JSONDecodeError:
        return False
    return True
