"""The messages between verifier and drafter, one dataclass each.

A drafter's state is disposable: `Open` with the whole prefix rebuilds it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol, get_type_hints

import numpy as np

from outrider.verifier_service.messages.columns import (
    Chains,
    Columns,
    Int64s,
    check_columns,
    check_counts,
    spans,
    starts_of,
)
from outrider.verifier_service.messages.history import PastResponse

PROTOCOL_VERSION = 9
LOCAL_DRAFTER_ID = "local"  # id of a drafter in the verifier's own process
ROOT = -1  # as a parent: the last committed token
DRAFT_PROB_SCALE = 1 << 16  # sum of a row's quantised draft probabilities


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from `low` to `high`; with `is_open` without `low`. NaN is in none."""

    low: float
    high: float
    is_open: bool = False
    text: str = ""  # how an error says it; "": as a range

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.is_open and value == self.low)

    def __str__(self) -> str:
        return self.text or f"in {'(' if self.is_open else '['}{self.low:g}, {self.high:g}]"


Temperature = Annotated[float, Range(0, 100)]
_RANGES: dict[type, dict[str, Range]] = {}  # of the classes that were asked for


def ranges_of(kind: type) -> dict[str, Range]:
    """Return the bounds of a dataclass's fields: those that are annotated with a `Range`."""
    if kind not in _RANGES:
        hints = get_type_hints(kind, include_extras=True)
        noted = {name: getattr(hint, "__metadata__", (None,))[0] for name, hint in hints.items()}
        _RANGES[kind] = {name: note for name, note in noted.items() if isinstance(note, Range)}
    return _RANGES[kind]


def check_ranges(params: object) -> None:
    """Raise `ValueError` naming the field that is out of its bounds; None, where a field may be that, is in all."""
    for name, allowed in ranges_of(type(params)).items():
        value = getattr(params, name)
        if value is not None and value not in allowed:
            raise ValueError(f"{name} must be {allowed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSampling:
    """The part of a request's sampling parameters that drafters need.

    `temperature` 0 asks for a greedy draft: point masses, no draft_probs. With a `seed`, the drafter takes the argmax
    under the shared counter-based noise (coupled sampling), also without draft_probs.
    """

    temperature: Temperature
    top_k: Annotated[int, Range(0, math.inf, text="0 (off) or positive")] = 0
    top_p: Annotated[float, Range(0, 1, is_open=True)] = 1.0
    min_p: Annotated[float, Range(0, 1)] = 0.0
    seed: Annotated[int | None, Range(-(1 << 63), (1 << 63) - 1, text="a 64-bit integer")] = None
    choice_index: Annotated[int, Range(0, math.inf, text="at least 0")] = 0  # of a prompt's `n`: part of the noise key

    def __post_init__(self) -> None:
        check_ranges(self)


def require(condition: bool, field_name: str, expectation: str) -> None:
    """Raise `ValueError` naming a field, unless the condition holds."""
    if not condition:
        raise ValueError(f"{field_name} must be {expectation}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftNeeds:
    """What a drafter needs besides tokens; most need nothing.

    `taps` are the target's hidden states, concatenated in this order: i >= 0 is the input of layer i, FINAL_TAP the
    output of the final norm.
    """

    taps: tuple[int, ...] = ()
    last_state_only: bool = False  # only the states of the token before the draft
    predictions: bool = False  # `Commit.predicted_ids`
    is_found: bool = False  # a look-up in the verifier's process: it finds chains at once, without computing
    finds_some: bool = False  # of its drafts: `Commit.max_computed` bounds those that it computes
    history: bool = False  # the responses of rollouts, once they have ended: see `History`
    num_top: int = 0  # `Commit.target_rows` with so many of the target's likeliest tokens; 0: none
    learns: bool = False  # its pool has a learner: the texts of requests that may be learnt from, also without asks


NO_NEEDS = DraftNeeds()
FINAL_TAP = -1
MAX_SAMPLE_TOKENS = 2048  # of a request that is learnt from; of a longer text, the first so many


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Where a rollout's response belongs among those that a drafter remembers."""

    key: str  # responses of one key are drafted from together; "": this one finds nothing and leaves nothing behind
    num_prompt_tokens: int
    weight_version: str = ""  # of the target's weights when this was sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Start or restart the session of a request; `token_ids` are its committed tokens, never empty.

    Sessions with different `cache_salt` share nothing. In rollouts `history` takes the salt's place; a session that is
    closed then leaves its response behind. Elsewhere a `history` without a key says that it must leave nothing behind.
    """

    request_id: str
    sampling: DraftSampling
    token_ids: tuple[int, ...]
    cache_salt: str = ""
    history: History | None = None
    may_learn: bool = False  # whether the drafter may keep the request's text for a while, to learn from


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """Remember responses that ended elsewhere, oldest first, for later ones of their key.

    A response that the drafter has already is not kept twice, however often it is sent.
    """

    request_id: str  # that brought them
    history: History
    responses: tuple[PastResponse, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """The target's tapped hidden states of committed tokens from `position` on, sent before the ask (`Commit`).

    The last committed token has no state yet. A drafter that needs all states gets each position once, in order.
    """

    request_id: str
    position: int
    dtype: str  # torch's name: float32, float16 or bfloat16
    width: int  # values per token, over all taps
    data: bytes  # [num_tokens, width], little-endian; empty if sent through the link's tensor channel
    tensor: int = 0  # number of the channel's tensor that holds the data; 0: `data` does
    num_bytes: int = 0  # size of that tensor
    channel: str = ""  # group name of that channel; after a reconnection a new one numbers tensors from 1 again


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseRow:
    """One position's distribution, of a draft exactly as sampled from: weight / DRAFT_PROB_SCALE per token id."""

    token_ids: tuple[int, ...]  # unique
    weights: tuple[int, ...]  # positive, sum to DRAFT_PROB_SCALE


@dataclass(slots=True, kw_only=True)  # not frozen: one per request and round, and frozen takes twice as long
class Commit:
    """Append `token_ids` (may be empty) after the first `position` tokens, and ask for a draft after them.

    `max_length` 0 asks for no draft and gets no answer. With `max_nodes` > 0 the draft may be a tree of at most so many
    tokens and of depth `max_length`; 0: a chain.
    """

    request_id: str
    round_id: int
    position: int
    token_ids: tuple[int, ...]
    max_length: int
    max_nodes: int = 0
    max_computed: int | None = None  # of `max_length`, for what a drafter that `finds_some` computes; None: all
    # the target's likeliest token after the root, and after each token, of the last verified draft
    predicted_ids: tuple[int, ...] = ()
    forced_ids: tuple[int, ...] = ()  # the next tokens, as far as the request's grammar allows only one
    # of each of `token_ids`, the likeliest tokens of the target's law that it was drawn from; see `DraftNeeds.num_top`
    target_rows: tuple[SparseRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Commits(Columns):
    """A `Commit` for each row, of different requests: for chains, with nothing predicted, forced or learnt from.

    Answers are columns, too: `Drafts`.
    """

    request_ids: tuple[str, ...]  # [num_rows]
    round_ids: Int64s  # [num_rows]
    positions: Int64s  # [num_rows]
    counts: Int64s  # [num_rows] tokens to append
    token_ids: Int64s  # [sum of `counts`]
    max_lengths: Int64s  # [num_rows]

    def __post_init__(self) -> None:
        require(len(set(self.request_ids)) == len(self), "request_ids", "different")
        columns = {"round_ids": self.round_ids, "positions": self.positions, "max_lengths": self.max_lengths}
        check_columns(len(self), **columns, counts=self.counts)
        check_counts(len(self.token_ids), counts=self.counts)

    def __len__(self) -> int:
        return len(self.request_ids)

    @classmethod
    def of(cls, commits: Sequence[Commit]) -> Commits:
        """Lay plain commits, of different requests, side by side."""
        return cls(
            request_ids=tuple(commit.request_id for commit in commits),
            round_ids=np.array([commit.round_id for commit in commits], np.int64),
            positions=np.array([commit.position for commit in commits], np.int64),
            counts=np.array([len(commit.token_ids) for commit in commits], np.int64),
            token_ids=_joined(commit.token_ids for commit in commits),
            max_lengths=np.array([commit.max_length for commit in commits], np.int64),
        )

    def take(self, rows: Sequence[int]) -> Commits:
        """Return some of the rows."""
        counts = self.counts[rows]
        return Commits(
            request_ids=tuple(self.request_ids[row] for row in rows),
            round_ids=self.round_ids[rows],
            positions=self.positions[rows],
            counts=counts,
            token_ids=self.token_ids[spans(starts_of(self.counts)[rows], counts)],
            max_lengths=self.max_lengths[rows],
        )

    def commits(self) -> Iterator[Commit]:
        """Yield each row as a message of its own."""
        numbers = (self.round_ids, self.positions, self.counts, self.max_lengths)
        rest = iter(self.token_ids.tolist())
        rows = zip(self.request_ids, *(column.tolist() for column in numbers), strict=True)
        for request_id, round_id, position, count, max_length in rows:
            yield Commit(
                request_id=request_id,
                round_id=round_id,
                position=position,
                token_ids=tuple(itertools.islice(rest, count)),
                max_length=max_length,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    request_id: str


@dataclass(slots=True, kw_only=True)  # not frozen: one per request and round, and frozen takes twice as long
class Draft:
    """Proposed tokens after `position` committed tokens: a chain, or a tree if it has `parents`. May be empty.

    `parents` has, for each token, the index of its parent, or ROOT. A token comes after its parent; siblings are tried
    in their order. `draft_probs` is None for point masses (greedy, coupled and deterministic drafts). For sampled
    tokens it has one row per parent, in the order of first children: for a chain one row per token. Siblings are
    drawn from their parent's row without replacement.

    `confidences` estimate the probability that a token is accepted if its parent is. They may depend on what precedes
    the token and on its row, not on the token.
    """

    request_id: str
    round_id: int
    position: int
    token_ids: tuple[int, ...]
    draft_probs: tuple[SparseRow, ...] | None = None
    parents: tuple[int, ...] | None = None  # None: a chain
    confidences: tuple[float, ...] | None = None
    is_found: bool = False  # in no time, by a drafter that `finds_some`

    @property
    def is_unread(self) -> bool:
        """Whether placeholders stand for its tokens: they are on a device, and nobody has read them yet."""
        return bool(self.token_ids) and self.token_ids[0] < 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drafts(Chains):
    """A `Draft` for each row, of different requests."""

    request_ids: tuple[str, ...]  # [num_rows]
    round_ids: Int64s  # [num_rows]
    positions: Int64s  # [num_rows]

    def __post_init__(self) -> None:
        num_rows, num_tokens = len(self.request_ids), len(self.token_ids)
        require(len(set(self.request_ids)) == num_rows, "request_ids", "different")
        check_columns(num_rows, round_ids=self.round_ids, positions=self.positions, lengths=self.lengths)
        check_counts(num_tokens, lengths=self.lengths)
        check_columns(num_tokens if len(self.confidences) else 0, confidences=self.confidences)
        check_columns(num_tokens if self.has_rows else 0, row_sizes=self.row_sizes)
        check_columns(len(self.row_ids), row_weights=self.row_weights)
        check_counts(len(self.row_ids), row_sizes=self.row_sizes)

    @classmethod
    def of(cls, drafts: Sequence[Draft]) -> Drafts:
        """Lay chains of different requests side by side, all of one kind.

        Raises `OverflowError` for numbers that are none of a vocabulary, `ValueError` for those that make no chains.
        """
        rows = [row for draft in drafts for row in draft.draft_probs or ()]
        return cls(
            request_ids=tuple(draft.request_id for draft in drafts),
            round_ids=np.array([draft.round_id for draft in drafts], np.int64),
            positions=np.array([draft.position for draft in drafts], np.int64),
            lengths=np.array([len(draft.token_ids) for draft in drafts], np.int64),
            token_ids=_joined(draft.token_ids for draft in drafts),
            confidences=np.array([one for draft in drafts for one in draft.confidences or ()], np.float64),
            row_sizes=np.array([len(row.token_ids) for row in rows], np.int64),
            row_ids=np.array([token_id for row in rows for token_id in row.token_ids], np.int32),
            row_weights=np.array([weight for row in rows for weight in row.weights], np.int32),
        )

    def take(self, rows: Sequence[int]) -> Drafts:
        """Return some of the rows."""
        return Drafts(
            request_ids=tuple(self.request_ids[row] for row in rows),
            round_ids=self.round_ids[rows],
            positions=self.positions[rows],
            **self.columns_of(rows),
        )

    def drafts(self) -> Iterator[Draft]:
        """Yield each row as a message of its own."""
        token_ids, confidences, end = self.token_ids.tolist(), self.confidences.tolist(), 0
        sparse_rows = self._sparse_rows() if self.has_rows else None
        numbers = (column.tolist() for column in (self.round_ids, self.positions, self.lengths))
        for request_id, round_id, position, length in zip(self.request_ids, *numbers, strict=True):
            begin, end = end, end + length
            yield Draft(
                request_id=request_id,
                round_id=round_id,
                position=position,
                token_ids=tuple(token_ids[begin:end]),
                draft_probs=tuple(itertools.islice(sparse_rows, length)) if sparse_rows and length else None,
                confidences=tuple(confidences[begin:end]) if confidences else None,
            )

    def _sparse_rows(self) -> Iterator[SparseRow]:
        """Yield the row of every token."""
        ids, weights, stop = self.row_ids.tolist(), self.row_weights.tolist(), 0
        for size in self.row_sizes.tolist():
            start, stop = stop, stop + size
            yield SparseRow(token_ids=tuple(ids[start:stop]), weights=tuple(weights[start:stop]))


def _joined(token_ids: Iterable[Sequence[int]]) -> Int64s:
    return np.array([token_id for some in token_ids for token_id in some], np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resync:
    """Ask for `Open` with the whole prefix: the drafter does not know the session, or commits left a gap."""

    request_id: str
    lost_tensors: bool = False  # the link's tensor channel has failed: send states as bytes


def each_commit(message: Commit | Commits) -> Iterable[Commit]:
    return message.commits() if isinstance(message, Commits) else (message,)


def each_draft(message: Draft | Drafts) -> Iterable[Draft]:
    return message.drafts() if isinstance(message, Drafts) else (message,)


VerifierMessage = Open | Seed | States | Commit | Commits | Close
DrafterMessage = Draft | Drafts | Resync


@dataclass(slots=True, kw_only=True)  # not frozen: one per request and round, and frozen takes twice as long
class DrafterEvent:
    """A drafter came up, went down, or sent a message."""

    drafter_id: str
    is_up: bool = True
    vocab_size: int | None = None  # may be padded beyond the target's; None: the target's
    needs: DraftNeeds = DraftNeeds()  # when it comes up
    message: DrafterMessage | None = None  # None: only the change of `is_up` or of the version
    weight_version: str | None = None  # of weights of its own, if it tells; see `PeerWeights`
    received_s: float | None = None  # arrival, by this machine's monotonic clock; None: just now


class DraftClient(Protocol):
    """The engine's interface to all drafters, wherever they run. No call blocks."""

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        """Send messages, in order; they are lost if the drafter is down."""

    def poll(self) -> list[DrafterEvent]:
        """Return the events since the last call, oldest first."""
