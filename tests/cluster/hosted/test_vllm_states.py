"""Hidden states of another engine's steps, kept by KV slot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.cluster.hosted.vllm_states import StepStates, block_table_of
from outrider.verifier_service.messages.request import Request, SamplingParams, SpeculationPlan

BLOCK_SIZE, SIZE = 4, 2


def runner_of(*rows: tuple[str, int, list[int]], num_groups: int = 1, num_blocks: int = 8) -> Any:
    """Return vLLM's runner with these rows: id, number of computed tokens, KV blocks."""
    tables = np.zeros((len(rows), 6), dtype=np.int32)
    for row, (_, _, blocks) in enumerate(rows):
        tables[row, : len(blocks)] = blocks
    table = SimpleNamespace(
        block_table=SimpleNamespace(np=tables),
        num_blocks_per_row=np.array([len(blocks) for _, _, blocks in rows], dtype=np.int32),
        block_size=BLOCK_SIZE,
    )
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=2 * BLOCK_SIZE))
    return SimpleNamespace(
        input_batch=SimpleNamespace(
            req_ids=[request_id for request_id, _, _ in rows],
            num_computed_tokens_cpu=np.array([count for _, count, _ in rows], dtype=np.int32),
            block_table=[table],
        ),
        kv_cache_config=SimpleNamespace(num_blocks=num_blocks // 2, kv_cache_groups=[group] * num_groups),
    )


def step(**num_scheduled_tokens: int) -> Any:
    return SimpleNamespace(num_scheduled_tokens=num_scheduled_tokens)


def layer(first: float, count: int) -> torch.Tensor:
    """Return a layer's states of so many tokens, with a row of padding."""
    return torch.arange(first, first + count + 1).unsqueeze(1).repeat(1, SIZE)


def read(states: StepStates, blocks: list[int], start: int, stop: int) -> torch.Tensor:
    request = Request(
        request_id="a",
        sampling=SamplingParams(),
        token_ids=[0] * stop,
        num_prompt_tokens=1,
        plan=SpeculationPlan(),
        arrival_s=0.0,
        block_table=blocks,
    )
    messages = list(states.messages(request, start, stop))
    assert [message.position for message in messages] == [start]
    data = b"".join(bytes(message.data) for message in messages)
    return torch.frombuffer(bytearray(data), dtype=torch.float32).view(-1, messages[0].width)


def test_states_are_joined_in_the_heads_order_and_found_by_the_requests_blocks():
    states = StepStates((5, -1, 2))
    runner = runner_of(("a", 0, [3, 1]), ("b", 2, [6]))
    states.write(runner, step(a=6, b=2), layer(1000.0, 8), [layer(200.0, 8), layer(500.0, 8)])
    assert read(states, [3, 1], 0, 6)[:, ::SIZE].tolist() == [
        [500.0 + place, 1000.0 + place, 200.0 + place] for place in range(6)
    ]
    assert read(states, [6], 2, 4)[:, 0].tolist() == [506.0, 507.0]


def test_what_a_prefix_hit_brings_back_has_its_states_and_a_rejected_drafts_are_overwritten():
    states = StepStates((0,))
    runner = runner_of(("a", 0, [2, 4]))
    states.write(runner, step(a=5), layer(0.0, 5), [layer(0.0, 5)])
    states.write(runner_of(("a", 5, [2, 4])), step(a=3), layer(0.0, 3), [layer(50.0, 3)])  # a token and its draft
    states.write(runner_of(("a", 6, [2, 4])), step(a=1), layer(0.0, 1), [layer(60.0, 1)])  # none of it was accepted
    assert read(states, [2, 4], 0, 7)[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 50.0, 60.0]
    states.write(runner_of(("b", 4, [2, 7])), step(b=2), layer(0.0, 2), [layer(90.0, 2)])
    assert read(states, [2, 7], 0, 6)[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 90.0, 91.0]


def test_a_cache_in_several_groups_is_refused_by_name():
    with pytest.raises(ValueError, match="state_taps: vLLM keeps this model's KV in several groups"):
        StepStates((-1,)).write(runner_of(("a", 0, [1]), num_groups=2), step(a=2), layer(0.0, 2), None)


def test_layers_that_were_not_given_out_are_an_error_and_no_silent_nonsense():
    with pytest.raises(ValueError):
        StepStates((1, 2)).write(runner_of(("a", 0, [1])), step(a=2), layer(0.0, 2), [layer(0.0, 2)])


def test_a_rows_blocks_are_plain_integers_without_what_an_earlier_row_left():
    blocks = block_table_of(runner_of(("a", 0, [3, 1])).input_batch, 0)
    assert blocks == [3, 1]
    assert all(type(block) is int for block in blocks)
