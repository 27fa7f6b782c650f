"""What Medusa's heads and the MLP speculator share: both draft from the target's last hidden state alone.

The target has not computed the last committed token yet. So the state is that of the token before:

tokens   |<- committed, n of them ->|<- drafted ->|
state                          n-2     token n-1 was drawn from it; the heads guess the tokens after n-1
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import torch

from outrider.drafter_service.engine.drafter import Ask, SessionKey
from outrider.drafter_service.engine.tree_growth import DraftRules
from outrider.verifier_service.messages.draft import FINAL_TAP, DraftNeeds

LAST_STATE_NEEDS = DraftNeeds(taps=(FINAL_TAP,), last_state_only=True)


class LastStateDrafter:
    """The part of a `Drafter` that keeps nothing between two asks."""

    needs = LAST_STATE_NEEDS

    def __init__(
        self, *, vocab_size: int, max_model_len: int, rng: torch.Generator, branching: int, top_n: int = 32
    ) -> None:
        """Propose ids below `vocab_size`, the target's; the heads may know fewer or (padding) more.

        Rows on the wire have `top_n` tokens; a node of a tree has at most `branching` children.
        """
        if min(vocab_size, top_n, branching) < 1:
            raise ValueError("vocab_size, top_n and branching must be positive")
        self.vocab_size, self.max_model_len, self._branching = vocab_size, max_model_len, branching
        self._rules = DraftRules(rng=rng, vocab_size=vocab_size, top_n=top_n)

    def release(self, key: SessionKey) -> None:
        """Do nothing: nothing is kept."""

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        """Do nothing: nothing is kept."""


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
