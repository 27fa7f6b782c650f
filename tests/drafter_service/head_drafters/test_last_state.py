from __future__ import annotations

import pytest
import torch

from outrider.drafter_service.engine.drafter import Ask, SessionKey
from outrider.drafter_service.head_drafters.last_state import draft_depth, first_within, has_state, last_states
from outrider.verifier_service.messages.draft import DraftSampling


def make_ask(states: torch.Tensor | None = None, *, length: int = 4, forced_ids: tuple[int, ...] = ()) -> Ask:
    return Ask(
        key=SessionKey("v", "r"),
        ask_id=1,
        token_ids=[1],
        sampling=DraftSampling(temperature=0.0),
        length=length,
        states=states,
        forced_ids=forced_ids,
    )


@pytest.mark.parametrize(
    ("num_guesses", "num_forced", "depth"), [(0, 0, 0), (3, 0, 3), (9, 0, 4), (0, 2, 2), (3, 9, 4), (3, 2, 3)]
)
def test_forced_tokens_may_go_further_than_guesses(num_guesses: int, num_forced: int, depth: int):
    assert draft_depth(make_ask(forced_ids=(5,) * num_forced), num_guesses) == depth


@pytest.mark.parametrize(("budget", "count"), [(1, 1), (3, 1), (4, 1), (5, 2), (9, 2), (10, 3), (99, 3)])
def test_a_budget_holds_the_oldest(budget: int, count: int):
    assert first_within([3, 2, 5], budget) == count


def test_states_of_another_width_are_none():
    assert has_state(make_ask(torch.zeros(2, 8)), 8)
    assert not has_state(make_ask(torch.zeros(2, 7)), 8)
    assert not has_state(make_ask(torch.zeros(0, 8)), 8)
    assert not has_state(make_ask(), 8)


def test_last_states_take_the_parameters_dtype():
    asks = [make_ask(torch.tensor([[1.0], [2.0]])), make_ask(torch.tensor([[3.0]]))]
    stacked = last_states(asks, torch.ones(1, dtype=torch.bfloat16))
    assert stacked.dtype == torch.bfloat16
    assert stacked.tolist() == [[2.0], [3.0]]
