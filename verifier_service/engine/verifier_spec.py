"""The configuration of a verifier, in a module of its own so that reading it imports no model code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.ranks import MainFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierSpec:
    """Configuration of all ranks of a verifier."""

    main: ClassVar = MainFunction("outrider.verifier_service.engine.factory:run_verifier_rank", "verifier")
    model: ModelConfig
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    enable_prefix_caching: bool = True
    sampling_seed: int | None = None  # for unseeded requests; None: from the operating system
    min_draft_deadline_s: float = 0.02
    max_draft_deadline_s: float = 1.0
    max_tree_nodes: int = 0  # per draft; 0: only chains
    has_masks: bool = False  # drafts come from masks in the steps, which are trees to a captured step
    prices_drafts: bool = True  # plan lengths are upper bounds, priced by measured step times; False: exact lengths
    async_scheduling: bool = True  # on an accelerator: pipeline steps where possible
    rollouts: bool = False  # drafters remember responses by prompt, not by `cache_salt`
    # how KV comes from other verifiers: gloo or nccl, between engines, met at this host; "": in frames alone
    tensor_transport: str = ""
    tensor_host: str = ""
    check_integrity: bool = False  # after every step, for tests

    @property
    def has_trees(self) -> bool:
        """Whether steps may have trees."""
        return self.max_tree_nodes > 0 or self.has_masks
