"""How likely draft tokens are to be accepted: per request and position, from earlier rounds only.

A position's *hazard* is the chance that it is rejected where all before it were accepted; survival is the product of
what is left. A drafter's pool has a hazard per position and per confidence (what drafters claim is recalibrated by
what came of it); a request multiplies the pool's hazards by a factor of its own, its frailty (Vaupel et al. 1979: a
gamma prior makes it rejections seen over rejections expected). All counts fade, so that a request whose text turns from
prose to copying is followed, and everything is bounded. Acceptance comes in stretches, so a position's hazard is kept
for each way that the round before may have gone; a request that does not draft returns to what its pool is.

Estimates of a draft that is not verified yet look at its confidences alone, which are functions of the tokens before
each position and of the row it is drawn from: see docs/architecture.md, "The trap".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

INITIAL_HAZARD = 0.4  # of a drafter that nothing is known about: such as pays at one request, so that it is tried
INITIAL_TOKENS = 16.0  # how many judged tokens that is worth: a handful of drafts overrule it
POSITION_TOKENS = 16.0  # what the pool's mean is worth against one position's, or one confidence's, own counts
AFTER_TOKENS = 16.0  # what a position's hazard is worth against its own counts after such a round
POOL_FADE = 0.9995  # per judged token of a position or bin: a memory of 2000, beyond the runs of one request
REQUEST_FADE = 0.98  # per judged token, or round without a draft: a memory of about 50, as a text turns
FRAILTY_REJECTIONS = 10.0  # how many rejections as expected a request starts with: one bad draft makes no bad request
CLAIMED_REJECTIONS = 20.0  # the same against claims, which know a part of what sets a request apart
POOL_REJECTIONS = 4.0  # the same of a drafter, whose confidences may be too low or too high throughout
MAX_POOLS = 64  # drafters remembered, for they come and go; the one unheard of for longest goes first
NUM_BINS = 16  # of confidence: narrow near 1, where most of what is worth verifying is
MIN_HAZARD, MAX_HAZARD = 0.002, 0.998  # nothing is certain, whatever a factor makes of it: the longest copy ends


_BIN_STARTS = tuple(1.0 - (1.0 - index / NUM_BINS) ** 2 for index in range(1, NUM_BINS))  # of all but the first
_BIN_HAZARDS = tuple((1.0 - (index + 0.5) / NUM_BINS) ** 2 for index in range(NUM_BINS))  # as claimed in the middle


class LastRound(IntEnum):
    """What became of a request's draft in the round before, by the same drafter."""

    UNDRAFTED = 0  # there was none
    REJECTED = 1  # at its first token
    CUT = 2  # later
    ACCEPTED = 3  # all of it

    @classmethod
    def of(cls, num_draft_tokens: int, num_accepted_tokens: int) -> LastRound:
        """Return what a round was of whose draft so many tokens were judged."""
        if num_accepted_tokens >= num_draft_tokens:
            return cls.ACCEPTED
        return cls.CUT if num_accepted_tokens else cls.REJECTED


@dataclass(slots=True)
class _Counts:
    """Judged tokens of one kind and how many of them were rejected."""

    num_judged: float = 0.0
    num_rejected: float = 0.0

    def add(self, is_rejected: bool) -> None:
        self.num_judged = self.num_judged * POOL_FADE + 1.0
        self.num_rejected = self.num_rejected * POOL_FADE + is_rejected

    def add_draft(self, num_judged: int, is_rejected: bool) -> None:
        """Add a draft's judged tokens, of which none but the last can be rejected."""
        faded = POOL_FADE**num_judged
        self.num_judged = self.num_judged * faded + (1.0 - faded) / (1.0 - POOL_FADE)
        self.num_rejected = self.num_rejected * faded + is_rejected

    def hazard(self, prior: float, prior_tokens: float) -> float:
        return _hazards((self,), (prior,), prior_tokens)[0]


def _hazards(kinds: Sequence[_Counts], priors: Sequence[float], prior_tokens: float) -> list[float]:
    """Return the hazard of each kind of token, given what to expect of it and how many tokens that is worth."""
    return [
        (counts.num_rejected + prior * prior_tokens) / (counts.num_judged + prior_tokens)
        for counts, prior in zip(kinds, priors, strict=True)
    ]


@dataclass(slots=True)
class _Pool:
    """What one drafter's drafts have come to."""

    overall: _Counts = field(default_factory=_Counts)
    positions: list[_Counts] = field(default_factory=list)
    after: list[list[_Counts]] = field(default_factory=lambda: [[] for _ in LastRound])  # positions, by the last round
    bins: list[_Counts] = field(default_factory=lambda: [_Counts() for _ in range(NUM_BINS)])  # by confidence
    _hazards_after: list[list[float]] = field(default_factory=lambda: [[] for _ in LastRound])  # as of a refresh
    _by_bin: list[float] = field(default_factory=list)
    _bins_are_fresh: bool = False  # they change with claims alone, which not every drafter makes
    num_fresh: int = -1  # positions whose hazards are those of the last counts; below 0: not even those of the bins

    def refresh(self, length: int, prior: float) -> None:
        """Bring the hazards up to date with the counts, for `length` positions at least."""
        mean = self.overall.hazard(prior, INITIAL_TOKENS)
        found = _hazards(self.positions, [mean] * len(self.positions), POSITION_TOKENS)
        self._hazards_after = [_hazards(positions, found, AFTER_TOKENS) for positions in self.after]
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
        """Return whether there are some for `length` positions, perhaps older than the last counts."""
        return len(self._hazards_after[0]) >= length

    def hazards(self, length: int, last: LastRound) -> list[float]:
        """Return each position's hazard after such a round; beyond what was ever judged, the last one's."""
        return self._hazards_after[last][:length]

    def claimed_hazards(self, confidences: Sequence[float]) -> list[float]:
        """Return what such confidences have meant so far."""
        by_bin = self._by_bin
        return [by_bin[bisect_right(_BIN_STARTS, confidence)] for confidence in confidences]

    def observe(self, num_judged: int, is_rejected: bool, last: LastRound) -> None:
        """Take in a draft's judged tokens, of which none but the last can be rejected."""
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
        """Take in what a judged token's drafter had claimed."""
        self.bins[bisect_right(_BIN_STARTS, confidence)].add(is_rejected)
        self._bins_are_fresh = False
        self.num_fresh = -1


@dataclass(slots=True)
class _Frailty:
    """How much more often than its pool a request is rejected."""

    prior_rejections: float
    num_rejected: float = 0.0
    num_expected: float = 0.0

    @property
    def factor(self) -> float:
        return (self.num_rejected + self.prior_rejections) / (self.num_expected + self.prior_rejections)

    def observe(self, is_rejected: bool, hazards: Sequence[float]) -> None:
        """Take in a draft's judged tokens, of which none but the last can be rejected."""
        num_expected = 0.0
        for hazard in hazards:
            num_expected = num_expected * REQUEST_FADE + hazard
        faded = REQUEST_FADE ** len(hazards)
        self.num_rejected = self.num_rejected * faded + is_rejected
        self.num_expected = self.num_expected * faded + num_expected

    def fade(self) -> None:
        """Let a judged token pass, or a round without a draft."""
        self.num_rejected *= REQUEST_FADE
        self.num_expected *= REQUEST_FADE


@dataclass(slots=True)
class _RequestHistory:
    """One request's frailty against its pool's positions and against what its drafts claim, and its last round."""

    by_position: _Frailty = field(default_factory=lambda: _Frailty(FRAILTY_REJECTIONS))
    by_claim: _Frailty = field(default_factory=lambda: _Frailty(CLAIMED_REJECTIONS))
    last: LastRound = LastRound.UNDRAFTED
    last_drafter_id: str = ""

    def last_of(self, drafter_id: str) -> LastRound:
        """Return the last round as one drafter knows it."""
        return self.last if drafter_id == self.last_drafter_id else LastRound.UNDRAFTED


_NO_HISTORY = _RequestHistory()  # of a request that has not drafted: as its pool


class SurvivalEstimator:
    """Survival probabilities of draft positions; O(length) per call, whatever was seen before."""

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}  # by drafter; the last one heard of at the end
        self._all = _Counts()  # of all drafters: what a new one is taken for
        self._requests: dict[str, _RequestHistory] = {}
        self.num_observed = 0  # rises with whatever is taken in of drafts: as long as it stands, so do all estimates

    @property
    def request_ids(self) -> set[str]:
        """The requests of which anything is kept."""
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
        """Take in one verified chain, or the path taken through a tree, of which so many tokens were accepted.

        `confidences` are those of the verified tokens, at least as far as the first that was rejected. `after` is what
        `end_round` has returned; None: the round ends now.
        """
        num_judged = min(num_accepted_tokens + 1, num_draft_tokens)
        if num_judged < 1:
            return
        if after is None:
            after = self.end_round(request_id, drafter_id, num_draft_tokens, num_accepted_tokens)
        self.num_observed += 1
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
        """Note how a request's round went, which its next one is judged by, and return how the one before had gone.

        All else that the draft teaches may wait for `observe`.
        """
        if num_draft_tokens < 1:
            return LastRound.UNDRAFTED
        self.num_observed += 1
        history = self._history(request_id)
        before = history.last_of(drafter_id)
        history.last, history.last_drafter_id = LastRound.of(num_draft_tokens, num_accepted_tokens), drafter_id
        return before

    def _history(self, request_id: str) -> _RequestHistory:
        if (history := self._requests.get(request_id)) is None:
            history = self._requests[request_id] = _RequestHistory()
        return history

    def observe_plain(self, request_id: str) -> None:
        """Take in a round without a draft: what is known of the request counts less."""
        if (history := self._requests.get(request_id)) is not None:
            history.last = LastRound.UNDRAFTED
            history.by_position.fade()
            history.by_claim.fade()

    def survivals(
        self, request_id: str, drafter_id: str, length: int, confidences: Sequence[float] | None = None
    ) -> list[float]:
        """Return P(this position and all before it are accepted) for positions 1 … `length`: it never rises.

        A position with a confidence is judged by what that has meant, one without by history alone.
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

    def observe_claims(self, drafter_id: str, claims: Iterable[tuple[float, bool]]) -> None:
        """Take in confidences of tokens that were judged, each with whether it was accepted: the nodes of a tree."""
        self.num_observed += 1
        pool = self._pool(drafter_id)
        for confidence, is_accepted in claims:
            pool.observe_claim(confidence, not is_accepted)

    def claimed_rates(self, drafter_id: str, confidences: Sequence[float]) -> list[float]:
        """Return P(accepted, given that the token before it is) of single tokens by their confidences."""
        pool = self._fresh_pool(drafter_id)
        return [1.0 - hazard for hazard in pool.claimed_hazards(confidences)]

    def forget(self, request_id: str) -> None:
        """Drop a request's own history; its pool's stays."""
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
        """Return what the other pools say of this one: its own tokens must not count twice."""
        others = _Counts(
            max(0.0, self._all.num_judged - pool.overall.num_judged),
            max(0.0, self._all.num_rejected - pool.overall.num_rejected),
        )
        return others.hazard(INITIAL_HAZARD, INITIAL_TOKENS)

    def _pool(self, drafter_id: str) -> _Pool:
        """Return a drafter's pool, made the last one heard of."""
        pool = self._pools.pop(drafter_id, None) or _Pool()
        self._pools[drafter_id] = pool
        if len(self._pools) > MAX_POOLS:
            del self._pools[next(iter(self._pools))]
        return pool


def _extend(survivals: list[float], hazards: Sequence[float], factor: float) -> None:
    """Append the survivals of positions with such hazards, times a request's factor, to those before them."""
    survival = survivals[-1] if survivals else 1.0
    for hazard in hazards:
        hazard *= factor
        survival *= 1.0 - (MIN_HAZARD if hazard < MIN_HAZARD else MAX_HAZARD if hazard > MAX_HAZARD else hazard)
        survivals.append(survival)
