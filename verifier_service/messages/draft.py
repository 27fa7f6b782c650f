"""The messages between verifier and drafter, one dataclass each.

A drafter's state is disposable: `Open` with the whole prefix rebuilds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol, get_type_hints

from outrider.verifier_service.messages.history import PastResponse

PROTOCOL_VERSION = 8
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
    # the target's likeliest token after the root, and after each token, of the last verified draft
    predicted_ids: tuple[int, ...] = ()
    forced_ids: tuple[int, ...] = ()  # the next tokens, as far as the request's grammar allows only one
    # of each of `token_ids`, the likeliest tokens of the target's law that it was drawn from; see `DraftNeeds.num_top`
    target_rows: tuple[SparseRow, ...] = ()


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Resync:
    """Ask for `Open` with the whole prefix: the drafter does not know the session, or commits left a gap."""

    request_id: str
    lost_tensors: bool = False  # the link's tensor channel has failed: send states as bytes


VerifierMessage = Open | Seed | States | Commit | Close
DrafterMessage = Draft | Resync


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


def check_draft(draft: Draft, *, draft_vocab_size: int, max_length: int, max_nodes: int = 0) -> str | None:
    """Return what is wrong with a draft, or None if it may be verified.

    A tree may have `max_nodes` tokens (0: only chains) and depth `max_length`. Wrong draft_probs would bias sampling
    silently, so rows are checked: unique ids within the drafter's vocabulary, positive weights with the right sum, the
    drawn ids among them. An id beyond the *target's* vocabulary (padding) is valid: it is verified, with target
    probability 0.
    """
    if problem := _check_shape(draft, max_length, max_nodes):
        return problem
    if any(not 0 <= token_id < draft_vocab_size for token_id in draft.token_ids):
        return "draft token id outside the vocabulary"
    if draft.confidences is not None:
        if len(draft.confidences) != len(draft.token_ids):
            return "confidences and token_ids differ in length"
        if any(not 0.0 <= confidence <= 1.0 for confidence in draft.confidences):  # also catches NaN
            return "confidence outside [0, 1]"
    return None if draft.draft_probs is None else _check_rows(draft, draft.draft_probs, draft_vocab_size)


def _check_shape(draft: Draft, max_length: int, max_nodes: int) -> str | None:
    num_tokens, parents = len(draft.token_ids), draft.parents
    limit = max_length if parents is None else max_nodes
    if parents is not None and max_nodes == 0:
        return "parents, where a chain was asked for"
    if num_tokens > limit:
        return f"draft of {num_tokens} tokens, {limit} were asked for"
    if parents is None:
        return None
    if len(parents) != num_tokens:
        return "parents and token_ids differ in length"
    depths: list[int] = []  # from 1
    for index, parent in enumerate(parents):
        if not ROOT <= parent < index:
            return "a parent is no earlier token"
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    if depths and max(depths) > max_length:
        return f"draft {max(depths)} tokens deep, {max_length} were asked for"
    if len(set(zip(parents, draft.token_ids, strict=True))) != num_tokens:
        return "the same token twice after one parent"
    return None


def _check_rows(draft: Draft, rows: Sequence[SparseRow], draft_vocab_size: int) -> str | None:
    if draft.parents is None:
        if len(rows) != len(draft.token_ids):
            return "draft_probs and token_ids differ in length"
        drawn: Sequence[Sequence[int]] = [(token_id,) for token_id in draft.token_ids]
    else:
        children: dict[int, list[int]] = {}  # by parent, in the order of first children, as the rows
        for parent, token_id in zip(draft.parents, draft.token_ids, strict=True):
            children.setdefault(parent, []).append(token_id)
        if len(rows) != len(children):
            return "draft_probs are not one per parent"
        drawn = list(children.values())
    problems = (_check_row(row, token_ids, draft_vocab_size) for row, token_ids in zip(rows, drawn, strict=True))
    return next(filter(None, problems), None)


def _check_row(row: SparseRow, drawn_ids: Sequence[int], draft_vocab_size: int) -> str | None:
    if len(row.token_ids) != len(row.weights) or len(set(row.token_ids)) != len(row.token_ids):
        return "draft_probs ids are not unique or do not match their weights"
    if any(not 0 <= id_ < draft_vocab_size for id_ in row.token_ids):
        return "draft_probs id outside the vocabulary"
    if any(weight <= 0 for weight in row.weights) or sum(row.weights) != DRAFT_PROB_SCALE:
        return "draft_probs weights do not sum to one"
    if any(token_id not in row.token_ids for token_id in drawn_ids):
        return "the drawn token is not in its draft_probs"
    return None
