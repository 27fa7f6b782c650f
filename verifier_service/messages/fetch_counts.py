"""Counters of experts that lie in host memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class FetchCounts:
    """Counters of a mixture since start, all layers together: distinct experts of each step and layer."""

    num_taken: int = 0
    num_hits: int = 0  # on the device when the layer's gate asked for them, or on their way
    num_fetched: int = 0  # copies, those ahead included
