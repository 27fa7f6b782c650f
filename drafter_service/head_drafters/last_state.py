"""What drafters of a few steps after the target's last hidden state share: Medusa's heads, the MLP speculator.

The last committed token has not been computed by the target yet, so the state that it drafts from is that of the token
before:

tokens   |<- committed, n of them ->|<- drafted ->|
state                          n-2     the heads know what follows it: token n-1, which was drawn from it, and guess on
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from outrider.drafter_service.engine.drafter import Ask
from outrider.verifier_service.messages.draft import FINAL_TAP, DraftNeeds

LAST_STATE_NEEDS = DraftNeeds(taps=(FINAL_TAP,), last_state_only=True)


def has_state(ask: Ask, width: int) -> bool:
    """Say whether a head of a certain width can draft for an ask."""
    return ask.states is not None and len(ask.states) > 0 and ask.states.shape[1] == width


def last_states(asks: Sequence[Ask], like: torch.Tensor) -> torch.Tensor:
    """Stack the asks' last states, each [num_states, width], as a parameter's dtype and device: [num_asks, width]."""
    rows = [ask.states[-1] for ask in asks if ask.states is not None]
    assert len(rows) == len(asks), "an ask without a state"
    return torch.stack(rows).to(like.device, like.dtype)


def draft_depth(ask: Ask, num_guesses: int) -> int:
    """Return how deep a draft gets of which the drafter can guess `num_guesses` tokens; forced ones may go further."""
    return max(min(ask.length, num_guesses), min(ask.length, len(ask.forced_ids)))


def first_within(num_tokens: Sequence[int], max_num_tokens: int) -> int:
    """Count the first drafts that fit a budget together; the first of all fits any."""
    totals = itertools.accumulate(num_tokens)
    return max(1, sum(1 for total in totals if total <= max_num_tokens))
