"""A trial: drafting that has begun goes on for a while, whatever the first drafts cost.

The first drafts after a pause are dearer than those that follow: drafters read what they missed, their machines are
cold. To stop at what these cost and begin again later is to see nothing but first drafts. So a price that lets some
drafts through holds for a number of drafts, until too much is lost, and what a trial has lost is paid back before the
next one, by a share of the time.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.verifier_service.step_price import NEVER

TRIAL_DRAFTS = 16  # that were asked for
MAX_LOSS = 2.0  # of one trial, in steps without drafts
FIRST_CREDIT = 4.0  # the same: how much more the first one may lose, when all is cold and nothing is known
PAYBACK = 0.005  # of every step without drafts


@dataclass(slots=True)
class Trial:
    """Keep a price from closing too soon and from opening too often.

    Losses are in steps without drafts. They are never more than `MAX_LOSS` beyond what earlier trials gained, what has
    been paid back and the credit of the first.
    """

    _is_open: bool = False  # some drafts are admitted
    _num_left: int = 0  # drafts of the trial
    _lost: float = -FIRST_CREDIT  # by all trials, less what has been paid back

    def settle(self, price: float, best: float, best_if_free: float) -> float:
        """Return the price that holds after `price`, where past steps say `best`.

        Where they say `best_if_free` of drafts that come at once, and even these do not pay, no trial goes on.
        """
        if best < NEVER and not self._is_open and self._lost <= 0.0:
            self._is_open, self._num_left = True, TRIAL_DRAFTS
        elif best >= NEVER and self._is_open:
            if self._num_left and self._lost < MAX_LOSS and best_if_free < NEVER:
                return price
            self._is_open, self._num_left = False, 0
        return best if self._is_open else NEVER

    def observe(self, num_drafts: int, lost: float) -> None:
        """Take in a step for which so many drafts were asked: how much longer it took than its tokens would without."""
        if self._num_left:
            self._num_left = max(0, self._num_left - num_drafts)
            self._lost += lost

    def observe_plain(self) -> None:
        """Take in a step for which no drafts were asked."""
        if not self._is_open and self._lost > 0.0:
            self._lost = max(0.0, self._lost - PAYBACK)
