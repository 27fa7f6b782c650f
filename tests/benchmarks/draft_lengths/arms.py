"""Draft-length policies for the replay: fixed lengths, the bounds that know the future, and the engine's own classes.

Entry i of a batch is what entry i of the batch before became, unless that one finished; so what a policy remembers of
the past can lie in arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.draft_lengths.replay import MAX_LENGTH, Batch, Drafts, StepOutcome, Workload
from outrider.lab.replay.machine import EAGLE, FloatArray, IntArray, MachineFit
from outrider.lab.replay.traces import NGRAM

PROBE_EVERY = 16  # rounds of a request: one of them on the drafter that looks worse
PRIOR_ROUNDS = 4.0  # of a request's mean, toward that of all
FIT_ROUNDS = 8.0  # the same of the oracle's probabilities

Survivals = Callable[[Batch], FloatArray]  # [num_drafters, batch_size, MAX_LENGTH]


class FixedLength:
    """The same length for every request and step: what a server without a policy does, 0 being speculation off.

    Of several drafters each request uses the one with more accepted tokens per draft in its own past.
    """

    def __init__(self, length: int, num_drafters: int, batch_size: int) -> None:
        self._length = length
        self._sums = np.zeros((num_drafters, batch_size))
        self._counts = np.zeros((num_drafters, batch_size))
        self._rounds = np.zeros(batch_size, dtype=np.int64)
        self._pool = np.zeros((2, num_drafters))  # sums, counts

    def plan(self, batch: Batch) -> Drafts:
        drafters = self._choose(batch) if len(batch.offered) > 1 else np.zeros(batch.size, dtype=np.int64)
        offered = batch.offered[drafters, np.arange(batch.size)]
        return Drafts(drafters=drafters, lengths=np.minimum(self._length, offered))

    def observe(self, batch: Batch, drafts: Drafts, outcome: StepOutcome) -> None:
        if len(batch.offered) == 1:
            return
        is_drafted = drafts.lengths > 0
        lanes, drafters = np.flatnonzero(is_drafted), drafts.drafters[is_drafted]
        self._sums[drafters, lanes] += outcome.accepted[is_drafted]
        self._counts[drafters, lanes] += 1
        num_drafters = len(batch.offered)
        self._pool[0] += np.bincount(drafters, weights=outcome.accepted[is_drafted], minlength=num_drafters)
        self._pool[1] += np.bincount(drafters, minlength=num_drafters)
        self._rounds += 1
        for past in (self._sums.T, self._counts.T, self._rounds):
            past[outcome.is_finished] = 0

    def _choose(self, batch: Batch) -> IntArray:
        pool = ((self._pool[0] + 1.0) / (self._pool[1] + 1.0))[:, np.newaxis]
        expected = (self._sums + PRIOR_ROUNDS * pool) / (self._counts + PRIOR_ROUNDS)
        is_probe = self._rounds % PROBE_EVERY == PROBE_EVERY - 1
        ranked = np.where(is_probe, -expected, expected)
        chosen: IntArray = np.where(batch.offered > 0, ranked, -np.inf).argmax(axis=0)
        return chosen


class BestSlots:
    """The slots with the most expected tokens per second by the true cost of this very step, survivals being given.

    All (request, position) slots are sorted by survival and every prefix is tried. With outcomes for survivals this is
    a clairvoyant; with probabilities fitted beforehand it is an oracle.
    """

    def __init__(self, survivals: Survivals, drafters: Sequence[str], machine: MachineFit) -> None:
        self._survivals = survivals
        self._drafters = tuple(drafters)
        self._machine = machine

    def plan(self, batch: Batch) -> Drafts:
        is_offered = np.arange(MAX_LENGTH) < batch.offered[:, :, np.newaxis]
        survivals = np.where(is_offered, self._survivals(batch), 0.0)
        if len(self._drafters) == 1:
            return self._best(batch, survivals, np.zeros(batch.size, dtype=np.int64))[1]
        cheap = np.full(batch.size, self._drafters.index(NGRAM))
        rate, best = self._best(batch, survivals, cheap)
        for _ in range(2):  # the price of the better choice so far says which drafter gains more
            num_tokens = batch.size + best.lengths.sum()
            times_s = self._machine.forward_s(np.array([num_tokens, num_tokens + 1.0]), batch.num_context_tokens)
            gains = np.maximum(survivals - rate * (times_s[1] - times_s[0]), 0.0).sum(axis=2)
            other_rate, other = self._best(batch, survivals, gains.argmax(axis=0))
            if other_rate <= rate:
                break
            rate, best = other_rate, other
        return best

    def observe(self, batch: Batch, drafts: Drafts, outcome: StepOutcome) -> None:
        """Nothing to learn."""

    def _best(self, batch: Batch, survivals: FloatArray, drafters: IntArray) -> tuple[float, Drafts]:
        """Return the best rate with each request on its drafter, and the drafts."""
        machine, slots = self._machine, survivals[drafters, np.arange(batch.size)].ravel()
        order = np.argsort(-slots, kind="stable")[: np.count_nonzero(slots)]
        is_eagle = (np.array(self._drafters)[drafters] == EAGLE)[order // MAX_LENGTH]
        num_eagle, num_drafted = np.concatenate([[0], np.cumsum(is_eagle)]), np.arange(len(order) + 1)
        forward_s = machine.forward_s(batch.size + num_drafted.astype(np.float64), batch.num_context_tokens)
        draft_s = machine.draft_s(forward_s, num_eagle, num_drafted - num_eagle, batch.num_context_tokens)
        committed = batch.size + np.concatenate([[0.0], np.cumsum(slots[order])])
        rates = committed / (forward_s + machine.overhead_s + draft_s)
        size = int(rates.argmax())
        lengths = np.bincount(order[:size] // MAX_LENGTH, minlength=batch.size)
        return float(rates[size]), Drafts(drafters=drafters, lengths=lengths)


def oracle(workload: Workload, machine: MachineFit) -> BestSlots:
    """Return the policy that knows every survival probability, fitted per request and position beforehand."""
    fitted = fit_survivals(workload)
    return BestSlots(lambda batch: fitted[:, batch.requests], workload.drafters, machine)


def clairvoyant(workload: Workload, machine: MachineFit) -> BestSlots:
    """Return the policy that knows every outcome: a bound that nothing can reach."""
    positions = np.arange(MAX_LENGTH)

    def outcomes(batch: Batch) -> FloatArray:
        accepted = workload.accepted[:, batch.cells]
        return (positions < accepted[:, :, np.newaxis]).astype(np.float64)

    return BestSlots(outcomes, workload.drafters, machine)


def fit_survivals(workload: Workload) -> FloatArray:
    """Return [num_drafters, num_requests, MAX_LENGTH]: the share of drafts that had each position accepted.

    Counted over the positions at which drafts of every fixed length begin (long runs of accepted tokens are passed
    over, so the share over all positions would be too high), of those with a draft; shrunk toward all requests' share.
    """
    fitted = np.zeros((len(workload.drafters), workload.num_requests, MAX_LENGTH))
    for drafter in range(len(workload.drafters)):
        tried = np.zeros((workload.num_requests, MAX_LENGTH))
        right = np.zeros((workload.num_requests, MAX_LENGTH))
        for request, (begin, length) in enumerate(zip(workload.begins, workload.lengths, strict=True)):
            cells = slice(begin, begin + length)
            _count_walks(
                workload.accepted[drafter, cells].tolist(),
                workload.offered[drafter, cells].tolist(),
                tried[request],
                right[request],
            )
        pool = (right.sum(axis=0) + 1.0) / (tried.sum(axis=0) + 2.0)
        shares = (right + FIT_ROUNDS * pool) / (tried + FIT_ROUNDS)
        fitted[drafter] = np.minimum.accumulate(shares, axis=1)
    return fitted


def _count_walks(accepted: Sequence[int], offered: Sequence[int], tried: FloatArray, right: FloatArray) -> None:
    """Add to the counts by position what drafts of every length met on their way through one request."""
    for length in range(1, MAX_LENGTH + 1):
        num_accepted = [0] * (length + 1)  # drafts by accepted tokens
        at = 0
        while at < len(accepted):
            if offered[at]:
                run = min(accepted[at], length)
                num_accepted[run] += 1
                at += run + 1
            else:
                at += 1
        tried[:length] += sum(num_accepted)
        right[:length] += np.cumsum(num_accepted[:0:-1])[::-1]
