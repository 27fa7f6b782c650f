"""What a verifier is told; apart from what runs it, so that knowing one needs no model code."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.ranks import RankSpec
from outrider.verifier_service.start_phases import begin_phases


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierSpec:
    """Everything a verifier's ranks must know."""

    model: ModelConfig
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    enable_prefix_caching: bool = True
    sampling_seed: int | None = None  # of unseeded requests; None: from the operating system
    min_draft_deadline_s: float = 0.02
    max_draft_deadline_s: float = 1.0
    max_tree_nodes: int = 0  # of a draft; 0: chains alone
    prices_drafts: bool = True  # verify what pays, below the plans' lengths; needs a profile of step times
    async_scheduling: bool = True  # on an accelerator: launch the next step before one is read, where it can be planned
    check_integrity: bool = False  # after every step: for tests

    @property
    def has_trees(self) -> bool:
        """Whether drafts may be trees."""
        return self.max_tree_nodes > 0

    def run_rank(self, rank: RankSpec) -> None:
        """Be one rank of this verifier until its shell, or rank 0, goes away."""
        begin_phases("verifier", "importing the engine")
        from outrider.verifier_service.engine.factory import run_verifier_rank

        run_verifier_rank(self, rank)
