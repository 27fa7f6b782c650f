"""Tapped states by KV slot: kept, copied, moved and told."""

from __future__ import annotations

import pytest
import torch

from outrider.verifier_service.messages.draft import FINAL_TAP
from outrider.verifier_service.messages.request import Request, SamplingParams, SpeculationPlan
from outrider.verifier_service.model.state_pool import MAX_MESSAGE_BYTES, StatePool, StateTaps, states_width
from tiny.models import make_model

BLOCK_SIZE, WIDTH = 4, 3


def make_pool(dtype: torch.dtype = torch.float32, width: int = WIDTH, num_blocks: int = 8) -> StatePool:
    return StatePool(num_blocks=num_blocks, block_size=BLOCK_SIZE, width=width, dtype=dtype)


def rows(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None].expand(-1, WIDTH).contiguous()


def test_states_are_read_by_position():
    pool = make_pool()
    pool.write([13, 14, 4], rows(1, 2, 3))
    assert torch.equal(pool.read([3, 1], 1, 3), rows(1, 2))
    assert torch.equal(pool.read([3, 1], 4, 5), rows(3))
    assert pool.read([3, 1], 2, 2).shape == (0, WIDTH)


def test_moves_read_all_before_they_write():
    pool = make_pool()
    pool.write([0, 1, 2], rows(1, 2, 3))
    pool.move_slots([1, 2], [0, 1])
    assert torch.equal(pool.read([0], 0, 3), rows(2, 3, 3))
    pool.move_slots([], [])


def test_copied_blocks_are_whole():
    pool = make_pool()
    pool.write([4, 5, 6, 7], rows(1, 2, 3, 4))
    pool.copy_blocks([1], [6])
    assert torch.equal(pool.read([6], 0, 4), rows(1, 2, 3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_messages_carry_the_states_bit_by_bit(dtype: torch.dtype):
    pool = make_pool(dtype)
    pool.write(list(range(8)), rows(*range(8)))
    request = Request(
        request_id="r",
        sampling=SamplingParams(),
        token_ids=[1],
        num_prompt_tokens=1,
        plan=SpeculationPlan(),
        arrival_s=0.0,
        block_table=[1, 0],
    )
    (message,) = pool.messages(request, 2, 6)
    assert (message.request_id, message.position, message.width) == ("r", 2, WIDTH)
    assert message.dtype == str(dtype).removeprefix("torch.")
    decoded = torch.frombuffer(bytearray(message.data), dtype=dtype).view(-1, WIDTH)
    assert torch.equal(decoded, rows(6, 7, 0, 1).to(dtype))
    assert list(pool.messages(request, 3, 3)) == []


def test_a_long_prompt_is_told_in_pieces():
    pool = make_pool(width=MAX_MESSAGE_BYTES // 16, num_blocks=3)  # four tokens a message
    request = Request(
        request_id="r",
        sampling=SamplingParams(),
        token_ids=[1],
        num_prompt_tokens=1,
        plan=SpeculationPlan(),
        arrival_s=0.0,
        block_table=[0, 1, 2],
    )
    messages = list(pool.messages(request, 0, 10))
    assert [message.position for message in messages] == [0, 4, 8]
    assert all(len(message.data) <= MAX_MESSAGE_BYTES for message in messages)


def test_taps_are_the_librarys_hidden_states():
    model = make_model(num_hidden_layers=3)
    taps = StateTaps(model, (2, FINAL_TAP, 0))
    token_ids = torch.tensor([[5, 6, 7]])
    hidden = model(input_ids=token_ids, output_hidden_states=True).hidden_states
    taken = taps.take()
    assert taken.shape == (3, states_width(model, (2, FINAL_TAP, 0)))
    assert torch.equal(taken, torch.cat([hidden[2][0], hidden[3][0], hidden[0][0]], dim=1))
    taps.is_on = False
    model(input_ids=token_ids)
    with pytest.raises(KeyError):
        taps.take()


def test_a_layer_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="state_taps: layer 2, the model has 2"):
        StateTaps(make_model(), (2,))
