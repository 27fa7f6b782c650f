"""The target's hidden states from vLLM's steps, for drafters that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from outrider.verifier_service.messages.batch import slots_of
from outrider.verifier_service.messages.draft import FINAL_TAP, States
from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.model.state_pool import StatePool


class StepStates:
    """A `StateSource`: tapped states in host memory, by KV slot, so that a prefix in vLLM's cache has its states.

    Memory: the taps' hidden sizes for every slot of vLLM's KV cache.
    """

    def __init__(self, taps: Sequence[int]) -> None:
        self._taps = tuple(taps)
        self._layers = sorted({tap for tap in taps if tap != FINAL_TAP})
        self._pool: StatePool | None = None  # None: before the first step, which gives width and dtype

    def write(
        self,
        runner: Any,
        scheduler_output: Any,
        hidden_states: torch.Tensor,
        layer_inputs: Sequence[torch.Tensor] | None,
    ) -> None:
        """Store the states of a step of vLLM's V1 runner; raises as `keep`."""
        batch = runner.input_batch
        spans = [
            (int(batch.num_computed_tokens_cpu[row]), scheduler_output.num_scheduled_tokens[request_id])
            for row, request_id in enumerate(batch.req_ids)
        ]
        # the kernels' block size, which may be a part of vLLM's
        block_size = batch.block_table[0].block_size
        self.keep(
            runner.kv_cache_config,
            block_size,
            spans,
            lambda row, first: block_table_of(batch, row, first),
            hidden_states,
            layer_inputs,
        )

    def keep(
        self,
        kv_cache_config: Any,
        block_size: int,
        spans: Sequence[tuple[int, int]],
        blocks: Callable[[int, int], Sequence[int]],
        hidden_states: torch.Tensor,
        layer_inputs: Sequence[torch.Tensor] | None,
    ) -> None:
        """Store the states of a step; `layer_inputs` are the tapped layers', in order.

        `spans` has each row's first computed position and the number of positions; `blocks(row, first)` returns the
        row's KV blocks from its `first` on. Raises `ValueError` if groups of layers have separate KV: a token would
        have several slots.
        """
        by_tap = {FINAL_TAP: hidden_states, **dict(zip(self._layers, layer_inputs or (), strict=True))}
        num_tokens = sum(count for _, count in spans)
        states = torch.cat([by_tap[tap][:num_tokens] for tap in self._taps], dim=-1)
        if self._pool is None:
            self._pool = _new_pool(kv_cache_config, block_size, states)
        slots: list[int] = []
        for row, (start, count) in enumerate(spans):
            first_block, place = divmod(start, block_size)
            # only the blocks that the step writes: a block table is as long as the context
            slots += slots_of(blocks(row, first_block), range(place, place + count), block_size)
        self._pool.write(slots, states)

    def messages(self, request: Request, start: int, stop: int) -> Iterator[States]:
        """Yield the states of a request's positions [start, stop)."""
        assert self._pool is not None, "a request that drafts has had a step"
        return self._pool.messages(request, start, stop)


def block_table_of(batch: Any, row: int, first: int = 0) -> list[int]:
    """Return the KV blocks of a row of the V1 runner's batch, from its `first` on."""
    table = batch.block_table[0]
    blocks: list[int] = table.block_table.np[row, first : table.num_blocks_per_row[row]].tolist()
    return blocks


def _new_pool(kv_cache_config: Any, block_size: int, states: torch.Tensor) -> StatePool:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ValueError("state_taps: vLLM keeps this model's KV in several groups, with which states are not kept")
    num_slots = kv_cache_config.num_blocks * groups[0].kv_cache_spec.block_size
    return StatePool(
        num_blocks=num_slots // block_size, block_size=block_size, width=states.shape[-1], dtype=states.dtype
    )
