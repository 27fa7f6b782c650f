"""A learner's spec, in a module of its own, which needs no model code."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from outrider.drafter_service.learning.messages import LearnerSettings
from outrider.drafter_service.service.drafter_spec import DrafterSpec
from outrider.drafter_service.service.speculative_config import learning_refusal
from outrider.verifier_service.model.ranks import MainFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSpec:
    """The spec of a pool's learner, which has one rank. Raises `ValueError` for a drafter that cannot learn."""

    main: ClassVar = MainFunction(
        "outrider.drafter_service.learning.rank_main:run_learner_rank", "learner", "importing the trainer"
    )
    drafter: DrafterSpec
    pool: str
    folder: str  # of the versions, which this learner alone uses
    export_root: str  # below which exports are written
    weights_root: str | None = None  # below which what is published by hand must lie; None: anywhere
    settings: LearnerSettings = field(default_factory=LearnerSettings)
    max_bytes: int = 1 << 30  # of the reservoir
    device: str = "auto"
    num_threads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if (refusal := learning_refusal(self.drafter.speculative)) is not None:
            raise ValueError(f"learning: {refusal}")
        if self.max_bytes < 1 or self.num_threads < 1:
            raise ValueError("max_bytes and num_threads must be positive")
