"""Survival of draft positions: the chance that a position and all before it are accepted, from earlier rounds only.

The *hazard* of a position is the chance that it is rejected when all before it were accepted; survival is the product
of (1 - hazard). A drafter's pool has hazards by position and by confidence (so claims are recalibrated by outcomes). A
request multiplies them by its frailty: rejections seen over rejections expected, with a gamma prior (Vaupel et al.
1979). Acceptance comes in stretches, so hazards by position are kept for each outcome of the round before. All counts
fade: a request whose text turns from prose to copying is followed, and a request that does not draft returns to its
pool.

For a draft that is not verified yet, only its confidences are used. They are functions of the tokens before each
position and of the row that it is drawn from: see docs/exactness.md, "The trap".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

INITIAL_HAZARD = 0.4  # prior of a new drafter: low enough that it is tried at one request
INITIAL_TOKENS = 16.0  # weight of that prior, in judged tokens: a handful of drafts overrule it
POSITION_TOKENS = 16.0  # weight of the pool's mean, as the prior of one position or bin
AFTER_TOKENS = 16.0  # weight of a position's hazard, as the prior of its hazard after one outcome
POOL_FADE = 0.9995  # per judged token of a position or bin: a memory of 2000, longer than one request
REQUEST_FADE = 0.98  # per judged token, or round without a draft: a memory of about 50 tokens, as texts change
FRAILTY_REJECTIONS = 10.0  # the gamma prior of frailty: one bad draft makes no bad request
CLAIMED_REJECTIONS = 20.0  # the same against claims, which already know part of what sets a request apart
POOL_REJECTIONS = 4.0  # the same for a drafter, whose confidences may all be too low or too high
MAX_POOLS = 64  # drafters remembered, the last observed ones: drafters come and go
NUM_BINS = 16  # of confidence: narrow near 1, where most positions worth verifying are
MIN_HAZARD, MAX_HAZARD = 0.002, 0.998  # clamp: no position is ever certain, the longest copy ends


_BIN_STARTS = tuple(1.0 - (1.0 - index / NUM_BINS) ** 2 for index in range(1, NUM_BINS))  # of all but the first
_BIN_HAZARDS = tuple((1.0 - (index + 0.5) / NUM_BINS) ** 2 for index in range(NUM_BINS))  # of each bin's middle


class LastRound(IntEnum):
    """The outcome of a request's round before, with the same drafter."""

    UNDRAFTED = 0  # no draft
    REJECTED = 1  # at the first token
    CUT = 2  # at a later token
    ACCEPTED = 3  # the whole draft

    @classmethod
    def of(cls, num_draft_tokens: int, num_accepted_tokens: int) -> LastRound:
        """Return the outcome of a draft with this many judged and accepted tokens."""
        if num_accepted_tokens >= num_draft_tokens:
            return cls.ACCEPTED
        return cls.CUT if num_accepted_tokens else cls.REJECTED


@dataclass(slots=True)
class _Counts:
    """Fading counts of judged and rejected tokens of one kind."""

    num_judged: float = 0.0
    num_rejected: float = 0.0

    def add(self, is_rejected: bool) -> None:
        self.num_judged = self.num_judged * POOL_FADE + 1.0
        self.num_rejected = self.num_rejected * POOL_FADE + is_rejected

    def add_draft(self, num_judged: int, is_rejected: bool) -> None:
        """Add a draft's judged tokens, of which only the last can be rejected."""
        faded = POOL_FADE**num_judged
        self.num_judged = self.num_judged * faded + (1.0 - faded) / (1.0 - POOL_FADE)
        self.num_rejected = self.num_rejected * faded + is_rejected

    def hazard(self, prior: float, prior_tokens: float) -> float:
        return _hazards((self,), (prior,), prior_tokens)[0]


def _hazards(kinds: Sequence[_Counts], priors: Sequence[float], prior_tokens: float) -> list[float]:
    """Return the hazard of each kind of token, given priors and their weight in tokens."""
    return [
        (counts.num_rejected + prior * prior_tokens) / (counts.num_judged + prior_tokens)
        for counts, prior in zip(kinds, priors, strict=True)
    ]


@dataclass(slots=True)
class _Pool:
    """The outcomes of one drafter's drafts."""

    overall: _Counts = field(default_factory=_Counts)
    positions: list[_Counts] = field(default_factory=list)
    after: list[list[_Counts]] = field(default_factory=lambda: [[] for _ in LastRound])  # positions, by the last round
    bins: list[_Counts] = field(default_factory=lambda: [_Counts() for _ in range(NUM_BINS)])  # by confidence
    # as of a refresh; the last ones after any outcome
    _hazards_after: list[list[float]] = field(default_factory=lambda: [[] for _ in range(len(LastRound) + 1)])
    _by_bin: list[float] = field(default_factory=list)
    _bins_are_fresh: bool = False  # only claims change them, and not every drafter makes claims
    num_fresh: int = -1  # positions with hazards as of the last counts; -1: none, and the bins' are stale too

    def refresh(self, length: int, prior: float) -> None:
        """Update the hazards from the counts, for `length` positions at least."""
        mean = self.overall.hazard(prior, INITIAL_TOKENS)
        found = _hazards(self.positions, [mean] * len(self.positions), POSITION_TOKENS)
        self._hazards_after = [*(_hazards(positions, found, AFTER_TOKENS) for positions in self.after), found]
        for hazards in self._hazards_after:
            hazards.extend((hazards[-1] if hazards else mean,) * (length - len(hazards)))
        if not self._bins_are_fresh:
            self._refresh_bins()
        self.num_fresh = len(self._hazards_after[0])

    def _refresh_bins(self) -> None:
        num_claimed = sum(counts.num_judged * claimed for counts, claimed in zip(self.bins, _BIN_HAZARDS, strict=True))
        num_rejected = sum(counts.num_rejected for counts in self.bins)
        factor = (num_rejected + POOL_REJECTIONS) / (num_claimed + POOL_REJECTIONS)
        priors = [min(MAX_HAZARD, claimed * factor) for claimed in _BIN_HAZARDS]
        self._by_bin = _hazards(self.bins, priors, POSITION_TOKENS)
        self._bins_are_fresh = True

    def has_hazards(self, length: int) -> bool:
        """Return whether `length` positions have hazards, perhaps older than the last counts."""
        return len(self._hazards_after[0]) >= length

    def hazards(self, length: int, last: LastRound | None) -> list[float]:
        """Return the hazards by position after such an outcome; beyond all judged positions, the last one's.

        None: after any outcome.
        """
        return self._hazards_after[-1 if last is None else last][:length]

    def claimed_hazards(self, confidences: Sequence[float]) -> list[float]:
        """Return the hazards that tokens of these confidences have had so far."""
        by_bin = self._by_bin
        return [by_bin[bisect_right(_BIN_STARTS, confidence)] for confidence in confidences]

    def observe(self, num_judged: int, is_rejected: bool, last: LastRound) -> None:
        """Count a draft's judged tokens, of which only the last can be rejected."""
        if len(self.positions) < num_judged:
            for positions in (self.positions, *self.after):
                positions.extend(_Counts() for _ in range(num_judged - len(positions)))
        left = num_judged
        for counts, counts_after in zip(self.positions, self.after[last], strict=True):
            left -= 1
            counts.add(is_rejected and not left)
            counts_after.add(is_rejected and not left)
            if not left:
                break
        self.overall.add_draft(num_judged, is_rejected)
        self.num_fresh = -1

    def observe_claim(self, confidence: float, is_rejected: bool) -> None:
        """Count a judged token by its confidence."""
        self.bins[bisect_right(_BIN_STARTS, confidence)].add(is_rejected)
        self._bins_are_fresh = False
        self.num_fresh = -1


@dataclass(slots=True)
class _Frailty:
    """How many times as often as its pool a request is rejected."""

    prior_rejections: float
    num_rejected: float = 0.0
    num_expected: float = 0.0

    @property
    def factor(self) -> float:
        return (self.num_rejected + self.prior_rejections) / (self.num_expected + self.prior_rejections)

    def observe(self, is_rejected: bool, hazards: Sequence[float]) -> None:
        """Count a draft's judged tokens, of which only the last can be rejected."""
        num_expected = 0.0
        for hazard in hazards:
            num_expected = num_expected * REQUEST_FADE + hazard
        faded = REQUEST_FADE ** len(hazards)
        self.num_rejected = self.num_rejected * faded + is_rejected
        self.num_expected = self.num_expected * faded + num_expected

    def fade(self) -> None:
        """Count a round without a draft."""
        self.num_rejected *= REQUEST_FADE
        self.num_expected *= REQUEST_FADE


@dataclass(slots=True)
class _RequestHistory:
    """One request's frailties, against its pool's positions and against claims, and its last outcome."""

    by_position: _Frailty = field(default_factory=lambda: _Frailty(FRAILTY_REJECTIONS))
    by_claim: _Frailty = field(default_factory=lambda: _Frailty(CLAIMED_REJECTIONS))
    last: LastRound = LastRound.UNDRAFTED
    last_drafter_id: str = ""

    def last_of(self, drafter_id: str) -> LastRound:
        """Return the last outcome, if it was with this drafter."""
        return self.last if drafter_id == self.last_drafter_id else LastRound.UNDRAFTED


_NO_HISTORY = _RequestHistory()  # of a request that has not drafted


class SurvivalEstimator:
    """Survival probabilities of draft positions, in O(length) per call."""

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}  # by drafter; the last observed one at the end
        self._all = _Counts()  # over all drafters: the prior of a new one
        self._requests: dict[str, _RequestHistory] = {}
        self.version = 0  # estimates are the same until it changes

    @property
    def request_ids(self) -> set[str]:
        """The requests with any state here."""
        return {*self._requests}

    def observe(
        self,
        request_id: str,
        drafter_id: str,
        *,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        confidences: Sequence[float] | None = None,
        after: LastRound | None = None,
    ) -> None:
        """Learn from one verified chain, or from the path taken through a tree.

        `confidences`: those of the verified tokens, at least up to the first rejected one. `after`: what `end_round`
        has returned; None: the round ends now.
        """
        num_judged = min(num_accepted_tokens + 1, num_draft_tokens)
        if num_judged < 1:
            return
        if after is None:
            after = self.end_round(request_id, drafter_id, num_draft_tokens, num_accepted_tokens)
        self.version += 1
        is_rejected = num_accepted_tokens < num_judged
        pool = self._pool(drafter_id)
        if not pool.has_hazards(num_judged):
            pool.refresh(num_judged, self._prior_hazard(pool))
        history = self._history(request_id)
        history.by_position.observe(is_rejected, pool.hazards(num_judged, after))
        pool.observe(num_judged, is_rejected, after)
        if confidences is not None and len(confidences) >= num_judged:
            claimed = confidences[:num_judged]
            history.by_claim.observe(is_rejected, pool.claimed_hazards(claimed))
            for place, confidence in enumerate(claimed, start=1):
                pool.observe_claim(confidence, is_rejected and place == num_judged)
        self._all.add_draft(num_judged, is_rejected)

    def end_round(self, request_id: str, drafter_id: str, num_draft_tokens: int, num_accepted_tokens: int) -> LastRound:
        """Record the outcome of a request's round for its next estimate, and return the outcome before it.

        The rest of what the draft teaches may wait for `observe`.
        """
        if num_draft_tokens < 1:
            return LastRound.UNDRAFTED
        self.version += 1
        history = self._history(request_id)
        before = history.last_of(drafter_id)
        history.last, history.last_drafter_id = LastRound.of(num_draft_tokens, num_accepted_tokens), drafter_id
        return before

    def _history(self, request_id: str) -> _RequestHistory:
        if (history := self._requests.get(request_id)) is None:
            history = self._requests[request_id] = _RequestHistory()
        return history

    def observe_plain(self, request_id: str) -> None:
        """Count a round without a draft: what is known of the request fades."""
        if (history := self._requests.get(request_id)) is not None:
            history.last = LastRound.UNDRAFTED
            history.by_position.fade()
            history.by_claim.fade()

    def survivals(
        self, request_id: str, drafter_id: str, length: int, confidences: Sequence[float] | None = None
    ) -> list[float]:
        """Return P(this position and all before it are accepted) for positions 1 … `length`; it never rises.

        Positions with a confidence use the hazards of confidences, the others those of positions.
        """
        pool = self._fresh_pool(drafter_id, length)
        history = self._requests.get(request_id) or _NO_HISTORY
        survivals: list[float] = []
        if confidences:
            _extend(survivals, pool.claimed_hazards(confidences[:length]), history.by_claim.factor)
        if len(survivals) < length:
            hazards = pool.hazards(length, history.last_of(drafter_id))
            _extend(survivals, hazards[len(survivals) :], history.by_position.factor)
        return survivals

    def usual_survivals(self, request_id: str, drafter_id: str, length: int) -> list[float]:
        """Return `survivals` whatever the outcome of the round before was: of all drafts of a longer time."""
        hazards = self._fresh_pool(drafter_id, length).hazards(length, None)
        survivals: list[float] = []
        _extend(survivals, hazards, (self._requests.get(request_id) or _NO_HISTORY).by_position.factor)
        return survivals

    def observe_claims(self, drafter_id: str, claims: Iterable[tuple[float, bool]]) -> None:
        """Learn from judged nodes of a tree: each one's confidence and whether it was accepted."""
        self.version += 1
        pool = self._pool(drafter_id)
        for confidence, is_accepted in claims:
            pool.observe_claim(confidence, not is_accepted)

    def claimed_rates(self, drafter_id: str, confidences: Sequence[float]) -> list[float]:
        """Return P(accepted | the token before is accepted) of single tokens by their confidences."""
        pool = self._fresh_pool(drafter_id)
        return [1.0 - hazard for hazard in pool.claimed_hazards(confidences)]

    def forget(self, request_id: str) -> None:
        """Drop a request's history; its pool's stays."""
        self._requests.pop(request_id, None)

    def _fresh_pool(self, drafter_id: str, length: int = 0) -> _Pool:
        """Return a drafter's pool with its hazards up to date, for `length` positions at least."""
        pool = self._pools.get(drafter_id)
        if pool is None:
            pool = _Pool()
        if pool.num_fresh < length:
            pool.refresh(length, self._prior_hazard(pool))
        return pool

    def _prior_hazard(self, pool: _Pool) -> float:
        """Return the hazard of all other pools, the prior of this one: its own tokens must not count twice."""
        others = _Counts(
            max(0.0, self._all.num_judged - pool.overall.num_judged),
            max(0.0, self._all.num_rejected - pool.overall.num_rejected),
        )
        return others.hazard(INITIAL_HAZARD, INITIAL_TOKENS)

    def _pool(self, drafter_id: str) -> _Pool:
        """Return a drafter's pool, moved to the end: the last observed one."""
        pool = self._pools.pop(drafter_id, None) or _Pool()
        self._pools[drafter_id] = pool
        if len(self._pools) > MAX_POOLS:
            del self._pools[next(iter(self._pools))]
        return pool


def _extend(survivals: list[float], hazards: Sequence[float], factor: float) -> None:
    """Append the survivals of positions with these hazards times a request's frailty."""
    survival = survivals[-1] if survivals else 1.0
    for hazard in hazards:
        hazard *= factor
        survival *= 1.0 - (MIN_HAZARD if hazard < MIN_HAZARD else MAX_HAZARD if hazard > MAX_HAZARD else hazard)
        survivals.append(survival)
