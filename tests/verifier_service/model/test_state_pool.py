"""Tapped states by KV slot: kept, copied, moved and told."""

from __future__ import annotations

import pytest
import torch

from outrider.verifier_service.messages.draft import FINAL_TAP
from outrider.verifier_service.model.state_pool import MAX_MESSAGE_BYTES, StatePool, require_taps
from support import parts
from tiny.played_graphs import without_host

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
    request = parts.request("r", [1], block_table=[1, 0])
    (message,) = pool.messages(request, 2, 6)
    assert (message.request_id, message.position, message.width) == ("r", 2, WIDTH)
    assert message.dtype == str(dtype).removeprefix("torch.")
    decoded = torch.frombuffer(bytearray(message.data), dtype=dtype).view(-1, WIDTH)
    assert torch.equal(decoded, rows(6, 7, 0, 1).to(dtype))
    assert list(pool.messages(request, 3, 3)) == []


def test_a_long_prompt_is_told_in_pieces():
    pool = make_pool(width=MAX_MESSAGE_BYTES // 16, num_blocks=3)  # four tokens a message
    request = parts.request("r", [1], block_table=[0, 1, 2])
    messages = list(pool.messages(request, 0, 10))
    assert [message.position for message in messages] == [0, 4, 8]
    assert all(len(message.data) <= MAX_MESSAGE_BYTES for message in messages)


def test_a_layer_that_is_not_there_is_refused():
    require_taps((0, 1, FINAL_TAP), num_layers=2)
    with pytest.raises(ValueError, match="state_taps: layer 2, the model has 2"):
        require_taps((2,), num_layers=2)


def test_writes_that_nobody_has_read_yet_are_those_of_their_step() -> None:
    """The device's memory is another step's by the time that a write is put where it belongs."""
    pool = StatePool(num_blocks=4, block_size=2, width=1, dtype=torch.float32)
    held = torch.zeros(2, 1)
    for step in range(5):
        held.fill_(step)
        pool.write([step, 7], held)
        held.fill_(-1.0)
    assert pool.read([0, 1, 2, 3], 0, 8)[:, 0].tolist() == [0, 1, 2, 3, 4, 0, 0, 4]


def test_moves_and_copies_come_after_the_writes_before_them() -> None:
    pool = StatePool(num_blocks=4, block_size=2, width=1, dtype=torch.float32)
    pool.write([0, 1], torch.tensor([[5.0], [6.0]]))
    pool.move_slots([1], [2])
    pool.write([1], torch.tensor([[7.0]]))
    pool.copy_blocks([0], [3])
    pool.write([0], torch.tensor([[8.0]]))
    assert pool.read([0, 1, 2, 3], 0, 8)[:, 0].tolist() == [8, 7, 6, 0, 0, 0, 5, 7]


def test_a_write_reads_nothing_back() -> None:
    pool = StatePool(num_blocks=4, block_size=2, width=1, dtype=torch.float32)
    states = torch.ones(1, 1)
    without_host(lambda: pool.write([3], states))
    assert pool.read([1], 1, 2).tolist() == [[1.0]]
