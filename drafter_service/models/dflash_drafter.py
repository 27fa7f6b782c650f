"""Draft with DFlash: contexts of the target's states in paged KV, blocks of mask tokens that are never cached.

A session's context is the keys and values that the drafter's layers make of the target's states. Each round adds those
of the tokens that were committed since; they never change. A block attends to the context and to itself in both
directions, and takes no slots of the pool. Its size is the one that the drafter was trained with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from outrider.drafter_service.engine.drafter import Ask
from outrider.drafter_service.heads.dflash import DFlashHead
from outrider.drafter_service.heads.head_layer import Attend
from outrider.drafter_service.models.one_pass_drafter import Canvas, Chunk
from outrider.verifier_service.gpu.transfers import upload
from outrider.verifier_service.messages.draft import DraftNeeds
from outrider.verifier_service.model.attention import KVPool
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.settled import limit_to_pool, resolve_num_blocks

MIN_WIDTH = 16  # block tables up to this width share one call, wider ones with those of up to twice the width


class DFlashModel:
    """A `OnePassModel` over a DFlash head and a KV pool for its contexts."""

    pages_canvas = False

    def __init__(self, head: DFlashHead, *, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self._head = head
        weight = head.embed_tokens.weight
        self._device, self._dtype = weight.device, weight.dtype
        self.num_blocks, self.block_size, self.max_model_len = num_blocks, block_size, max_model_len
        self.vocab_size, self.needs = head.vocab_size, DraftNeeds(taps=head.taps)
        self.edges = self._after if head.has_edges else None
        self.pool = KVPool(
            dict.fromkeys(range(len(head.layers)), head.layer_shape),
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=self._dtype,
            device=self._device,
        )

    @classmethod
    def sized_by(cls, head: DFlashHead, config: ModelConfig) -> DFlashModel:
        """Size the KV pool and bound the context as a model's of the same config."""
        weight = head.embed_tokens.weight
        shapes = dict.fromkeys(range(len(head.layers)), head.layer_shape)
        num_blocks = resolve_num_blocks(config, shapes, weight.dtype, weight.device)
        max_model_len = min(config.max_model_len or head.max_positions, head.max_positions)
        max_model_len = limit_to_pool(config, max_model_len, num_blocks * config.block_size)
        return cls(head, num_blocks=num_blocks, block_size=config.block_size, max_model_len=max_model_len)

    def context(self, ask: Ask) -> range:
        """Return the tokens whose states the target has given; the first ones may be missing (NaN)."""
        if ask.states is None or ask.states.shape[1] != self._head.state_size:
            return range(0)
        stop = min(len(ask.states), len(ask.token_ids) - 1)
        there = ask.states[:stop, 0].isnan().logical_not().nonzero()
        return range(int(there[0]), stop) if len(there) else range(0)

    def canvas(self, ask: Ask) -> Canvas:
        """Lay out a block, forced tokens in the place of its first masks."""
        config = self._head.config
        known = [ask.token_ids[-1], *ask.forced_ids][: config.block_size]
        token_ids = known + [config.mask_token_id] * (config.block_size - len(known))
        first = 0 if config.sample_from_anchor else 1  # the row that guesses the token after the last committed one
        num_guesses = min(ask.length, config.num_guesses) if self.context(ask) else 0
        return Canvas(token_ids=token_ids, rows=range(first + len(ask.forced_ids), first + num_guesses))

    @torch.inference_mode()
    def execute(self, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        self._write_context([chunk for chunk in chunks if chunk.end > chunk.begin])
        blocks = [(chunk, chunk.canvas) for chunk in chunks if chunk.canvas is not None]
        if not blocks:
            return []
        tables = [chunk.block_table for chunk, _ in blocks]
        lengths = [chunk.num_cached + chunk.end - chunk.begin for chunk, _ in blocks]
        contexts = _Contexts.of(self.pool, tables, lengths)
        size = self._head.config.block_size
        firsts = np.array([[len(chunk.ask.token_ids) - 1] for chunk, _ in blocks])
        token_ids = np.array([canvas.token_ids for _, canvas in blocks])
        wanted = [index * size + row for index, (_, canvas) in enumerate(blocks) for row in canvas.rows]
        sent_ids, positions, sent_rows = upload(
            [token_ids, firsts + np.arange(size), np.array(wanted, np.int64)], self._device
        )
        attends = [contexts.attend(layer) for layer in range(len(self._head.layers))]
        output = self._head(sent_ids, positions, attends)  # [num_blocks, block_size, hidden_size]
        rows = output.flatten(0, 1).index_select(0, sent_rows)  # [num_rows, hidden_size]
        found = rows if self.edges else self._head.in_target_ids(self._head.logits(rows).float())
        return list(found.split([len(canvas.rows) for _, canvas in blocks]))

    @torch.inference_mode()
    def _after(self, rows: torch.Tensor, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits, confidences = self._head.after(rows, previous)
        return self._head.in_target_ids(logits.float()), confidences

    def _write_context(self, chunks: Sequence[Chunk]) -> None:
        if not chunks:
            return
        slots: list[int] = []
        positions: list[int] = []
        given: list[torch.Tensor] = []
        for chunk in chunks:
            assert chunk.ask.states is not None
            slots += chunk.slots(chunk.end - chunk.begin, self.block_size)
            positions += range(chunk.begin, chunk.end)
            given.append(chunk.ask.states[chunk.begin : chunk.end])
        features = self._head.combine(torch.cat(given).to(self._device, self._dtype))
        at, places = upload([np.array(slots), np.array(positions)], self._device)
        layers = self._head.context_kv(features, places)
        for layer, (key, value) in enumerate(layers):
            self.pool.write(layer, at, key, value)


@dataclass(frozen=True, slots=True)
class _Group:
    """Blocks whose contexts are read in one call, padded to the longest block table."""

    members: torch.Tensor  # int64 [num_members] into the step's blocks
    block_ids: torch.Tensor  # int64 [num_members * width]
    is_seen: torch.Tensor  # bool [num_members, 1, 1, width * block_size] the slots that hold context


class _Contexts:
    """What the blocks of one forward attend to besides themselves."""

    def __init__(self, pool: KVPool, groups: Sequence[_Group]) -> None:
        self._pool, self._groups = pool, groups

    @classmethod
    def of(cls, pool: KVPool, tables: Sequence[list[int]], lengths: Sequence[int]) -> _Contexts:
        """Put contexts of like length together: a long one would have all of its group read as much."""
        by_width: dict[int, list[int]] = defaultdict(list)
        for index, table in enumerate(tables):
            by_width[(max(len(table), MIN_WIDTH) - 1).bit_length()].append(index)
        return cls(pool, [_group(pool, members, tables, lengths) for members in by_width.values()])

    def attend(self, layer: int) -> Attend:
        """Return one layer's attention, every token of a block to its whole context and to the whole block."""

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            output = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
            for group in self._groups:
                output[group.members] = self._attend_group(group, layer, query, key, value)
            return output

        return attend

    def _attend_group(
        self, group: _Group, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Return [num_members, block_size, num_heads, head_dim]."""
        context_key, context_value = self._pool.gather(layer, group.block_ids, len(group.members))
        own_key, own_value = key[group.members], value[group.members]
        sees_itself = group.is_seen.new_ones(*group.is_seen.shape[:3], own_key.shape[2])
        output = F.scaled_dot_product_attention(
            query[group.members],
            torch.cat([context_key, own_key], dim=2),
            torch.cat([context_value, own_value], dim=2),
            attn_mask=torch.cat([group.is_seen, sees_itself], dim=3),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.transpose(1, 2)


def _group(pool: KVPool, members: Sequence[int], tables: Sequence[list[int]], lengths: Sequence[int]) -> _Group:
    width = max(len(tables[index]) for index in members)
    block_ids = [block for index in members for block in [*tables[index], *[0] * (width - len(tables[index]))]]
    own_lengths = np.array([lengths[index] for index in members])
    sent, sent_ids, sent_lengths = upload([np.array(members), np.array(block_ids), own_lengths], pool.device)
    is_seen = torch.arange(width * pool.block_size, device=pool.device) < sent_lengths[:, None]
    return _Group(members=sent, block_ids=sent_ids, is_seen=is_seen[:, None, None])
