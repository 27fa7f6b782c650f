"""What drafting may lose: a trial when it begins, and never much more than it has gained.

The first drafts after a pause are dearer than those that follow: drafters read what they missed, their machines are
cold, and what they claim of themselves has not been put to the test. To stop at what these cost and begin again later
is to see nothing but first drafts. So a price that lets some drafts through holds for a number of drafts and steps,
until too much is lost, and something of these is verified whatever they claim. Later, too, drafting ends once it has
lost too much, whatever past steps promise. Then it pauses: briefly after the first failure, eight times as long after
each that follows, until drafting has gained again. Drafts that never pay cost so little in the long run, and a trial
that ended wrongly is soon repeated; sooner still where probes, made meanwhile, gain.

First calls of kernels and stalls of the machine are no loss of drafting. They are pardoned, within an allowance: what
happens again and again is no accident.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.verifier_service.messages.engine import NEVER

TRIAL_DRAFTS = 16  # that were asked for: enough to overrule what a new drafter is taken for …
TRIAL_STEPS = 4  # … over so many steps: many requests make that many drafts in one
MAX_LOSS = 2.0  # until drafting ends, in steps without drafts: a late draft or two are chance
FIRST_CREDIT = 4.0  # the same: how much more the first trial may lose, when nothing is known
MAX_CREDIT = 16.0  # the same: what was gained beyond it excuses no loss
FIRST_PAUSE = 64  # steps without drafts after the first failure …
PAUSE_GROWTH = 8  # … and times as many after each next one …
MAX_PAUSE = 2048  # … but no more: at two steps lost each time, drafts that never pay cost 0.1 percent
MAX_ALLOWANCE = 64.0  # steps without drafts that accidents may cost: three first calls of 150 ms, at 7 ms a step
ALLOWANCE = 0.005  # of every step: so much may be pardoned in the long run


@dataclass(slots=True)
class Trial:
    """Keep a price from closing too soon, from opening too often and from being wrong for long.

    Losses are in steps without drafts. They are never more than `MAX_LOSS` beyond what was gained before and the credit
    of the first trial, or beyond what is pardoned.
    """

    allowance: float = MAX_ALLOWANCE
    _is_open: bool = False  # some drafts are admitted
    _num_left: int = 0  # drafts of the trial …
    _num_steps_left: int = 0  # … and its steps with drafts
    _lost: float = -FIRST_CREDIT  # by all drafts of this trial, and of those before that did not fail
    _num_failed: int = 0  # trials, since drafting last gained
    _pause: int = 0  # steps that are left of it
    _num_hopes: int = 0  # probes that gained, since the pause began

    @property
    def goes_on(self) -> bool:
        """Whether drafts are being tried: at least a token of each is verified, or they would teach nothing."""
        return self._num_left > 0 or self._num_steps_left > 0

    def settle(self, price: float, best: float) -> float:
        """Return the price that holds next: `price` held so far, `best` is the best of past steps."""
        if not self._is_open:
            if best < NEVER and not self._pause:
                self._is_open, self._num_left, self._num_steps_left = True, TRIAL_DRAFTS, TRIAL_STEPS
        elif self._lost >= MAX_LOSS:
            self._pause = min(MAX_PAUSE, FIRST_PAUSE * PAUSE_GROWTH**self._num_failed)
            self._num_failed += 1
            self._lost, self._num_hopes = 0.0, 0
            self._close()
        elif best >= NEVER:
            if self.goes_on:
                return price
            self._close()
        return best if self._is_open else NEVER

    def _close(self) -> None:
        self._is_open, self._num_left, self._num_steps_left = False, 0, 0

    def observe(self, num_drafts: int, lost: float, *, is_accident: bool = False) -> None:
        """Take in a step for which so many drafts were asked: how much longer it took than its tokens would without.

        What an accident cost is pardoned as far as the allowance reaches.
        """
        self._num_left = max(0, self._num_left - num_drafts)
        self._num_steps_left = max(0, self._num_steps_left - 1)
        if is_accident:
            pardoned = min(max(0.0, lost), self.allowance)
            self.allowance -= pardoned
            lost -= pardoned
        else:
            self._earn()
        if not self._is_open:  # asked for at another price, before it closed
            return
        self._lost = max(self._lost + lost, -MAX_CREDIT)
        if self._lost <= -MAX_CREDIT:
            self._num_failed = 0

    def observe_plain(self) -> None:
        """Take in a step for which no drafts were asked."""
        self._earn()
        if not self._is_open:
            self._pause = max(0, self._pause - 1)

    def observe_probe(self, lost: float) -> None:
        """Take in a step in which a few drafts were made that nobody expects to pay."""
        if lost < 0.0 and self._pause:
            self._num_hopes += 1
            if self._num_hopes >= self._num_failed:
                self._pause = 0

    def _earn(self) -> None:
        self.allowance = min(MAX_ALLOWANCE, self.allowance + ALLOWANCE)
