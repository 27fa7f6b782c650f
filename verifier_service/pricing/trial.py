"""What drafting may lose: a trial when it begins, and never much more than it has gained.

The first drafts after a pause are dearer than those that follow: drafters read what they missed, their machines are
cold, and what they claim of themselves has not been put to the test. To stop at what these cost and begin again later
is to see nothing but first drafts. So a price that lets some drafts through holds for a number of drafts, until too
much is lost, and something of these is verified whatever they claim. Later, too, drafting ends once it has lost too
much, whatever past steps promise; and what it has lost is paid back before it begins again, by a share of the time.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.verifier_service.pricing.step_price import NEVER

TRIAL_DRAFTS = 16  # that were asked for: enough to overrule what a new drafter is taken for
MAX_LOSS = 2.0  # until drafting ends, in steps without drafts: a late draft or two are chance
FIRST_CREDIT = 4.0  # the same: how much more the first trial may lose, when all is cold and nothing is known
MAX_CREDIT = 16.0  # the same: what was gained beyond it excuses no loss
MAX_DEBT = 8.0  # the same: what is to be paid back at most; steps at a load's begin were asked for at another price
PAYBACK = 0.005  # of every step without drafts: so much drafts that never pay may cost in the long run


@dataclass(slots=True)
class Trial:
    """Keep a price from closing too soon, from opening too often and from being wrong for long.

    Losses are in steps without drafts. They are never more than `MAX_LOSS` beyond what was gained before, what has been
    paid back and the credit of the first.
    """

    _is_open: bool = False  # some drafts are admitted
    _num_left: int = 0  # drafts of the trial
    _lost: float = -FIRST_CREDIT  # by all drafts, less what has been paid back

    @property
    def goes_on(self) -> bool:
        """Whether drafts are being tried: at least a token of each is verified, or they would teach nothing."""
        return self._num_left > 0

    def settle(self, price: float, best: float, best_if_free: float) -> float:
        """Return the price that holds after `price`, where past steps say `best`.

        Where they say `best_if_free` of drafts that come at once, and even these do not pay, no trial goes on.
        """
        if not self._is_open:
            if best < NEVER and self._lost <= 0.0:
                self._is_open, self._num_left = True, TRIAL_DRAFTS
        elif self._lost >= MAX_LOSS:
            self._is_open, self._num_left = False, 0
        elif best >= NEVER:
            if self._num_left and best_if_free < NEVER:
                return price
            self._is_open, self._num_left = False, 0
        return best if self._is_open else NEVER

    def observe(self, num_drafts: int, lost: float) -> None:
        """Take in a step for which so many drafts were asked: how much longer it took than its tokens would without."""
        self._num_left = max(0, self._num_left - num_drafts)
        self._lost = min(max(self._lost + lost, -MAX_CREDIT), MAX_DEBT)

    def observe_plain(self) -> None:
        """Take in a step for which no drafts were asked."""
        if not self._is_open and self._lost > 0.0:
            self._lost = max(0.0, self._lost - PAYBACK)
