"""This machine's cache folder: converted checkpoints, compiled kernels, findings of earlier starts."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "OUTRIDER_CACHE"
DEFAULT_CACHE = "~/.cache/outrider"


def cache_folder() -> Path:
    """Return the cache folder, which may not exist yet."""
    return Path(os.environ.get(CACHE_VARIABLE) or DEFAULT_CACHE).expanduser()
