"""What a drafter says to the learner of its pool, by way of its shell, and is told."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.verifier_service.messages.draft import MAX_SAMPLE_TOKENS
from outrider.verifier_service.messages.wire import MAX_FRAME_BYTES

FIRST_VERSION = "v0"  # what the weights are called that the pool started with
MAX_SAMPLE_BYTES = MAX_FRAME_BYTES // 2  # of a sample, which travels in one frame


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSample:
    """The text of one request as the target committed it, and what the drafter read of the target meanwhile.

    Drafted tokens that were rejected are not in it, nor their states. States are missing where the target had none to
    give, as behind a hit in its prefix cache; a drafter that reads the last state alone has those of its asks.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int  # tokens before which nothing is known to be the target's own
    cache_salt: str = ""
    weight_version: str = ""  # of the target's weights, where the verifier says it (in rollouts)
    state_width: int = 0  # values per state, over all taps; 0: no states
    state_positions: tuple[int, ...] = ()  # of the tokens that have a state, ascending
    states: bytes = b""  # bfloat16 [len(state_positions), state_width], little-endian
    num_top: int = 0  # of `DraftNeeds.num_top`; 0: no rows
    top_ids: bytes = b""  # int32 [number of tokens after the prompt, num_top], little-endian; -1: fewer tokens
    top_weights: bytes = b""  # int32, the same shape: the target's law in parts of DRAFT_PROB_SCALE, each row's sum

    @property
    def num_bytes(self) -> int:
        """Bytes that a reservoir counts for it: token ids and positions as int32."""
        own = 4 * (len(self.token_ids) + len(self.state_positions))
        return own + len(self.states) + len(self.top_ids) + len(self.top_weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionCounts:
    """How a drafter's answers under one version of its weights fared, since it took that version."""

    version: str
    num_rounds: int = 0  # answers that text has followed
    num_draft_tokens: int = 0
    num_named_tokens: int = 0  # of them, those before the first that the target did not commit in its place


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCounts:
    """A drafter in the shadow beside the one that serves, on the same rounds, since the trial began.

    The score of a round: tokens that the draft named right before its first wrong one; of drafts that were drawn, the
    probability that the draft gave to the first token that came. A committed token follows the target's law whoever
    drafted, so both scores are fair; a drawn draft's tokens would not be: the target takes those that it verifies.
    """

    serving: str  # version
    shadow: str  # version
    num_rounds: int = 0
    serving_score: float = 0.0  # sum over the rounds
    shadow_score: float = 0.0
    squared_difference: float = 0.0  # sum of (shadow - serving) ** 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SetLearning:
    """What a draft engine does for its pool's learner from now on; an engine starts with the defaults: nothing.

    The answer is a `ControlResult`; after an error the shadow is none.
    """

    call_id: str
    sample_share: float = 0.0  # of the sessions that may be kept
    max_sample_tokens: int = MAX_SAMPLE_TOKENS  # of a longer text, the first so many
    # a candidate's or predecessor's weights, drafting beside the serving ones; "": those that the pool started with,
    # or, without a version, none
    shadow_folder: str = ""
    shadow_version: str = ""
    shadow_share: float = 0.0  # of the sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeTexts:
    """Texts for a drafter that looks tokens up to remember, oldest first; the answer is a `ControlResult`."""

    call_id: str
    samples: tuple[ServedSample, ...]
