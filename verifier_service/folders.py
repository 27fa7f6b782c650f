"""Folders that somebody else names: what lies below a root, and copies of what was checked."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

COPY_BYTES = 1 << 24


def require_below(folder: str, root: str, field: str) -> None:
    """Raise `ValueError` naming the field unless a folder and all that is in it lie below a root, links followed."""
    base, place = Path(root).resolve(), Path(folder)
    if not place.resolve().is_relative_to(base):
        raise ValueError(f"{field}: {folder} does not lie below {root}")
    for path in place.rglob("*"):
        if not path.resolve().is_relative_to(base):
            raise ValueError(f"{field}: {path} is a link to what does not lie below {root}")


def copy_plain(names: Iterable[str], folder: Path, to: Path) -> None:
    """Copy files of a folder by name to another, which must be there. Raises `ValueError` for one that is a link."""
    for name in names:
        try:
            source = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ValueError(f"{folder / name} is a link: copy what it leads to") from error
            raise
        with os.fdopen(source, "rb") as file, (to / name).open("wb") as copy:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError(f"{folder / name} is no file")
            shutil.copyfileobj(file, copy, COPY_BYTES)


def sync(folder: Path) -> None:
    """Have the disk hold a folder's files before anything names them."""
    for path in [*folder.iterdir(), folder]:
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
