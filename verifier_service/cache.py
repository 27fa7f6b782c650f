"""Where this machine keeps what was made once: converted checkpoints, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "OUTRIDER_CACHE"
DEFAULT_CACHE = "~/.cache/outrider"


def cache_folder() -> Path:
    """Return the folder, which need not be there yet."""
    return Path(os.environ.get(CACHE_VARIABLE) or DEFAULT_CACHE).expanduser()
