"""Survival of draft positions: the chance that a position and all before it are accepted, from earlier rounds only.

The *hazard* of a position is the chance that it is rejected when all before it were accepted; survival is the product
of (1 - hazard). A drafter's pool has hazards by position and by confidence (so claims are recalibrated by outcomes). A
request multiplies them by its frailty: rejections seen over rejections expected, with a gamma prior (Vaupel et al.
1979). Acceptance comes in stretches, so hazards by position are kept for each outcome of the round before. All counts
fade: a request whose text turns from prose to copying is followed, and a request that does not draft returns to its
pool. Tokens of a kind that were judged in one step fade together, as if each had been rejected as often as all.

For a draft that is not verified yet, only its confidences are used. They are functions of the tokens before each
position and of the row that it is drawn from: see docs/exactness.md, "The trap".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain

import numpy as np

from outrider.verifier_service.pricing.fading import Fading
from outrider.verifier_service.pricing.request_table import Bools, Floats, Ints, RequestTable, Rows, within

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

_BIN_HAZARDS = (1.0 - (np.arange(NUM_BINS) + 0.5) / NUM_BINS) ** 2  # of each bin's middle


class LastRound(IntEnum):
    """The outcome of a request's round before, with the same drafter."""

    UNDRAFTED = 0  # no draft
    REJECTED = 1  # at the first token
    CUT = 2  # at a later token
    ACCEPTED = 3  # the whole draft


ANY = len(LastRound)  # after any outcome


@dataclass(slots=True)
class _Pool:
    """The outcomes of one drafter's drafts: rejected shares of judged tokens."""

    overall: Fading = field(default_factory=lambda: Fading(POOL_FADE))
    # by the last round and position: [ANY + 1, num_positions]
    positions: Fading = field(default_factory=lambda: Fading(POOL_FADE, np.zeros((ANY + 1, 0)), np.zeros((ANY + 1, 0))))
    bins: Fading = field(default_factory=lambda: Fading(POOL_FADE, np.zeros(NUM_BINS), np.zeros(NUM_BINS)))
    hazards: Floats = field(default_factory=lambda: np.zeros((ANY + 1, 0)))  # as of a refresh
    by_bin: Floats = field(default_factory=lambda: np.zeros(NUM_BINS + 1))  # from 1 on
    is_fresh: bool = False  # as of the last counts
    has_fresh_bins: bool = False  # only claims change them, and not every drafter makes claims

    def refresh(self, length: int, prior: float) -> None:
        """Update the hazards from the counts, for `length` positions at least; beyond all judged, the last one's."""
        mean = self.overall.mean(prior, INITIAL_TOKENS)
        hazards = self.positions.mean(mean, POSITION_TOKENS)
        hazards[:ANY] = self.positions.mean(hazards[ANY], AFTER_TOKENS)[:ANY]
        if (missing := length - hazards.shape[1]) > 0:
            last = hazards[:, -1:] if hazards.shape[1] else np.full((ANY + 1, 1), mean)
            hazards = np.concatenate((hazards, last.repeat(missing, axis=1)), axis=1)
        self.hazards, self.is_fresh = hazards, True
        if not self.has_fresh_bins:
            factor = (self.bins.total.sum() + POOL_REJECTIONS) / (self.bins.weight @ _BIN_HAZARDS + POOL_REJECTIONS)
            self.by_bin[1:] = self.bins.mean(np.minimum(MAX_HAZARD, _BIN_HAZARDS * factor), POSITION_TOKENS)
            self.has_fresh_bins = True

    def observe(self, num_judged: Ints, is_rejected: Bools, is_judged: Bools, after: Ints, num_alike: int) -> None:
        """Count drafts' judged tokens, of which only the last can be rejected. `is_judged`: [rows, length]."""
        counts, length = self.positions, is_judged.shape[1]
        if (missing := length - counts.weight.shape[1]) > 0:
            counts.weight, counts.total = (np.pad(it, ((0, 0), (0, missing))) for it in (counts.weight, counts.total))
        width = counts.weight.shape[1]
        first = after * width
        cells = (first[:, None] + np.arange(length))[is_judged]
        judged, rejected = np.zeros((2, ANY + 1, width))
        judged[:ANY] = np.bincount(cells, minlength=ANY * width).reshape(ANY, width)
        rejected[:ANY] = np.bincount(first + num_judged - 1, is_rejected, ANY * width).reshape(ANY, width)
        judged[ANY], rejected[ANY] = judged.sum(0), rejected.sum(0)
        counts.add(rejected / np.maximum(judged, 1.0), num_alike * judged)
        self.is_fresh = False

    def observe_claims(self, bins: Ints, rejected_bins: Ints, num_alike: int = 1) -> None:
        """Count judged tokens by the bins of their confidences, and those rejected of them."""
        judged, rejected = (np.bincount(it, minlength=NUM_BINS + 1)[1:] for it in (bins, rejected_bins))
        self.bins.add(rejected / np.maximum(judged, 1), num_alike * judged)
        self.is_fresh = self.has_fresh_bins = False


class SurvivalEstimator:
    """Survival probabilities of the draft positions of requests, for all of a drafter's requests at once."""

    def __init__(self, table: RequestTable | None = None) -> None:
        """`table`: where requests have their rows."""
        self._table = RequestTable() if table is None else table
        self._numbers: dict[str, int] = {}  # of drafters, for good, from 1 on
        self._pools: dict[int, _Pool] = {}  # by drafter; the last observed one at the end
        self._all = Fading(POOL_FADE)  # over all drafters: the prior of a new one

    @property
    def num_judged(self) -> float:
        """The fading number of tokens that were learnt from."""
        return float(self._all.weight)

    def number_of(self, drafter_id: str) -> int:
        """Return the number that a drafter goes by here."""
        return self._numbers.setdefault(drafter_id, len(self._numbers) + 1)

    def survivals(
        self, rows: Rows, drafter: int, length: int, bins: Ints | None = None, *, are_usual: bool = False
    ) -> Floats:
        """Return P(this position and all before it are accepted): [rows, length]; it never rises along a row.

        Positions with a confidence, whose bin is given, use the hazards of confidences, the others those of positions.
        `are_usual`: whatever the outcome of the round before was, as of all drafts of a longer time.
        """
        pool, requests = self._fresh_pool(drafter, length), self._table.requests
        hazards = pool.hazards[ANY] if are_usual else pool.hazards.take(self._last(rows, drafter), 0)
        frailty = _frailty(requests.rejected, requests.expected, rows, FRAILTY_REJECTIONS)
        hazards = hazards[..., :length] * frailty[:, None]
        if bins is not None:
            frailty = _frailty(requests.claim_rejected, requests.claim_expected, rows, CLAIMED_REJECTIONS)
            hazards = np.where(bins > 0, pool.by_bin.take(bins) * frailty[:, None], hazards)
        return np.multiply.accumulate(1.0 - np.minimum(np.maximum(hazards, MIN_HAZARD), MAX_HAZARD), axis=1)

    def claimed_rates(self, drafter: int, confidences: Sequence[float]) -> Floats:
        """Return P(accepted | the token before is accepted) of single tokens by their confidences."""
        return 1.0 - self._fresh_pool(drafter, 0).by_bin[bins_of(confidences)]

    def end_rounds(self, rows: Rows, drafter: int, num_judged: Ints, num_accepted: Ints) -> Ints:
        """Record the outcomes of requests' rounds for their next estimates, and return the outcomes before them."""
        before = self._last(rows, drafter)
        outcome = 1 + (num_accepted > 0) + (num_accepted >= num_judged)  # from `LastRound.REJECTED` on
        self._table.requests.last[rows], self._table.requests.last_drafter[rows] = outcome, drafter
        return before

    def observe(
        self,
        rows: Rows,
        drafter: int,
        num_judged: Ints,
        num_accepted: Ints,
        after: Ints,
        bins: Ints | None = None,
        num_alike: int = 1,
    ) -> None:
        """Learn from verified chains, or from the paths taken through trees, of one token at least.

        `after`: what `end_rounds` has returned. `bins`: of the confidences of all verified tokens, where there are any:
        [rows, length]. To the pool they count as so many that are alike; 0: it has learnt from others.
        """
        length, requests = int(num_judged.max()), self._table.requests
        is_rejected, is_judged = num_accepted < num_judged, within(num_judged, length)
        pool = self._pool(drafter)
        if pool.hazards.shape[1] < length:
            pool.refresh(length, self._prior_hazard(pool))
        left = REQUEST_FADE**num_judged
        # each token fades with those judged after it
        faded = left[:, None] * REQUEST_FADE ** -np.arange(1.0, length + 1.0) * is_judged
        expected = (pool.hazards.take(after, 0)[:, :length] * faded).sum(1)
        requests.rejected[rows] = requests.rejected[rows] * left + is_rejected
        requests.expected[rows] = requests.expected[rows] * left + expected
        if num_alike:
            num_tokens, num_rejected = int(num_judged.sum()), np.count_nonzero(is_rejected)
            for counts in (pool.overall, self._all):
                counts.add(num_rejected / num_tokens, num_alike * num_tokens)
            pool.observe(num_judged, is_rejected, is_judged, after, num_alike)
        if bins is None or not np.count_nonzero(bins):
            return
        bins = bins[:, :length] * is_judged
        is_told = bins[:, 0] > 0
        left = np.where(is_told, left, 1.0)
        expected = (pool.by_bin.take(bins) * faded).sum(1)
        requests.claim_rejected[rows] = requests.claim_rejected[rows] * left + (is_rejected & is_told)
        requests.claim_expected[rows] = requests.claim_expected[rows] * left + expected
        if num_alike:
            pool.observe_claims(bins.ravel(), bins[np.arange(len(bins)), num_judged - 1][is_rejected], num_alike)

    def observe_claims(self, drafter: int, confidences: Sequence[float], is_accepted: Sequence[bool]) -> None:
        """Learn from judged nodes of a tree: each one's confidence and whether it was accepted."""
        bins = bins_of(confidences)
        self._pool(drafter).observe_claims(bins, bins[~np.array(is_accepted, bool)])

    def observe_plain(self, rows: Rows, num_rounds: int = 1) -> None:
        """Count so many rounds without a draft: what is known of these requests fades."""
        requests, left = self._table.requests, REQUEST_FADE**num_rounds
        requests.last[rows] = LastRound.UNDRAFTED
        for counts in (requests.rejected, requests.expected, requests.claim_rejected, requests.claim_expected):
            counts[rows] *= left

    def _last(self, rows: Rows, drafter: int) -> Ints:
        """Return the last outcomes of requests, where they were with this drafter."""
        requests = self._table.requests
        return requests.last[rows] * (requests.last_drafter[rows] == drafter)

    def _fresh_pool(self, drafter: int, length: int) -> _Pool:
        """Return a drafter's pool with its hazards up to date, for `length` positions at least."""
        pool = self._pools.get(drafter) or _Pool()
        if not pool.is_fresh or pool.hazards.shape[1] < length:
            pool.refresh(length, self._prior_hazard(pool))
        return pool

    def _prior_hazard(self, pool: _Pool) -> float:
        """Return the hazard of all other pools, the prior of this one: its own tokens must not count twice."""
        num_judged = max(0.0, self._all.weight - pool.overall.weight)
        num_rejected = max(0.0, self._all.total - pool.overall.total)
        return (num_rejected + INITIAL_HAZARD * INITIAL_TOKENS) / (num_judged + INITIAL_TOKENS)

    def _pool(self, drafter: int) -> _Pool:
        """Return a drafter's pool, moved to the end: the last observed one."""
        pool = self._pools[drafter] = self._pools.pop(drafter) if drafter in self._pools else _Pool()
        if len(self._pools) > MAX_POOLS:
            del self._pools[next(iter(self._pools))]
        return pool


def bins_of(confidences: Sequence[float] | Floats) -> Ints:
    """Return the bin of each confidence, from 1 on: the i-th one ends at 1 - (1 - i / NUM_BINS)²."""
    places = NUM_BINS + 1 - NUM_BINS * np.sqrt(1.0 - np.asarray(confidences))
    return np.minimum(places.astype(np.int64), NUM_BINS)


def bins_of_rows(confidences: Sequence[Sequence[float] | None], width: int) -> Ints:
    """Return the bins of each chain's confidences: [rows, width]; 0 where there is none."""
    bins = np.zeros((len(confidences), width), np.int64)
    told = [claims or () for claims in confidences]
    flat = np.array([*chain.from_iterable(told)])
    if len({*map(len, told)}) == 1:
        bins[:, : len(told[0])] = bins_of(flat).reshape(len(told), -1)
    elif len(flat):
        bins[within(np.array([*map(len, told)]), width)] = bins_of(flat)
    return bins


def _frailty(rejected: Floats, expected: Floats, rows: Rows, prior: float) -> Floats:
    """Return how many times as often as its pool each request is rejected."""
    return (rejected[rows] + prior) / (expected[rows] + prior)
