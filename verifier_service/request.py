"""What a user asks for, what the engine remembers of it, and what it answers."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from outrider.verifier_service.drafting import Draft, check_sampling_shape, require

GREEDY_TEMPERATURE = 1e-5  # at and below this a request is greedy, as in vLLM


class FinishReason(enum.Enum):
    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"  # max_tokens or the model's maximum length
    ABORT = "abort"  # cancelled by the client
    ERROR = "error"


class VerificationMode(enum.Enum):
    """How drafts are judged; see the design's fifth idea."""

    GREEDY = "greedy"
    REJECTION = "rejection"  # unseeded sampling
    COUPLED = "coupled"  # seeded sampling: drafter-invariant


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. Raises `ValueError` naming the field that is out of range."""

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    choice_index: int = 0  # which of the `n` choices of one prompt: part of the noise key
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_speculative_tokens: int | None = None  # a cap on the draft length; 0: never speculate; None: the router decides

    def __post_init__(self) -> None:
        check_sampling_shape(self.temperature, self.top_k, self.top_p, self.min_p)
        require(self.max_tokens >= 1, "max_tokens", "at least 1")
        require(self.choice_index >= 0, "choice_index", "at least 0")
        require(self.seed is None or -(1 << 63) <= self.seed < 1 << 63, "seed", "a 64-bit integer")
        cap = self.num_speculative_tokens
        require(cap is None or cap >= 0, "num_speculative_tokens", "at least 0")

    @property
    def mode(self) -> VerificationMode:
        if self.temperature <= GREEDY_TEMPERATURE:
            return VerificationMode.GREEDY
        return VerificationMode.REJECTION if self.seed is None else VerificationMode.COUPLED


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationPlan:
    """The router's decision for one request: who drafts, how much, and why not where the length is 0."""

    drafter_id: str | None = None
    draft_length: int = 0
    disabled_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One choice of one prompt, as it reaches the engine."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    plan: SpeculationPlan = SpeculationPlan()


@dataclass(slots=True, kw_only=True)
class SpeculationMetrics:
    """Counters of one request's speculation; the two rates are derived where they are shown.

    draft_acceptance_rate  = num_accepted_tokens / num_draft_tokens (scheduled for verification)
    mean_acceptance_length = 1 + num_accepted_tokens / num_drafts   (bonus included, empty drafts left out)
    """

    enabled: bool = False
    disabled_reason: str | None = None
    num_drafts: int = 0  # verifications with a draft that was not empty
    num_draft_tokens: int = 0  # draft tokens scheduled for verification
    num_accepted_tokens: int = 0
    num_cut_tokens: int = 0  # received, but cut before verification
    num_empty_rounds: int = 0  # decode steps that ran without a draft although speculation was on
    num_accepted_per_position: list[int] = field(default_factory=list)

    @property
    def draft_acceptance_rate(self) -> float | None:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """Tokens committed by one step for one request, with its counters so far; the last one has a finish reason."""

    request_id: str
    token_ids: tuple[int, ...]
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    finish_reason: FinishReason | None = None
    error: str | None = None
    speculation: SpeculationMetrics | None = None


@dataclass(slots=True, eq=False)
class Request:
    """The engine's own record of a request: `num_computed_tokens` chases `num_tokens` plus the draft.

    token_ids   |<- prompt ->|<- output ->|<- draft (in `draft`, not yet in token_ids) ->|
    KV written  |<- num_computed_tokens ->|
    """

    request_id: str
    sampling: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    plan: SpeculationPlan
    arrival_s: float
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # chained, of the full blocks of token_ids; grown lazily
    draft: Draft | None = None  # arrived, bounds-checked, for exactly this position; None or empty: decode plainly
    hold_until_s: float | None = None  # leave out of steps until then: its draft is on its way
    num_preemptions: int = 0
    metrics: SpeculationMetrics = field(default_factory=SpeculationMetrics)

    @classmethod
    def of(cls, message: GenerationRequest, now_s: float) -> Request:
        return cls(
            request_id=message.request_id,
            sampling=message.sampling,
            token_ids=list(message.prompt_token_ids),
            num_prompt_tokens=len(message.prompt_token_ids),
            plan=message.plan,
            arrival_s=now_s,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_decoding(self) -> bool:
        """True when the next step of this request samples: all but its last token are in the KV cache."""
        return self.num_computed_tokens >= self.num_tokens - 1
