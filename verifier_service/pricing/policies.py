"""Who decides how long a draft is: a policy for each kind of round.

`ask` sets the lengths of rounds that begin. `cut` says how much of the drafts that came is verified: of drawn ones the
positions up to the first that a price of earlier steps exceeds. An optimum over the survivals of the step itself is for
point masses alone, since a later confidence depends on an earlier token (docs/exactness.md, "The trap").
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from outrider.verifier_service.messages.engine import NEVER
from outrider.verifier_service.pricing.cost_model import StepShape
from outrider.verifier_service.pricing.load_levels import LoadLevel
from outrider.verifier_service.pricing.probes import PROBE_LENGTH, PROBE_ROUNDS, ProbeBudget
from outrider.verifier_service.pricing.request_table import Bools, Floats, Ints, RequestTable, Rounds, Rows, within
from outrider.verifier_service.pricing.survival import SurvivalEstimator

LOW_SURVIVAL = 0.25  # of the first position: below, the reason is low acceptance and not load
FREE_SHARE = 0.03  # of a plain step: a look-up that holds a step up for longer is priced as any other drafter


@dataclass(slots=True)
class Load:
    """What is decided by: the level of load, and the last step."""

    level: LoadLevel
    num_requests: int
    base: StepShape  # without its drafts


@dataclass(slots=True)
class Books:
    """What all policies read and write."""

    table: RequestTable = field(default_factory=RequestTable)
    probes: ProbeBudget = field(default_factory=ProbeBudget)
    survival: SurvivalEstimator = field(init=False)

    def __post_init__(self) -> None:
        self.survival = SurvivalEstimator(self.table)

    def estimate(self, rows: Rows, drafter: int, bounds: Ints) -> Floats:
        """Return the survivals by history of each row, down to its bound and then 0: [rows, width + 1]."""
        length = int(bounds.max())
        survivals = np.zeros((len(rows), self.table.rounds.width + 1))
        survivals[:, :length] = self.survival.survivals(rows, drafter, length)
        if np.count_nonzero(bounds - length):
            survivals *= within(bounds, survivals.shape[1])
        self.table.requests.was_low[rows] = survivals[:, 0] < LOW_SURVIVAL
        self.table.requests.is_estimated[rows] = True
        return survivals


class Policy(Protocol):
    def ask(self, books: Books, load: Load, rows: Rows, rounds: Rounds, limits: Ints) -> None:
        """Set the `length` of rounds of one drafter that begin, at most `limits`; note what else was found out."""

    def cut(self, load: Load, survivals: Floats, num_drafted: Ints, is_probe: Bools) -> Ints:
        """Return how many positions of drafts are verified, of `num_drafted`.

        `survivals`: [rows, width + 1], 0 where nothing was drafted.
        """


class Pinned:
    """The operator decides, whatever drafts cost. A guess from a `prediction` was cut before."""

    def ask(self, books: Books, load: Load, rows: Rows, rounds: Rounds, limits: Ints) -> None:
        rounds.length = limits

    def cut(self, load: Load, survivals: Floats, num_drafted: Ints, is_probe: Bools) -> Ints:
        return num_drafted


class Found:
    """Each draft decides for itself: a drafter in this process looks them up in next to no time.

    It is asked for the longest draft allowed, whatever the price is. So a text that begins to repeat itself is followed
    at once, even after thousands of rounds in which nothing was found. The price learns nothing from these drafts.
    """

    def ask(self, books: Books, load: Load, rows: Rows, rounds: Rounds, limits: Ints) -> None:
        rounds.length = limits * does_sure_pay(load)

    def cut(self, load: Load, survivals: Floats, num_drafted: Ints, is_probe: Bools) -> Ints:
        return load.level.cost.best_length(load.base, survivals)


def is_free(load: Load, length: int) -> bool:
    """Return whether drafts of this length are there in next to no time."""
    return load.level.exposure.seconds(length) <= FREE_SHARE * load.level.cost.seconds(load.base)


def does_sure_pay(load: Load) -> bool:
    """Return whether a token would pay that is sure to be accepted."""
    return bool(load.level.cost.best_length(load.base, (1.0,)) > 0)


def sought(load: Load, limits: Ints) -> Ints:
    """Return how long drafts may be that are found, by a drafter that computes others: whatever these would cost.

    Look-ups go on as long as they do not lose more than a trial may.
    """
    is_open = load.level.finding.settle(0.0, 0.0, can_pay=True) < NEVER
    return limits * (is_open and does_sure_pay(load))


class Priced:
    """The price of earlier steps decides.

    While no draft pays, a request drafts a few tokens now and then (probes), so that its survival stays known.
    """

    def ask(self, books: Books, load: Load, rows: Rows, rounds: Rounds, limits: Ints) -> None:
        level, drafter = load.level, int(rounds.drafter[0])
        # at NEVER no survival is high enough
        if level.price.value < NEVER or np.count_nonzero(books.table.requests.is_estimated[rows]) < len(rows):
            rounds.by_history = books.estimate(rows, drafter, rounds.bound)
            rounds.length = np.minimum(level.ask_lengths(rounds.by_history, rounds.bound), limits)
        if books.probes.is_left and np.count_nonzero(rounds.length) < len(rows) and limits[0]:
            self._probe(books, load, rows, rounds, limits)

    def _probe(self, books: Books, load: Load, rows: Rows, rounds: Rounds, limits: Ints) -> None:
        """Ask for a few tokens although they do not pay, as far as the budget of probes allows."""
        is_due = books.table.requests.num_rounds_off[rows] + 1 >= PROBE_ROUNDS
        for place in np.flatnonzero(is_due & (rounds.length == 0)).tolist():
            if not books.probes.is_left:
                return
            length = min(PROBE_LENGTH, int(limits[place]))
            times = load.level.cost.seconds_with(load.base, length)
            # its request misses a step, too
            books.probes.spend(float(times[-1] - times[0] + times[0] / load.base.num_tokens))
            rounds.length[place], rounds.is_probe[place] = length, True
            own = slice(place, place + 1)
            rounds.by_history[own] = books.estimate(rows[own], int(rounds.drafter[place]), rounds.bound[own])

    def cut(self, load: Load, survivals: Floats, num_drafted: Ints, is_probe: Bools) -> Ints:
        num_paying = load.level.price.num_paying(survivals)
        if load.level.trial.goes_on:
            num_paying = np.maximum(num_paying, 1)
        return np.where(is_probe, num_drafted, num_paying) if np.count_nonzero(is_probe) else num_paying
