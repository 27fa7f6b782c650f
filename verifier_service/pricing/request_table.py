"""What pricing knows of each request, in columns: one row for a request, so that a step's rows are read at once."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.verifier_service.pricing.probes import PROBE_ROUNDS

Rows = NDArray[np.intp]
Ints = NDArray[np.integer[Any]]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


# Who decides how long a draft is: the price; each for itself, as it is found in no time; what each brings, beside what
# it and the masks for the next one cost; the operator, whatever it costs; a guess from the request's own `prediction`.
# 0 is the price: it decides of rounds that were never begun. Up to MASKED drafts are decided here, and a step's base is
# the step without them; what an operator or a client asks for stays in it.
PRICED, FOUND, MASKED, PINNED, PREDICTED = range(5)


class Columns:
    """Arrays of equal length, by row."""

    def extend(self, count: int) -> None:
        """Add rows of zeros."""
        for name, column in vars(self).items():
            setattr(self, name, np.concatenate((column, np.zeros((count, *column.shape[1:]), column.dtype))))


class Rounds(Columns):
    """Asks of requests before a step, and what the drafts that came have on offer.

    Survivals are [rows, width + 1]: none rises along a row, and behind the last position of a draft all are 0.
    """

    def __init__(self, count: int, width: int) -> None:
        """Make so many rounds that ask for nothing, for drafts of up to `width` positions."""
        self.kind: Ints = np.zeros(count, np.int64)
        self.drafter: Ints = np.zeros(count, np.int64)
        self.bound: Ints = np.zeros(
            count, np.int64
        )  # the longest draft allowed; of a request that is off: if it was on
        self.length: Ints = np.zeros(count, np.int64)  # tokens asked for, …
        self.sought: Ints = np.zeros(count, np.int64)  # … and how many if they are found and not computed
        self.is_found: Bools = np.zeros(count, bool)  # the draft that came was
        self.is_probe: Bools = np.zeros(count, bool)
        self.is_opening: Bools = np.zeros(count, bool)  # the drafter's first for the request, which contains a prefill
        self.after: Ints = np.zeros(count, np.int64)  # `LastRound`: the outcome of the round before
        self.by_history: Floats = np.zeros((count, width + 1))  # survivals when the draft was asked for
        self.offered: Floats = np.zeros((count, width + 1))  # and when it was there
        self.bins: Ints = np.zeros((count, width + 1), np.int64)  # of each position's confidence, from 1 on; 0: none

    @property
    def width(self) -> int:
        """How many positions a draft may have."""
        return self.offered.shape[1] - 1

    @property
    def record(self) -> Ints:
        """The number under which each draft is recorded: what a drafter finds is another drafter's, as it were."""
        return np.where(self.is_found, -self.drafter, self.drafter)

    def take(self, rows: Rows) -> Rounds:
        """Return a copy of some rows."""
        taken = Rounds.__new__(Rounds)
        vars(taken).update({name: column.take(rows, 0) for name, column in vars(self).items()})
        return taken

    def put(self, rows: Rows, rounds: Rounds) -> None:
        """Write rows of the same width."""
        written = vars(rounds)
        for name, column in vars(self).items():
            column[rows] = written[name]

    def widen(self, width: int) -> None:
        """Make room for drafts of so many positions."""
        if width > self.width:
            missing = max(width, 2 * self.width) - self.width
            for name in ("by_history", "offered", "bins"):
                setattr(self, name, np.pad(getattr(self, name), ((0, 0), (0, missing))))


class Requests(Columns):
    """What is known of requests."""

    def __init__(self, count: int) -> None:
        self.last: Ints = np.zeros(count, np.int64)  # `LastRound`: the outcome of its last round, …
        self.last_drafter: Ints = np.zeros(count, np.int64)  # … and whose draft that was; 0: nobody's
        # judged tokens, fading: those rejected, and those expected to be by what its drafters' other drafts were
        self.rejected: Floats = np.zeros(count)
        self.expected: Floats = np.zeros(count)
        self.claim_rejected: Floats = np.zeros(count)  # the same of tokens with a confidence
        self.claim_expected: Floats = np.zeros(count)
        self.drafter: Ints = np.zeros(count, np.int64)  # that was asked last; 0: none
        self.num_rounds_off: Ints = np.zeros(count, np.int64)  # since its last draft was asked for
        self.is_estimated: Bools = np.zeros(count, bool)  # it is known …
        self.was_low: Bools = np.zeros(count, bool)  # … whether few drafts survive their first token
        self.has_answer: Bools = np.zeros(count, bool)  # its drafter has answered
        self.is_asked: Bools = np.zeros(count, bool)  # it has a round: it has asked since its last step


class RequestTable:
    """Rows of requests and of their rounds. Row 0 is of requests that are not here."""

    def __init__(self) -> None:
        self.requests, self.rounds = Requests(1), Rounds(1, 4)
        self._rows: dict[str, int] = {}
        self._free: list[int] = []

    @property
    def request_ids(self) -> set[str]:
        """The requests with a row."""
        return {*self._rows}

    def find(self, request_ids: Sequence[str]) -> Rows:
        """Return the rows of requests."""
        rows = self._rows
        return np.array([rows.get(request_id, 0) for request_id in request_ids], np.intp)

    def rows(self, request_ids: Sequence[str]) -> Rows:
        """Return the rows of requests; those that are not here yet begin one."""
        for request_id in request_ids:
            if request_id not in self._rows:
                self._begin(request_id)
        return self.find(request_ids)

    def _begin(self, request_id: str) -> None:
        if not self._free:
            size = len(self.requests.last)
            self._free = [*range(2 * size - 1, size - 1, -1)]
            self.requests.extend(size)
            self.rounds.extend(size)
        row = self._rows[request_id] = self._free.pop()
        for columns in (self.requests, self.rounds):
            for column in vars(columns).values():
                column[row] = 0
        # spread by name: requests that arrive together shall not probe together
        self.requests.num_rounds_off[row] = zlib.crc32(request_id.encode()) % PROBE_ROUNDS

    def forget(self, request_id: str) -> None:
        """Give a request's row back."""
        if (row := self._rows.pop(request_id, 0)) != 0:
            self._free.append(row)


def groups_of(numbers: Ints) -> Iterator[tuple[int, Any]]:
    """Return each number and an index of its places; nearly always there is but one."""
    if not len(numbers):
        return
    first = int(numbers[0])
    if np.count_nonzero(numbers != first) == 0:
        yield first, slice(None)
        return
    for number in np.unique(numbers):
        yield int(number), np.flatnonzero(numbers == number)


def within(lengths: Ints, width: int) -> Bools:
    """Return which of `width` positions each length reaches: [rows, width]."""
    return np.arange(width) < lengths[:, None]
