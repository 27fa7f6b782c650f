"""What became of a model's steps where they are captured as CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class GraphCounts:
    """Counters since start, of a verifier's or a drafter's model; all stay zero where no step is captured."""

    num_graphs: int = 0
    capture_s: float = 0.0
    num_replayed: int = 0
    eager: dict[str, int] = field(default_factory=dict)  # steps that ran without a graph, by reason
