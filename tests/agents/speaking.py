"""What the scripts have in common that run in the agents' environment: each tries its client, and writes what came."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import words

Try = Callable[[], object]
ErrorT = TypeVar("ErrorT", bound=Exception)


def report(*tries: Try | None) -> None:
    """Write an object into the file that the last argument names: by column, what went wrong, or nothing.

    `tries`: of the columns, in their order; None: the client has nothing to try there.
    """
    columns = zip(words.COLUMNS, tries, strict=True)
    found = {column: _failure_of(attempt) for column, attempt in columns if attempt is not None}
    Path(sys.argv[-1]).write_text(json.dumps(found))


def _failure_of(attempt: Try) -> str:
    try:
        attempt()
    except Exception:  # whatever a client raises is what its user would see
        return traceback.format_exc(limit=-3)
    return ""


def refusal(kind: type[ErrorT], attempt: Try) -> ErrorT:
    """Return the error that an attempt ends with; raises `AssertionError` if it does not."""
    try:
        attempt()
    except kind as error:
        return error
    raise AssertionError("it was answered")
