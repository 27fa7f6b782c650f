from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.drafter_service.engine.state_buffer import MAX_STATE, StateBuffer, UnusableStatesError
from outrider.verifier_service.messages.draft import DraftNeeds, States

ALL = DraftNeeds(taps=(0,))
LAST = DraftNeeds(taps=(0,), last_state_only=True)
NAN, INF = float("nan"), float("inf")


def states(position: int, *rows: tuple[float, ...], **fields: object) -> States:
    data = np.array(rows, dtype=np.float32).tobytes()
    given = {"position": position, "dtype": "float32", "width": len(rows[0]), "data": data, **fields}
    return States(request_id="r", **given)  # type: ignore[arg-type]


def filled(*messages: States, needs: DraftNeeds = ALL) -> StateBuffer:
    buffer = StateBuffer()
    for message in messages:
        buffer.append(message, needs)
    return buffer


def test_states_come_in_order_and_stay():
    buffer = filled(states(0, (1, 2)), states(1, (3, 4), (5, 6)))
    assert buffer.tensor is not None
    assert buffer.tensor.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert filled().tensor is None


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (states(0, (1, 2)), "position"),
        (states(3, (1, 2)), "position"),
        (states(-1, (1, 2)), "position"),
        (states(1, (1, 2, 3, 4)), "width"),
        (states(1, (1, 2), dtype="float64"), "dtype"),
        (states(1, (1, 2), dtype=""), "dtype"),
        (states(1, (1, 2), width=0), "data"),
        (states(1, (1, 2), width=-2), "data"),
        (states(1, (1, 2), width=1 << 62), "data"),
        (states(1, (1, 2), data=b""), "data"),
        (states(1, (1, 2), data=bytes(7)), "data"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(message: States, field: str):
    buffer = filled(states(0, (1, 2)))
    with pytest.raises(ValueError, match=f"^{field}:"):
        buffer.append(message, ALL)
    assert buffer.tensor is not None
    assert buffer.tensor.tolist() == [[1, 2]]


@pytest.mark.parametrize("value", [NAN, INF, -INF, 2 * MAX_STATE])
def test_what_would_spread_through_a_drafters_kv_is_refused_for_good(value: float):
    for message in (states(0, (1, value)), states(0, (1, 2), (value, 3)), states(0, (NAN, 1), (1, 2), (1, value))):
        with pytest.raises(UnusableStatesError, match="data"):
            filled(message)
    with pytest.raises(UnusableStatesError, match="data"):
        filled(states(0, (1, value)), needs=LAST)


def test_only_the_first_states_may_be_missing():
    buffer = filled(states(0, (NAN, NAN)), states(1, (NAN, NAN), (1, 2)), states(3, (MAX_STATE, -MAX_STATE)))
    assert buffer.tensor is not None
    assert buffer.tensor[:, 0].isnan().tolist() == [True, True, False, False]
    with pytest.raises(UnusableStatesError, match="missing"):
        buffer.append(states(4, (NAN, NAN), (1, 2)), ALL)


def test_the_last_state_alone_holds_no_more_than_itself():
    buffer = filled(states(7, *[(1, 2)] * 1000, (3, 4)), needs=LAST)
    assert buffer.tensor is not None
    assert buffer.tensor.tolist() == [[3, 4]]
    assert buffer.num_bytes == 8
    assert buffer.tensor.untyped_storage().nbytes() == 8, "the message it came in is still held"
    buffer.append(states(9, (NAN, NAN)), LAST)
    assert buffer.tensor is None


def test_what_is_held_is_in_proportion_to_what_came():
    wide = States(request_id="r", position=0, dtype="float32", width=1 << 20, data=bytes(4 << 20))
    assert filled(wide).num_bytes == 4 << 20
    long = filled(*(states(position, (1,)) for position in range(100)))
    assert long.num_bytes == 4 * 128


def test_half_precision_is_read_as_float32():
    data = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    message = States(request_id="r", position=0, dtype="bfloat16", width=2, data=data)
    buffer = filled(message)
    assert buffer.tensor is not None
    assert (buffer.tensor.dtype, buffer.tensor.tolist()) == (torch.float32, [[1.5, -2.0]])
