"""What Medusa's heads and the MLP speculator share: both draft from the target's last hidden state alone.

The target has not computed the last committed token yet. So the state is that of the token before:

tokens   |<- committed, n of them ->|<- drafted ->|
state                          n-2     token n-1 was drawn from it; the heads guess the tokens after n-1
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from outrider.drafter_service.engine.drafter import Ask
from outrider.verifier_service.messages.draft import FINAL_TAP, DraftNeeds

LAST_STATE_NEEDS = DraftNeeds(taps=(FINAL_TAP,), last_state_only=True)


def has_state(ask: Ask, width: int) -> bool:
    """Return whether an ask brings a state of the width that a head reads."""
    return ask.states is not None and len(ask.states) > 0 and ask.states.shape[1] == width


def last_states(asks: Sequence[Ask], like: torch.Tensor) -> torch.Tensor:
    """Stack the asks' last states, each [num_states, width], as a parameter's dtype and device: [num_asks, width]."""
    rows = [ask.states[-1] for ask in asks if ask.states is not None]
    assert len(rows) == len(asks), "an ask without a state"
    return torch.stack(rows).to(like.device, like.dtype)


def draft_depth(ask: Ask, num_guesses: int) -> int:
    """Return the depth of a draft whose drafter can guess `num_guesses` tokens; forced tokens may go deeper."""
    return max(min(ask.length, num_guesses), min(ask.length, len(ask.forced_ids)))


def first_within(num_tokens: Sequence[int], max_num_tokens: int) -> int:
    """Count the first drafts that fit a budget together; the very first always counts."""
    totals = itertools.accumulate(num_tokens)
    return max(1, sum(1 for total in totals if total <= max_num_tokens))
