"""The target's hidden states of vLLM's steps, for drafters that read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from outrider.verifier_service.messages.batch import slots_of
from outrider.verifier_service.messages.draft import FINAL_TAP, States
from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.model.state_pool import StatePool


class StepStates:
    """Keep tapped states in the host's memory by the KV slots of their tokens: what vLLM's prefix cache knows has them.

    A `StateSource`. Memory: the taps' hidden sizes for every slot of vLLM's KV cache.
    """

    def __init__(self, taps: Sequence[int]) -> None:
        self._taps = tuple(taps)
        self._layers = sorted({tap for tap in taps if tap != FINAL_TAP})
        self._pool: StatePool | None = None  # None: no step was seen yet, which tells width and type

    def write(
        self,
        runner: Any,
        scheduler_output: Any,
        hidden_states: torch.Tensor,
        layer_inputs: Sequence[torch.Tensor] | None,
    ) -> None:
        """Keep the states of a step of vLLM's runner: `layer_inputs` are those of the tapped layers, in their order.

        Raises `ValueError` where layers keep their KV apart: a token then has a slot for each kind of them.
        """
        batch = runner.input_batch
        by_tap = {FINAL_TAP: hidden_states, **dict(zip(self._layers, layer_inputs or (), strict=True))}
        num_tokens = sum(scheduler_output.num_scheduled_tokens[request_id] for request_id in batch.req_ids)
        states = torch.cat([by_tap[tap][:num_tokens] for tap in self._taps], dim=-1)
        if self._pool is None:
            self._pool = _new_pool(runner, states)
        slots: list[int] = []
        block_size = self._pool.block_size
        for row, request_id in enumerate(batch.req_ids):
            first_block, place = divmod(int(batch.num_computed_tokens_cpu[row]), block_size)
            places = range(place, place + scheduler_output.num_scheduled_tokens[request_id])
            # of the blocks that the step writes alone: a table is as long as its context
            slots += slots_of(block_table_of(batch, row, first_block), places, block_size)
        self._pool.write(slots, states)

    def messages(self, request: Request, start: int, stop: int) -> Iterator[States]:
        """Say the states of a request's positions [start, stop)."""
        assert self._pool is not None, "a request that drafts has had a step"
        return self._pool.messages(request, start, stop)


def block_table_of(batch: Any, row: int, first: int = 0) -> list[int]:
    """Return the KV blocks of a row of vLLM's batch, from its `first` on."""
    table = batch.block_table[0]
    blocks: list[int] = table.block_table.np[row, first : table.num_blocks_per_row[row]].tolist()
    return blocks


def _new_pool(runner: Any, states: torch.Tensor) -> StatePool:
    groups = runner.kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ValueError("state_taps: vLLM keeps this model's KV in several groups, with which states are not kept")
    block_size = runner.input_batch.block_table[0].block_size  # of the kernels, which may split vLLM's own blocks
    num_slots = runner.kv_cache_config.num_blocks * groups[0].kv_cache_spec.block_size
    return StatePool(
        num_blocks=num_slots // block_size, block_size=block_size, width=states.shape[-1], dtype=states.dtype
    )
