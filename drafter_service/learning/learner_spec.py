"""A learner's spec."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.drafter_service.learning.messages import LearnerSettings
from outrider.drafter_service.service.drafter_spec import DrafterSpec
from outrider.verifier_service.model.ranks import RankSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSpec:
    """The spec of a learner's process."""

    drafter: DrafterSpec
    pool: str
    folder: str
    settings: LearnerSettings
    max_bytes: int = 1 << 30
    device: str = "auto"
    num_threads: int = 1
    seed: int = 0

    def run_rank(self, rank: RankSpec) -> None:
        raise NotImplementedError("the learner is in another branch")
