"""Counters of steps that are captured as CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class GraphCounts:
    """Counters of a verifier's or a drafter's model since start; all 0 if no step is captured."""

    num_graphs: int = 0
    capture_s: float = 0.0
    num_replayed: int = 0
    eager: dict[str, int] = field(default_factory=dict)  # steps that ran without a graph, by reason
