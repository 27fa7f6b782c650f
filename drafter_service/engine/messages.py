"""What a draft engine's process says to the asyncio shell in front of it, and which messages go towards it."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.drafter_service.engine.learning_messages import (
    ServedSample,
    SetLearning,
    TakeTexts,
    TrialCounts,
    VersionCounts,
)
from outrider.verifier_service.messages.draft import DrafterMessage, DraftNeeds
from outrider.verifier_service.messages.drafter_load import DrafterLoad
from outrider.verifier_service.messages.engine import CONTROLS, ControlResult, PeerState, Relay

Addressed = tuple[str, DrafterMessage]  # the peer that a message goes to, and the message


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


LEARNING_CONTROLS = (SetLearning, TakeTexts)  # from the drafter's own shell alone, never over a link
TO_DRAFT_ENGINE = (Relay, PeerState, *CONTROLS, *LEARNING_CONTROLS)
FROM_DRAFT_ENGINE = (DrafterReady, DrafterUpdate)
