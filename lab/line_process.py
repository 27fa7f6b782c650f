"""A child process that is told lines and heard line by line, until its input ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, Self

CLOSE_TIMEOUT_S = 20.0


class ProcessEnded(RuntimeError):
    """A process that has ended, where it should have said something."""


class LineProcess:
    """Started where it is made."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], errors: IO[str] | None = None
    ) -> None:
        """`errors`: what its standard error goes to; None: where this process's goes."""
        self.name = name
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, line: str) -> None:
        """Raises `ProcessEnded`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ProcessEnded(self._last_words()) from error

    def hear(self) -> str:
        """Wait for a line. Raises `ProcessEnded` where the process ends instead."""
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return line.rstrip("\n")
        raise ProcessEnded(self._last_words())

    def _last_words(self) -> str:
        return f"the benchmark's {self.name} has ended; what it said stands above"

    def close(self) -> None:
        """End its input, and it, if that does not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, with a line unread
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
