"""A drafter's spec and what follows from it; in a module of its own, which needs no model code."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from outrider.drafter_service.service.methods import Kind
from outrider.drafter_service.service.speculative_config import SpeculativeConfig
from outrider.drafter_service.target.scratch_blocks import MAX_DRAFTS_TOGETHER, scratch_blocks_per_draft
from outrider.verifier_service.engine.verifier_spec import VerifierSpec
from outrider.verifier_service.messages.draft import FINAL_TAP
from outrider.verifier_service.model.architectures import read_description, resolve_description
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.ranks import MainFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSpec:
    """The spec of a drafter's ranks."""

    main: ClassVar = MainFunction("outrider.drafter_service.service.rank_main:run_drafter_rank", "drafter")
    model: ModelConfig | None  # the draft model or head, if the method has one
    target: ModelConfig  # drafts are in its vocabulary
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    max_num_batched_tokens: int = 2048
    max_sessions: int = 256
    sampling_seed: int | None = None  # for unseeded drafts; None: from the operating system
    tensor_host: str = ""  # address for channels of hidden states; "": they arrive in frames
    check_integrity: bool = False  # after every step: for tests
    takes_orders: bool = True  # its weights may change; not in a service without a trainer and a learner
    learns: bool = False  # its pool has a learner
    learn_num_top: int = 0  # as in `DraftNeeds.num_top`, for the pool's learner; 0: none

    @property
    def loads_model(self) -> bool:
        """Whether the ranks load a whole model, which may be tensor-parallel."""
        return self.speculative.has(Kind.MODEL)

    @property
    def has_trees(self) -> bool:
        """Whether drafts may be trees."""
        return self.speculative.num_tree_nodes > 0

    @property
    def reads_target(self) -> bool:
        """Whether it loads tensors of the target: an embedding or layers."""
        return any(part.kind not in (Kind.LOOKUP, Kind.MODEL) for part in self.speculative.parts)

    @property
    def vocabulary(self) -> ModelConfig:
        """The model whose vocabulary drafts have.

        It is the target's, unless the drafter is a whole model of the same vocabulary.
        """
        is_own = self.speculative.record.kind is Kind.MODEL and self.speculative.vocabulary == "same"
        return self.model if is_own and self.model is not None else self.target

    def num_target_layers(self) -> int:
        """The number of the target's layers, read from its files."""
        return int(read_description(resolve_description(self.target), self.target).num_hidden_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColocatedSpec:
    """A verifier and the drafter in its process."""

    main: ClassVar = MainFunction("outrider.drafter_service.service.colocated:run_colocated_rank", "verifier")
    verifier: VerifierSpec
    drafter: DrafterSpec


def state_taps(spec: DrafterSpec) -> tuple[int, ...]:
    """Return the hidden states that a verifier keeps for a drafter, from the drafter's files."""
    head = next((part for part in spec.speculative.parts if part.kind is Kind.HEAD), None)
    if head is None or not head.names_taps:
        return () if head is None else (FINAL_TAP,)
    assert spec.model is not None
    config = json.loads((resolve_description(spec.model) / "config.json").read_text())
    taps: tuple[int, ...] = head.parse_config(config, spec.num_target_layers()).taps
    return taps


def common_state_taps(specs: Iterable[DrafterSpec]) -> tuple[int, ...]:
    """Return the hidden states that a verifier keeps for several drafters; raises `ValueError` if they differ."""
    found = {taps for spec in specs if (taps := state_taps(spec))}
    if len(found) > 1:
        raise ValueError(f"drafter_pools: those that read hidden states must read the same, not {sorted(found)}")
    return found.pop() if found else ()


def num_scratch_blocks(spec: DrafterSpec, block_size: int, max_num_seqs: int) -> int:
    """Return the number of the target's KV blocks that a drafter uses for its guesses."""
    speculative = spec.speculative
    if not any(part.kind is Kind.TARGET and not part.has_masks for part in speculative.parts):
        return 0  # masks lie behind the request's own tokens
    num_nodes = max(speculative.num_tree_nodes, speculative.num_speculative_tokens)
    return min(max_num_seqs, MAX_DRAFTS_TOGETHER) * scratch_blocks_per_draft(num_nodes, block_size)
