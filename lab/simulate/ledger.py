"""What happened to every simulated request, and how many tokens came when: plain arrays, filled as time goes on."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from outrider.lab.simulate.load import Floats, Ints, Workload

BIN_S = 1.0  # of the series over time


@dataclass(slots=True)
class Ledger:
    """The times are virtual seconds; NaN: not yet."""

    workload: Workload
    random: np.random.Generator
    first_token_s: Floats = field(init=False)
    finish_s: Floats = field(init=False)
    num_tokens: Ints = field(init=False)  # committed, by request; those of one that decodes come when it ends
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_steps: int = 0
    num_advances: int = 0  # runs of like steps
    num_finished: int = 0  # or refused
    num_refused: int = 0
    _tokens_by_bin: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        num_requests = self.workload.num_requests
        self.first_token_s = np.full(num_requests, np.nan)
        self.finish_s = np.full(num_requests, np.nan)
        self.num_tokens = np.zeros(num_requests, dtype=np.int64)

    @property
    def is_complete(self) -> bool:
        return self.num_finished == self.workload.num_requests

    def begin(self, number: int, at_s: float) -> None:
        """Record a request's first token."""
        self.first_token_s[number] = at_s
        self.count(at_s, num_tokens=1)

    def end(self, numbers: Ints, num_tokens: Ints, at_s: float) -> None:
        """Record that requests have ended, with so many tokens each."""
        self.finish_s[numbers] = at_s
        self.num_tokens[numbers] = num_tokens
        self.num_finished += len(numbers)

    def refuse(self) -> None:
        """Record that a request was refused; it has no times."""
        self.num_refused += 1
        self.num_finished += 1

    def count(
        self, at_s: float, *, num_tokens: int, num_drafts: int = 0, num_draft_tokens: int = 0, num_accepted: int = 0
    ) -> None:
        """Count what a run of rounds that ended then committed and verified."""
        place = int(at_s / BIN_S)
        self._tokens_by_bin[place] = self._tokens_by_bin.get(place, 0) + num_tokens
        self.num_drafts += num_drafts
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted

    def tokens_between(self, begin_s: float, end_s: float) -> float:
        """Return the tokens committed in the whole bins from `begin_s` on and before `end_s`."""
        bins = range(int(begin_s / BIN_S), int(end_s / BIN_S))
        return float(sum(self._tokens_by_bin.get(place, 0) for place in bins))

    @property
    def ttft_s(self) -> Floats:
        """Return every request's time to first token."""
        return self.first_token_s - self.workload.arrival_s

    @property
    def tpot_s(self) -> Floats:
        """Return every request's mean time per output token after the first; of one token alone: 0."""
        gaps = np.maximum(self.workload.num_output_tokens - 1, 1)
        return (self.finish_s - self.first_token_s) / gaps
