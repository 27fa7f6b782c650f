"""The files of this checkout that people wrote."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_OURS = {"build", "dist", "shared", "__pycache__"}


@cache
def own_files() -> tuple[str, ...]:
    """List them by their paths; hidden folders, but for the CI's, and build products are not even looked into."""
    found: list[str] = []
    for folder, inner, names in os.walk(ROOT):
        inner[:] = [name for name in inner if name == ".ci" or not (name.startswith(".") or name in NOT_OURS)]
        found += (str((Path(folder) / name).relative_to(ROOT)) for name in names)
    return tuple(sorted(found))
