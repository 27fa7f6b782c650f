"""The one virtual clock: time passes where a test says so, and at each look by `tick_s`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Clock:
    """A clock that a test advances; `sleep` passes at once."""

    now_s: float = 0.0
    tick_s: float = 0.0

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
