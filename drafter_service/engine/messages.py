"""What a draft engine's process says to the asyncio shell in front of it, and which messages go towards it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from outrider.drafter_service.engine.learning_messages import (
    ServedSample,
    SetLearning,
    TakeTexts,
    TrialCounts,
    VersionCounts,
)
from outrider.verifier_service.messages.draft import Draft, DrafterMessage, DraftNeeds, Drafts
from outrider.verifier_service.messages.drafter_load import DrafterLoad
from outrider.verifier_service.messages.engine import CONTROLS, ControlResult, PeerState, Relay

Addressed = tuple[str, DrafterMessage]  # the peer that a message goes to, and the message
MAX_ROW_IDS = 1 << 16  # of `draft_probs` in a frame of several drafts: with their weights half a mebibyte


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterReady:
    """First message of a draft engine: it is loaded and will draft."""

    vocab_size: int
    max_model_len: int
    max_draft_length: int
    vocab_fingerprint: str  # of the vocabulary that drafts are made in; empty: not known
    needs: DraftNeeds
    tensor_store: str = ""  # where channels for hidden states meet, "host:port"; "": it has none


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterUpdate:
    """Everything one step produced, in one frame."""

    relays: tuple[Relay, ...] = ()
    load: DrafterLoad | None = None
    results: tuple[ControlResult, ...] = ()
    # while the pool learns
    samples: tuple[ServedSample, ...] = ()
    num_dropped_samples: int = 0  # too large for a frame, since the last update that had samples
    # with the load
    trial: TrialCounts | None = None  # None: there is no shadow
    versions: tuple[VersionCounts, ...] = ()  # the last ones, the present one last
    shadow_error: str = ""  # why the shadow was dropped while it drafted


def framed(drafts: Iterable[Draft]) -> Iterator[DrafterMessage]:
    """Put the answers to one peer into as few frames as hold them; what is no chain stays a message of its own."""
    frames: dict[tuple[bool, bool], dict[str, Draft]] = {}  # by kind and request
    num_row_ids = 0
    for draft in drafts:
        if not _is_chain(draft):
            yield draft
            continue
        kind = (draft.draft_probs is None, draft.confidences is None)
        frame = frames.setdefault(kind, {})
        num_row_ids += (num_new := sum(len(row.token_ids) for row in draft.draft_probs or ()))
        if frame and (num_row_ids > MAX_ROW_IDS or draft.request_id in frame):
            yield from _frame(list(frame.values()))
            frame.clear()
            num_row_ids = num_new
        frame[draft.request_id] = draft
    for frame in frames.values():
        yield from _frame(list(frame.values()))


def split(frame: Drafts) -> Iterator[Drafts]:
    """Split a frame whose rows of `draft_probs` are too many for one."""
    num_parts = -(-len(frame.row_ids) // MAX_ROW_IDS)
    if num_parts <= 1:
        yield frame
        return
    step = max(1, len(frame) // num_parts)
    for start in range(0, len(frame), step):
        yield frame.take(range(start, min(start + step, len(frame))))


def _is_chain(draft: Draft) -> bool:
    """Return whether a draft is a chain with one confidence and one row for each token, as far as it has any."""
    num_tokens, rows = len(draft.token_ids), draft.draft_probs
    is_chain = draft.parents is None and (draft.confidences is None or len(draft.confidences) == num_tokens)
    if rows is None or not is_chain:
        return is_chain
    return len(rows) == num_tokens and all(len(row.token_ids) == len(row.weights) for row in rows)


def _frame(drafts: Sequence[Draft]) -> Iterator[DrafterMessage]:
    try:
        yield Drafts.of(drafts)
    except OverflowError:  # a plug-in's numbers that are no token ids: their verifier says so
        yield from drafts


LEARNING_CONTROLS = (SetLearning, TakeTexts)  # from the drafter's own shell alone, never over a link
TO_DRAFT_ENGINE = (Relay, PeerState, *CONTROLS, *LEARNING_CONTROLS)
FROM_DRAFT_ENGINE = (DrafterReady, DrafterUpdate)
