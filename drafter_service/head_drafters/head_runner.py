"""Execute packed batches of pairs (state, token) with a head over its own paged KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from outrider.drafter_service.heads.head_layer import LAYER_INDEX, DraftHead, PooledAttend
from outrider.drafter_service.heads.switched import SwitchedHeads
from outrider.verifier_service.gpu.transfers import upload
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.counts import GraphCounts
from outrider.verifier_service.messages.draft import FINAL_TAP
from outrider.verifier_service.model.attention import AttentionHandler, KVPool
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.paged_metadata import fill_placeholders
from outrider.verifier_service.model.runner import attention_context, graph_backend
from outrider.verifier_service.model.settled import limit_to_pool, resolve_num_blocks
from outrider.verifier_service.model.step_graphs import TOKEN_BUCKETS, GraphBackend, StepGraphs

FEEDBACK = (FINAL_TAP,)  # what captured steps return beside logits: as wide as one tap


class HeadRows(NamedTuple):
    """What a head computed for the wanted pairs of a batch."""

    logits: torch.Tensor  # float32 [num_rows, vocab_size] in the target's ids; -inf where the head never drafts
    feedback: torch.Tensor  # [num_rows, hidden_size] the state that follows each pair


class HeadRunner:
    """Runs `SwitchedHeads` over one KV pool; the counterpart of a model's `ModelRunner`."""

    def __init__(
        self,
        heads: SwitchedHeads,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        backend: GraphBackend | None = None,
    ) -> None:
        """`backend` says how steps are captured: when first met, unless `capture` comes before. None: they are not."""
        self.heads = heads
        weight = heads.first.embed_tokens.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.num_blocks, self.block_size, self.max_model_len = num_blocks, block_size, max_model_len
        self.vocab_size, self.state_size = heads.first.vocab_size, heads.first.state_size
        self.pool = KVPool(
            {LAYER_INDEX: heads.first.layer_shape},
            num_blocks=num_blocks if backend is None else num_blocks + 1,  # the last is nobody's
            block_size=block_size,
            dtype=self.dtype,
            device=self.device,
        )
        self.graph_counts = GraphCounts()  # of all parameter sets
        # what a captured step's pairs start from
        self._hidden = torch.zeros(TOKEN_BUCKETS[-1], heads.first.hidden_size, dtype=self.dtype, device=self.device)
        self._models = [HeadModel(heads[index], self._hidden) for index in range(len(heads))]
        self._graphs: list[StepGraphs] = []
        if backend is not None:
            self._graphs = [
                StepGraphs(
                    *(model, self.pool, backend),
                    null_block=num_blocks,
                    max_model_len=max_model_len,
                    taps=FEEDBACK,
                    counts=self.graph_counts,
                )
                for model in self._models
            ]

    @classmethod
    def sized_by(cls, heads: SwitchedHeads, config: ModelConfig) -> HeadRunner:
        """Size the KV pool, bound the context and choose how steps are captured as a model's of the same config."""
        weight = heads.first.embed_tokens.weight
        shapes = {LAYER_INDEX: heads.first.layer_shape}
        num_blocks = resolve_num_blocks(config, shapes, weight.dtype, weight.device)
        max_model_len = min(config.max_model_len or heads.first.max_positions, heads.first.max_positions)
        return cls(
            heads,
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_model_len=limit_to_pool(config, max_model_len, num_blocks * config.block_size),
            backend=graph_backend(config, weight.device),
        )

    def capture(self) -> None:
        """Capture the steps of chains before anything is served, where steps are captured."""
        for graphs in self._graphs:
            graphs.capture()

    @torch.inference_mode()
    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """Make the target's states [num_tokens, state_size] the head's own: [num_tokens, hidden_size]."""
        return self.heads.first.combine(states.to(self.device, self.dtype))

    @torch.inference_mode()
    def execute(
        self,
        batch: ScheduledBatch,
        hidden: torch.Tensor,
        set_index: int = 0,
        *,
        chosen: torch.Tensor | None = None,
    ) -> HeadRows:
        """Run one parameter set over packed pairs: token ids of the batch, states [num_tokens, hidden_size].

        `chosen` are the numbers among which the batch's placeholders are, int64 on the head's device.
        Keys and values are written to the batch's slots; `logits_indices` names the pairs that are wanted.
        """
        assert hidden.shape[0] == batch.num_tokens, (hidden.shape, batch.num_tokens)
        self.pool.copy_blocks(batch.copy_sources, batch.copy_targets)
        numbers = [np.array(each, np.int64) for each in (batch.token_ids, batch.positions, batch.logits_indices)]
        token_ids, positions, rows = upload(numbers, self.device)
        replayed = self._replayed(batch, hidden, set_index, chosen) if self._graphs else None
        if replayed is None:
            model = self._models[set_index]
            if chosen is not None:
                fill_placeholders(token_ids, chosen)
            output, feedback = model.of_pairs(token_ids, hidden, positions, attention_context(batch, self.pool))
            replayed = model.logits(output.index_select(0, rows)), feedback
        logits, feedback = replayed
        return HeadRows(logits=logits, feedback=feedback.index_select(0, rows))

    def _replayed(
        self, batch: ScheduledBatch, hidden: torch.Tensor, set_index: int, chosen: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return what a captured step computes for all pairs; None: this one has none."""
        num_held = min(batch.num_tokens, len(self._hidden))  # a step of more runs eagerly
        self._hidden[:num_held].copy_(hidden[:num_held])
        found = self._graphs[set_index].run(batch, chosen)
        if found is None:
            return None
        logits, feedback = found
        assert feedback is not None
        return logits, feedback


class HeadModel:
    """A head as captured steps know a model: its pairs start from states that lie in memory that stays."""

    def __init__(self, head: DraftHead, hidden: torch.Tensor) -> None:
        self._head, self._hidden = head, hidden
        self.dtype, self.hidden_size = hidden.dtype, head.hidden_size
        self.not_captured = head.not_captured

    def hidden(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: AttentionHandler, *, taps: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert tuple(taps) == FEEDBACK, taps
        return self.of_pairs(token_ids, self._hidden[: len(token_ids)], positions, attend)

    def of_pairs(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: AttentionHandler
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `logits` reads of each pair, and the state that follows it, [num_tokens, hidden_size] each.

        token_ids and positions int64 [num_tokens], hidden [num_tokens, hidden_size].
        """
        output, feedback = self._head(token_ids[None], hidden[None], positions[None], PooledAttend(attend))
        return output[0], feedback[0]

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [num_rows, vocab_size], in the target's ids."""
        return self._head.in_target_ids(self._head.logits(rows).float())
