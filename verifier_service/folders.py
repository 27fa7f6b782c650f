"""Folders that somebody else names: what lies below a root, and copies of what was checked."""

from __future__ import annotations

from pathlib import Path


def require_below(folder: str, root: str, field: str) -> None:
    """Raise `ValueError` naming the field unless a folder and all that is in it lie below a root, links followed."""
    base, place = Path(root).resolve(), Path(folder)
    if not place.resolve().is_relative_to(base):
        raise ValueError(f"{field}: {folder} does not lie below {root}")
    for path in place.rglob("*"):
        if not path.resolve().is_relative_to(base):
            raise ValueError(f"{field}: {path} is a link to what does not lie below {root}")
