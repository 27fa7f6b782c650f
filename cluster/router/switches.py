"""A switch that does not flap: what is wished must stay wished for a while."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Switch:
    """On or off, with hysteresis in time."""

    is_on: bool
    pending_since_s: float | None = None  # since when the other state has been wished for

    def toward(self, is_wanted: bool, now_s: float, *, on_dwell_s: float, off_dwell_s: float) -> Switch:
        """Return the state after a wish: it changes when the wish has stayed for the dwell."""
        if is_wanted == self.is_on:
            return self if self.pending_since_s is None else Switch(self.is_on)
        since_s = now_s if self.pending_since_s is None else self.pending_since_s
        dwell_s = off_dwell_s if self.is_on else on_dwell_s
        return Switch(not self.is_on) if now_s - since_s >= dwell_s else Switch(self.is_on, since_s)
