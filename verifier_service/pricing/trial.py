"""What drafting may lose: drafting begins as a trial, and ends once it has lost much more than it has gained.

The first drafts after a pause cost more than later ones: drafters read what they have missed, their machines are cold,
and their confidences are not calibrated. Whoever stops at the cost of first drafts never sees later ones. So once a
price admits drafts, it holds for a number of drafts and steps or until too much is lost, and at least one token of each
draft is verified. After the trial, too, drafting ends once it has lost too much, whatever past steps promise; then it
pauses, briefly after the first failure and eight times as long after each next one, until drafting has gained again.
Drafts that never pay cost little this way, and a trial that failed by chance is soon repeated.

First calls of kernels and stalls of the machine are no loss of drafting: they are forgiven, within an allowance.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.verifier_service.messages.engine import NEVER

TRIAL_DRAFTS = 16  # asked for in a trial: enough to overrule a new drafter's prior …
TRIAL_STEPS = 4  # … and in this many steps at least: many requests make 16 drafts in one step
MAX_LOSS = 2.0  # that ends drafting, in plain steps: a late draft or two are chance
FIRST_CREDIT = 8.0  # plain steps that the first trial may lose besides: a cold drafter's first ten answers
MAX_CREDIT = 16.0  # clamp on past gains, in plain steps: older gains excuse no loss
FIRST_PAUSE = 64  # plain steps after the first failure …
PAUSE_GROWTH = 8  # … times this after each next one …
MAX_PAUSE = 2048  # … up to this: at two steps lost per trial, drafts that never pay cost 0.1 percent
MAX_ALLOWANCE = 64.0  # plain steps that accidents may cost: three first calls of 150 ms, at 7 ms a step
ALLOWANCE = 0.005  # added to the allowance by every step: accidents that go on are no accidents


@dataclass(slots=True)
class Trial:
    """Whether drafting goes on. Losses are in plain steps; they are bounded by `MAX_LOSS` beyond gains and credit."""

    allowance: float = MAX_ALLOWANCE
    _is_open: bool = False  # drafting goes on
    _num_left: int = 0  # drafts of the trial …
    _num_steps_left: int = 0  # … and its steps with drafts
    _lost: float = -FIRST_CREDIT  # since drafting last failed
    _num_failed: int = 0  # failures since drafting last gained
    _pause: int = 0  # plain steps until the next trial

    @property
    def goes_on(self) -> bool:
        """Whether this is a trial: at least a token of each draft is verified, or it would teach nothing."""
        return self._num_left > 0 or self._num_steps_left > 0

    def settle(self, price: float, best: float, can_pay: bool) -> float:
        """Return the next price: `price` held so far, `best` is the best one over past steps.

        `can_pay`: drafts would pay if they came at once. Otherwise no trial goes on.
        """
        if not self._is_open:
            if best < NEVER and not self._pause:
                self._is_open, self._num_left, self._num_steps_left = True, TRIAL_DRAFTS, TRIAL_STEPS
        elif self._lost >= MAX_LOSS:
            self._pause = min(MAX_PAUSE, FIRST_PAUSE * PAUSE_GROWTH**self._num_failed)
            self._num_failed += 1
            self._lost = 0.0
            self._close()
        elif best >= NEVER:
            if self.goes_on and can_pay:
                return price
            self._close()
        return best if self._is_open else NEVER

    def _close(self) -> None:
        self._is_open, self._num_left, self._num_steps_left = False, 0, 0

    def observe(self, num_drafts: int, lost: float, *, is_accident: bool = False) -> None:
        """Book a step with this many drafts that took `lost` plain steps more than its tokens would have without.

        Of an accident's loss, the allowance is forgiven.
        """
        self._num_left = max(0, self._num_left - num_drafts)
        self._num_steps_left = max(0, self._num_steps_left - 1)
        if is_accident:
            forgiven = min(max(0.0, lost), self.allowance)
            self.allowance -= forgiven
            lost -= forgiven
        else:
            self._earn()
        if not self._is_open:  # asked for before the price closed
            return
        self._lost = max(self._lost + lost, -MAX_CREDIT)
        if self._lost <= -MAX_CREDIT:
            self._num_failed = 0

    def observe_plain(self) -> None:
        """Count a step for which no drafts were asked."""
        self._earn()
        if not self._is_open:
            self._pause = max(0, self._pause - 1)

    def _earn(self) -> None:
        self.allowance = min(MAX_ALLOWANCE, self.allowance + ALLOWANCE)
