"""What verifier and drafter say to each other, one frozen dataclass per message.

Only these cross between the two sides. A drafter's state is disposable: `Open` with the whole prefix rebuilds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

PROTOCOL_VERSION = 5
LOCAL_DRAFTER_ID = "local"  # of a drafter in the verifier's own process
ROOT = -1  # as a parent: the last committed token
DRAFT_PROB_SCALE = 1 << 16  # quantised draft probabilities are integers that sum to this


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSampling:
    """The part of a request's sampling that shapes its draft.

    `temperature` 0 asks for a greedy draft (a point mass, no draft_probs). With a `seed` the drafter takes the argmax
    under the shared counter-based noise (coupled sampling) and again sends ids alone.
    """

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    choice_index: int = 0

    def __post_init__(self) -> None:
        check_sampling_shape(self.temperature, self.top_k, self.top_p, self.min_p)


def check_sampling_shape(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Raise `ValueError` naming the field that is out of range."""
    require(math.isfinite(temperature) and 0.0 <= temperature <= 100.0, "temperature", "in [0, 100]")
    require(top_k >= 0, "top_k", "0 (off) or positive")
    require(0.0 < top_p <= 1.0, "top_p", "in (0, 1]")
    require(0.0 <= min_p <= 1.0, "min_p", "in [0, 1]")


def require(condition: bool, field_name: str, expectation: str) -> None:
    """Raise `ValueError` naming a field, unless the condition holds."""
    if not condition:
        raise ValueError(f"{field_name} must be {expectation}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftNeeds:
    """What a drafter must be told besides the tokens; most need nothing.

    `taps` name hidden states of the target, to be joined in this order: i >= 0 is the input of its layer i, FINAL_TAP
    what its output embedding sees (after the final norm).
    """

    taps: tuple[int, ...] = ()
    last_state_only: bool = False  # the states of the token before the draft are enough
    predictions: bool = False  # `Commit.predicted_ids`
    is_found: bool = False  # its drafts, chains, are found and not computed, in the verifier's process: at once


NO_NEEDS = DraftNeeds()
FINAL_TAP = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Start, or start again, the session of a request whose committed tokens are `token_ids` (never empty).

    Sessions of different `cache_salt` share nothing.
    """

    request_id: str
    sampling: DraftSampling
    token_ids: tuple[int, ...]
    cache_salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """The target's tapped states of the committed tokens from `position` on, before the `Commit` that asks for a draft.

    The last committed token has none yet. A drafter that needs all states gets every position once, in order.
    """

    request_id: str
    position: int
    dtype: str  # torch's name: float32, float16 or bfloat16
    width: int  # values per token: all taps together
    data: bytes  # [num_tokens, width], little-endian; empty where they come over a channel beside the link
    tensor: int = 0  # the number of the channel's tensor that holds the data; 0: they are here
    num_bytes: int = 0  # of that tensor
    channel: str = ""  # the group of that channel: after a reconnection there is another, which counts from 1 again


@dataclass(slots=True, kw_only=True)  # made for each request and round: frozen, that takes twice as long
class Commit:
    """Append `token_ids` (may be empty) at `position` (tokens known before them) and ask for a draft after them.

    `max_length` 0 asks for nothing and is answered by nothing. With `max_nodes` the draft may be a tree of so many
    tokens, none deeper than `max_length`; 0: a chain.
    """

    request_id: str
    round_id: int
    position: int
    token_ids: tuple[int, ...]
    max_length: int
    max_nodes: int = 0
    # the target's likeliest token after the draft's root and after each token of the draft that was verified last
    predicted_ids: tuple[int, ...] = ()
    forced_ids: tuple[int, ...] = ()  # the only tokens that the request's grammar allows next, one after another


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseRow:
    """One position's draft distribution, exactly as it was drawn from: weight / DRAFT_PROB_SCALE per token id."""

    token_ids: tuple[int, ...]  # unique
    weights: tuple[int, ...]  # positive, sum to DRAFT_PROB_SCALE


@dataclass(slots=True, kw_only=True)  # made for each request and round: frozen, that takes twice as long
class Draft:
    """Proposed tokens after `position` committed tokens: a chain, or a tree where it has `parents`.

    `parents` holds, for each token, the index of the one that it follows, or ROOT; a token comes after its parent, and
    siblings are tried in their order. `draft_probs` is None for point masses (greedy, coupled and deterministic
    drafts). Where tokens were drawn at random it has one row per parent, in the order of their first children: for a
    chain one row per token. Siblings are drawn from their parent's row without replacement.

    `confidences` are the drafter's own estimates that a token is accepted if its parent is, a function of what precedes
    the token and of the row it was drawn from. An empty draft is the honest answer of a drafter that has nothing.
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
    """The drafter does not know the session, or commits left a gap: it wants `Open` with the whole prefix."""

    request_id: str
    lost_tensors: bool = False  # nothing comes through the link's channel any more: states must come as bytes


VerifierMessage = Open | States | Commit | Close
DrafterMessage = Draft | Resync


@dataclass(slots=True, kw_only=True)  # made for each request and round: frozen, that takes twice as long
class DrafterEvent:
    """Something that happened at a drafter: it came up, went down, or said something."""

    drafter_id: str
    is_up: bool = True
    vocab_size: int | None = None  # the drafter's, when it says so: its vocabulary may be padded beyond the target's
    needs: DraftNeeds = DraftNeeds()  # when it comes up
    message: DrafterMessage | None = None  # None: only the change of `is_up`
    received_s: float | None = None  # when it arrived, by this machine's monotonic clock; None: just now


class DraftClient(Protocol):
    """The engine's whole view of the drafters, wherever they run. Neither call blocks."""

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        """Hand messages over, in order; a drafter that is down loses them."""

    def poll(self) -> list[DrafterEvent]:
        """Return what arrived since the last call, oldest first."""


def check_draft(draft: Draft, *, draft_vocab_size: int, max_length: int, max_nodes: int = 0) -> str | None:
    """Return what is wrong with a draft as text, or None when it may be verified.

    A tree may have `max_nodes` tokens (0: chains only), none deeper than `max_length`. A drafter that misreports its
    draft_probs biases sampling silently, so rows are checked: unique ids within the drafter's vocabulary, positive
    weights with the right sum, the drawn ids among them, none twice. An id beyond the *target's* vocabulary (padding)
    is no fault: it was drawn, so it is verified, with target probability 0.
    """
    if problem := _check_shape(draft, max_length, max_nodes):
        return problem
    if any(not 0 <= token_id < draft_vocab_size for token_id in draft.token_ids):
        return "draft token id outside the vocabulary"
    if draft.confidences is not None:
        if len(draft.confidences) != len(draft.token_ids):
            return "confidences and token_ids differ in length"
        if any(not 0.0 <= confidence <= 1.0 for confidence in draft.confidences):  # NaN is not in there either
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
        children: dict[int, list[int]] = {}  # in the order of first children, as the rows are
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
