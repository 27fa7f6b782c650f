"""What to say of a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_NAME_CHARS = 64  # a longer name is no slip of the pen, and comparing it takes long


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'NAME'?" with the closest of the known names, which have _ for -; nothing if none is."""
    close = difflib.get_close_matches(name[:MAX_NAME_CHARS].replace("-", "_"), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
