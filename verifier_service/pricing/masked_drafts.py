"""Drafts by masks: a draft costs its own rows, the masks' for the next one, and what steps with masks take besides.

The masks: `verifier_service/scheduling/masks.py`. All rows of a step are counted: with blocks of k masks for every
outcome, a draft of n tokens takes n + (n + 1) k rows. The profile of step times is of plain steps. What steps with
masks take beyond it (another attention kernel, the host's work) is learnt from them, and so is the wait for drafts. A
request drafts if more tokens are expected per second than in plain steps, and by the length that brings most.

That is decided for a longer time, whatever the last draft's outcome was: whoever stops for one round loses two drafts.
So a probe, too, takes two rounds: a step with masks and no draft yet, and one that verifies what they have guessed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from outrider.verifier_service.pricing.cost_model import StepShape
from outrider.verifier_service.pricing.load_levels import LoadLevel
from outrider.verifier_service.pricing.policies import Books, Load, Pinned
from outrider.verifier_service.pricing.probes import PROBE_LENGTH, PROBE_ROUNDS
from outrider.verifier_service.pricing.request_table import Floats, Ints, Rounds, Rows
from outrider.verifier_service.scheduling.masks import MaskBlocks

TRIAL_STEPS = 16  # with masks, before what they take beyond the profile counts: first calls of kernels are among them
SMOOTHING = 0.02  # share of the last round: a memory of about 50


@dataclass(slots=True)
class MaskedDrafts(Pinned):
    """What each draft brings decides, beside what it and the masks for the next one cost."""

    blocks: MaskBlocks
    is_on: bool = True  # the last request that asked drafts because that pays
    _num_trial_steps: int = TRIAL_STEPS  # left
    _share_guessed: float = 1.0  # of rounds: an outcome that no block was for leaves the next round without a draft
    _probing: set[int] = field(default_factory=set)  # rows of requests whose next step has the masks of a probe

    def num_rows(self, length: int) -> int:
        """Return how many rows a draft and the masks behind it take."""
        return length + self.blocks.length * min(length + 1, self.blocks.num_blocks or length + 1)

    def best_lengths(self, level: LoadLevel, plain: StepShape, survivals: Floats) -> Ints:
        """Return the length of each row's draft that brings most per second; 0: without masks.

        `plain`: a step of one token for each request. All are assumed to draft as this one does: the rows of all make a
        step compute-bound, and all share what it takes besides. `survivals`: [rows, length].
        """
        lengths = range(1, survivals.shape[1] + 1)
        took_s = [self._seconds(level, plain, plain.num_tokens, length) for length in lengths]
        rates = (1.0 + self._share_guessed * survivals.cumsum(axis=1)) / took_s
        return np.where(rates.max(axis=1) > 1.0 / level.cost.seconds(plain), 1 + rates.argmax(axis=1), 0)

    def _seconds(self, level: LoadLevel, plain: StepShape, num_requests: int, length: int) -> float:
        """Return what steps take on average if so many of their requests draft."""
        num_rows = self._share_guessed * self.num_rows(length) + (1.0 - self._share_guessed) * self.num_rows(0)
        shape = replace(plain, num_tokens=plain.num_tokens + round(num_requests * num_rows))
        if self._num_trial_steps:
            return level.cost.seconds(shape)
        return level.cost.seconds(replace(shape, is_drafting=True)) + level.exposure.seconds(length)

    def ask(self, books: Books, load: Load, rows: Rows, rounds: Rounds, limits: Ints) -> None:
        """Ask for what pays, else now and then for the tokens of a probe, which is charged."""
        level, plain = load.level, replace(load.base, num_tokens=load.num_requests)
        survivals = books.survival.survivals(rows, int(rounds.drafter[0]), int(limits.max()), are_usual=True)
        lengths = np.minimum(self.best_lengths(level, plain, survivals), limits)
        self.is_on = bool(lengths[-1])
        num_rounds_off = books.table.requests.num_rounds_off[rows]
        self._probing -= {*rows[lengths > 0].tolist()}
        for place in np.flatnonzero(lengths == 0):
            row, is_due = int(rows[place]), num_rounds_off[place] + 1 >= PROBE_ROUNDS and books.probes.is_left
            if row in self._probing or is_due:
                self._probing ^= {row}  # a probe takes two rounds
                lengths[place] = length = min(PROBE_LENGTH, int(limits[place]))
                books.probes.spend(self._seconds(level, plain, 1, length) - level.cost.seconds(plain))
        rounds.length = lengths
        rounds.is_opening |= lengths == 0  # no masks: the next round that asks has no draft yet

    def observe_step(self, were_guessed: Iterable[bool]) -> None:
        """Count a step with masks; for each request that had masks in its last step too, whether it had a draft."""
        self._num_trial_steps = max(0, self._num_trial_steps - 1)
        for was_guessed in were_guessed:
            self._share_guessed += SMOOTHING * (was_guessed - self._share_guessed)

    def forget(self, row: int) -> None:
        self._probing.discard(row)
