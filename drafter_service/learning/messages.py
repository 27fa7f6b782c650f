"""What passes between a pool's drafters, its learner's replica and the process in which the learner trains."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from outrider.drafter_service.engine.learning_messages import FIRST_VERSION as FIRST_NAME
from outrider.drafter_service.engine.learning_messages import ServedSample, TrialCounts, VersionCounts
from outrider.verifier_service.messages.draft import MAX_SAMPLE_TOKENS
from outrider.verifier_service.messages.metric import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterVersion:
    """Weights of a drafter: a folder in the format that the pool started from, and what they are called."""

    name: str  # "v0" is what the pool started with, whose folder is ""
    folder: str = ""


FIRST_VERSION = DrafterVersion(name=FIRST_NAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What a drafter brings its learner, about once a second."""

    drafter_id: str
    serving: str  # version
    is_new: bool = False  # it has just started: one that looks tokens up is brought `Texts`
    samples: tuple[ServedSample, ...] = ()
    num_dropped: int = 0  # samples that did not fit its outbox since the last heartbeat
    trial: TrialCounts | None = None  # of the shadow that it has
    versions: tuple[VersionCounts, ...] = ()
    shadow_error: str = ""  # why it could not load the shadow it was told to; the learner gives that candidate up
    shadow: str = ""  # the version that `shadow_error` is about; "": the present one
    serving_error: str = ""  # why it could not take the version it was told to serve
    wanted: str = ""  # the version that `serving_error` is about; "": the present one


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredState:
    """What a drafter shall serve, try and sample until its next heartbeat."""

    serving: DrafterVersion = FIRST_VERSION
    shadow: DrafterVersion | None = None
    shadow_share: float = 0.0
    sample_share: float = 0.0
    max_sample_tokens: int = MAX_SAMPLE_TOKENS


class Action(enum.StrEnum):
    """What an operator asks of a learner."""

    PAUSE = "pause"  # no more training, no trials; what serves goes on
    RESUME = "resume"
    ROLLBACK = "rollback"  # serve the version before, now
    PUBLISH = "publish"  # serve a folder without trial: `folder`; watched like any other
    EXPORT = "export"  # copy the serving version to `folder`


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """An operator's call; answered by `Answer`."""

    call_id: str
    action: Action
    folder: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    call_id: str
    error: str | None = None
    text: str = ""  # what was done, in words


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A trainer's reward for a response, by its request's id."""

    request_id: str
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """What may change while the learner runs; other options hold from its start."""

    sample_share: float = 1.0  # of the sessions that may be kept
    shadow_share: float = 0.25  # of the sessions, while there is a trial
    num_steps: int = 50  # training steps to a candidate, at most; two passes over the samples are enough
    min_samples: int = 64  # before the first candidate
    rate_scale: float = 0.3  # of the usual learning rates of a fine-tuned drafter: served text is little and noisy
    reward_weighted: bool = False  # samples count by their rewards


class Phase(enum.StrEnum):
    """What a learner is at."""

    COLLECTING = "collecting"
    TRAINING = "training"
    TRIAL = "trial"  # a candidate drafts in the shadow
    WATCH = "watch"  # a new version serves, its predecessor drafts in the shadow
    PAUSED = "paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """One version, for status and metrics."""

    name: str
    is_serving: bool = False
    fate: str = ""  # in words: "serves", "replaced by v3", "refused: ..", "rolled back: .."
    # served, all drafters together
    num_rounds: int = shown("learner_version_rounds", "Drafts of a version that text has followed")
    num_draft_tokens: int = shown("learner_version_draft_tokens", "Draft tokens of a version")
    num_named_tokens: int = shown(
        "learner_version_named_tokens",
        "Draft tokens of a version that the target committed; acceptance = this / learner_version_draft_tokens",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerStatus:
    """What a learner is at, for `outrider learner status`, `/load` and metrics. No text of any request."""

    pool: str = ""
    phase: Phase = Phase.COLLECTING
    serving: str = FIRST_VERSION.name
    num_samples: int = shown("learner_samples", "Samples that a learner keeps", is_gauge=True)
    num_bytes: int = shown("learner_sample_bytes", "Bytes of the samples that a learner keeps", is_gauge=True)
    num_seen: int = shown("learner_seen_samples", "Samples that came to a learner")
    num_dropped: int = shown("learner_dropped_samples", "Samples lost for want of room on the way")
    num_steps: int = shown("learner_steps", "Training steps")
    loss: float | None = None  # of the last steps
    train_s: float = shown("learner_train_seconds", "CPU time of training", default=0.0)
    num_candidates: int = shown("learner_candidates", "Candidates that training ended with")
    num_published: int = shown("learner_published", "Versions that came to serve")
    num_refused: int = shown("learner_refused", "Candidates refused by held-out text or trial")
    num_rolled_back: int = shown("learner_rolled_back", "Versions taken back for their predecessor")
    last_event: str = ""  # in words
    versions: tuple[VersionRecord, ...] = ()  # the newest last


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerReady:
    """First message of a learner's process: it has read what serves, and will learn."""

    serving: DrafterVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """What a new drafter that looks tokens up remembers from now on, oldest first; without states."""

    drafter_id: str
    samples: tuple[ServedSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerUpdate:
    """Sent several times a second, and at once when the desired state changes."""

    desired: DesiredState
    status: LearnerStatus
    answers: tuple[Answer, ...] = ()
    texts: tuple[Texts, ...] = ()  # for drafters that were new, also where there are none


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettingsChange:
    settings: LearnerSettings = field(default_factory=LearnerSettings)


TO_LEARNER = (Heartbeat, Reward, Ask, LearnerSettingsChange)
FROM_LEARNER = (LearnerReady, LearnerUpdate)
