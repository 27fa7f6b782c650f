"""One learner a folder: two would remove each other's versions."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

LOCK_NAME = ".lock"
PATIENCE_S = 10.0  # a learner that was killed is gone by then
POLL_S = 0.1


@contextlib.contextmanager
def own_folder(
    folder: Path,
    *,
    patience_s: float = PATIENCE_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Hold a learner's folder, which is made if it is not there.

    Raises `ValueError` if another process, or another holder in this one, still does after `patience_s`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_NAME).open("w") as file:
        give_up_s = clock() + patience_s
        while not _is_locked(file.fileno()):
            if clock() >= give_up_s:
                raise ValueError(f"learner: folder: {folder} is another learner's: give this one a folder of its own")
            sleep(POLL_S)
        yield  # the lock goes with the file


def require_free(folder: Path) -> None:
    """Raise `ValueError` if another learner holds a folder, `OSError` if it cannot be written."""
    with own_folder(folder):
        pass


def _is_locked(number: int) -> bool:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
