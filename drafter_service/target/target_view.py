"""What a drafter inside the verifier's process sees of the target: its KV, its layers, scratch blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.engine.runners import Runner
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.model.attention import KVPool, movable
from outrider.verifier_service.scheduling.masks import MaskBlocks


class TargetRunner(Runner, Protocol):
    """The verifier's runner as it is on rank 0."""

    pool: KVPool
    scratch_blocks: range

    @property
    def num_layers(self) -> int: ...


class TargetView:
    """The running engine of this process; `attach` comes after both sides are built."""

    def __init__(self, runner: TargetRunner) -> None:
        self._runner = runner
        self._engine: VerifierEngine | None = None
        self._masks: MaskBlocks | None = None
        self.vocab_size, self.max_model_len = runner.vocab_size, runner.max_model_len
        self.block_size, self.scratch_blocks = runner.block_size, runner.scratch_blocks
        self.num_layers = runner.num_layers

    def attach(self, engine: VerifierEngine) -> None:
        self._engine = engine
        if self._masks is not None:
            engine.use_masks(self._masks)

    def use_masks(self, masks: MaskBlocks) -> None:
        """Let the engine's steps have masks; call it before `attach`."""
        self._masks = masks

    def mask_rows(self, request_id: str, num_tokens: int) -> torch.Tensor | None:
        """Return what the masks of the last step have guessed, see `MaskRows.after`."""
        assert self._engine is not None, "the view is not attached to an engine"
        return self._engine.mask_rows.after(request_id, num_tokens)

    def request(self, request_id: str) -> Request | None:
        """Return the engine's record of a request, to be read only; None: the request is gone."""
        assert self._engine is not None, "the view is not attached to an engine"
        return self._engine.requests.get(request_id)

    def execute(self, batch: ScheduledBatch) -> torch.Tensor:
        """Run a drafter's batch, which must write into scratch blocks alone; return the logits of its rows."""
        assert self._engine is not None, "the view is not attached to an engine"
        moves = self._engine.scheduler.take_moves()  # KV of accepted tree paths, which the drafter reads now
        moved = replace(
            batch, move_sources=[source for source, _ in moves], move_targets=[target for _, target in moves]
        )
        return self._runner.execute(moved)

    def block_similarity(self, block_ids: Sequence[int], slot: int) -> torch.Tensor:
        """Return how like each block's mean key is to the key in `slot`, in a middle layer: [num_blocks]."""
        assert self._engine is not None, "the view is not attached to an engine"
        source_of = {target: source for source, target in self._engine.scheduler.moves}
        slot = source_of.get(slot, slot)  # it is moved by the next batch
        pool = self._runner.pool
        keys = pool.keys[sorted(pool.keys)[len(pool.keys) // 2]]
        blocks = movable(keys).view(pool.num_blocks, pool.block_size, -1)
        read = blocks.index_select(0, torch.tensor(block_ids, device=keys.device))
        means = read.view(keys.dtype).float().mean(dim=1)
        return means @ keys[slot].flatten().float()
