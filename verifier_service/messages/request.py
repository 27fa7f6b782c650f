"""A generation request, the engine's record of it, and its outputs."""

from __future__ import annotations

import enum
import itertools
import math
from dataclasses import dataclass, field, fields
from typing import Annotated

from outrider.verifier_service.messages.beam_search import BeamSearch, check_alone
from outrider.verifier_service.messages.draft import (
    Draft,
    DraftSampling,
    Range,
    SparseRow,
    Temperature,
    check_ranges,
    require,
)
from outrider.verifier_service.messages.handover import ArrivedKV, KVSource
from outrider.verifier_service.messages.history import PastResponse
from outrider.verifier_service.messages.inter_token_time import InterTokenTime
from outrider.verifier_service.messages.thought import Thought

GREEDY_TEMPERATURE = 1e-5  # at most this: greedy, as in vLLM
MAX_LOGPROBS = 20  # alternatives per token, as OpenAI and vLLM
LOWEST_LOGPROB = -9999.0  # in place of -inf, which JSON lacks; as vLLM
MAX_LOGIT_BIASES = 300  # as OpenAI
MAX_PRIORITY = 1000
MAX_TARGET_INTER_TOKEN_MS = 60_000.0
MAX_STRUCTURED_CHARS = 1 << 17  # of a schema, or of all choices together
MAX_GRAMMAR_CHARS = 1 << 19  # of a grammar: one that calls are held to has the schemas of all tools
MAX_STRUCTURED_CHOICES = 1024
MAX_BAD_WORD_TOKENS = 1024  # of all bad words together, as vLLM


class FinishReason(enum.Enum):
    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"  # max_tokens or the model's maximum length
    ABORT = "abort"  # cancelled by the client
    ERROR = "error"
    NOT_TAKEN = "not_taken"  # by the taker of a request: the gateway sends it again, clients see nothing


class TokenOrigin(enum.StrEnum):
    """Where a committed token came from; see docs/architecture.md, "Words"."""

    ACCEPTED = "accepted"  # the draft token was right
    RECOVERED = "recovered"  # sampled in place of the first rejected draft token
    BONUS = "bonus"  # sampled after a fully accepted draft
    PLAIN = "plain"  # sampled without a draft


class VerificationMode(enum.Enum):
    """How drafts are judged; see docs/exactness.md."""

    GREEDY = "greedy"
    REJECTION = "rejection"  # unseeded sampling
    COUPLED = "coupled"  # seeded sampling: drafter-invariant


class AcceptanceRule(enum.StrEnum):
    """Which draft tokens count as right."""

    STANDARD = "standard"  # token by token: rejection sampling, or equality for greedy and seeded requests
    BLOCK = "block"  # the same law, never fewer tokens on average (Sun et al. 2024)
    TYPICAL = "typical"  # tokens that are likely enough under the target (Medusa, Cai et al. 2024): changes the law

    @property
    def is_lossy(self) -> bool:
        """Whether the output's law differs from the target's."""
        return self is AcceptanceRule.TYPICAL


class LogprobsMode(enum.StrEnum):
    """Which law a request's log probabilities are of; the words are vLLM's."""

    RAW = "raw_logprobs"  # the model's own
    PROCESSED = "processed_logprobs"  # the law that each token was drawn from; see `sampling.logprobs`


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitBias:
    """A bias that is added to one token's logit."""

    token_id: int
    bias: float


class StructuredKind(enum.StrEnum):
    """How the form of an output is described."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"  # any JSON object
    REGEX = "regex"
    GRAMMAR = "grammar"  # Lark or GBNF
    CHOICE = "choice"  # one of several texts


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """The form that an output must have. Raises `ValueError` naming `structured` if it is invalid."""

    kind: StructuredKind
    text: str = ""  # the schema as JSON, the regular expression or the grammar
    choices: tuple[str, ...] = ()
    is_strict: bool = False  # refuse a schema with keywords that the grammar lacks, instead of leaving them out

    def __post_init__(self) -> None:
        limit = MAX_GRAMMAR_CHARS if self.kind is StructuredKind.GRAMMAR else MAX_STRUCTURED_CHARS
        num_chars = len(self.text) + sum(len(choice) for choice in self.choices)
        require(num_chars <= limit, "structured", f"at most {limit} characters")
        if self.kind is StructuredKind.CHOICE:
            is_list = 1 <= len(self.choices) <= MAX_STRUCTURED_CHOICES and all(self.choices)
            require(is_list, "structured", f"1 to {MAX_STRUCTURED_CHOICES} texts, none of them empty")
        elif self.kind is not StructuredKind.JSON_OBJECT:
            require(bool(self.text), "structured", f"a {self.kind} that is not empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonSampling(DraftSampling):
    """What callers of `LLM` and the engine give alike."""

    temperature: Temperature = 1.0  # a drafter is always told
    # upper bound of the draft length; 0: no drafts; None: the router decides
    num_speculative_tokens: Annotated[int | None, Range(0, math.inf, text="at least 0")] = None
    # subtracted from the logit of every token that the output contains, and once per occurrence
    presence_penalty: Annotated[float, Range(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, Range(-2, 2)] = 0.0
    # divides positive, multiplies negative logits of tokens in prompt or output
    repetition_penalty: Annotated[float, Range(0, 100, is_open=True)] = 1.0
    min_tokens: int = 0  # no end-of-sequence or stop token before so many output tokens
    ignore_eos: bool = False
    # the target probability must exceed min(epsilon, delta * exp(-entropy))
    typical_epsilon: Annotated[float, Range(0, 1, is_open=True)] = 0.09
    typical_delta: Annotated[float, Range(0, 1, is_open=True)] = 0.3
    # number of alternatives beside each output token, and beside each prompt token but the first; None: no logprobs
    logprobs: Annotated[int | None, Range(0, MAX_LOGPROBS)] = None
    prompt_logprobs: Annotated[int | None, Range(0, MAX_LOGPROBS)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(CommonSampling):
    """Sampling parameters. Raises `ValueError` naming the field that is out of range."""

    max_tokens: Annotated[int, Range(1, math.inf, text="at least 1")] = 16
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[LogitBias, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that the output must not contain
    allowed_token_ids: tuple[int, ...] = ()  # no others; none: all
    logprobs_mode: LogprobsMode = LogprobsMode.RAW
    structured: StructuredOutput | None = None
    thought: Thought | None = None  # which `structured` follows, or which is bounded; None: no thought matters
    acceptance: AcceptanceRule = AcceptanceRule.STANDARD
    beams: BeamSearch | None = None  # None: tokens are drawn

    def __post_init__(self) -> None:
        check_ranges(self)
        require(len(self.logit_bias) <= MAX_LOGIT_BIASES, "logit_bias", f"at most {MAX_LOGIT_BIASES} tokens")
        require(all(-100.0 <= item.bias <= 100.0 for item in self.logit_bias), "logit_bias", "in [-100, 100]")
        require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "in [0, max_tokens]")
        require(all(self.bad_words), "bad_words", "of one token or more each")
        num_bad_tokens, limit = sum(map(len, self.bad_words)), MAX_BAD_WORD_TOKENS
        require(num_bad_tokens <= limit, "bad_words", f"at most {limit} tokens together")
        is_of_law = self.logprobs_mode is LogprobsMode.RAW or not self.acceptance.is_lossy
        expected = f"{LogprobsMode.RAW} with rejection_sample_method {self.acceptance}, which draws from another law"
        require(is_of_law, "logprobs_mode", expected)
        if self.beams is not None:
            check_alone(self)

    @property
    def mode(self) -> VerificationMode:
        if self.temperature <= GREEDY_TEMPERATURE:
            return VerificationMode.GREEDY
        return VerificationMode.REJECTION if self.seed is None else VerificationMode.COUPLED

    @property
    def has_mask(self) -> bool:
        """Whether tokens are allowed by what stands before them."""
        return self.structured is not None or self.thought is not None

    @property
    def of_draft(self) -> DraftSampling:
        """The part that drafters need."""
        return DraftSampling(**{each.name: getattr(self, each.name) for each in fields(DraftSampling)})


class DisabledReason(enum.StrEnum):
    """Why a request runs without drafts: the values of `disabled_reason`."""

    REQUEST_OPT_OUT = "request_opt_out"
    LOAD = "load"  # the verifier is compute-bound: a draft token costs more than it brings
    LOW_ACCEPTANCE = "low_acceptance"
    DRAFTER_UNAVAILABLE = "drafter_unavailable"  # no drafter, or no link to one
    DRAFTER_TIMEOUT = "drafter_timeout"  # late or bad drafts: the circuit breaker of every drafter is open
    DRAFT_QUEUE = "draft_queue"  # drafts arrive too late to pay for the wait
    WARMUP = "warmup"  # no step-time profile yet
    CONFIG = "config"  # the operator switched it off


class EnabledReason(enum.StrEnum):
    """Why a request has drafts."""

    PAYS = "pays"  # a draft token brings more than it costs
    DWELL = "dwell"  # it no longer does, but not for long enough to switch drafts off
    PINNED = "pinned"  # the operator fixed the length


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationPlan:
    """The router's decision for one request: the drafter, the draft length, and the reason.

    The length is an upper bound, within which the verifier's price decides. A pinned length is exact.
    """

    drafter_id: str | None = None
    draft_length: int = 0
    enabled_reason: EnabledReason | None = None
    disabled_reason: DisabledReason | None = None
    is_pinned: bool = False

    @property
    def is_off(self) -> bool:
        """Whether the request has no drafter until the plan changes, so that its session can be closed."""
        return self.draft_length == 0 and self.drafter_id is None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One choice of one prompt, as it reaches the engine. Raises `ValueError` naming the field out of range."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    plan: SpeculationPlan = SpeculationPlan()
    prediction_token_ids: tuple[int, ...] = ()  # the client's prediction of the output, used as a draft
    output_token_ids: tuple[int, ...] = ()  # already published by a lost verifier; generation continues after them
    group_id: str | None = None  # the n choices of one prompt share it, and the prompt's KV
    cache_salt: str = ""  # only requests with the same salt share prefixes
    partition: str = ""  # in rollouts: only requests of the same one share histories
    # in rollouts: whose responses it drafts from and joins; None: those of its prompt. "", everywhere: nobody's
    history_key: str | None = None
    may_learn: bool = False  # drafters may keep its text for a while, to learn from
    history: tuple[PastResponse, ...] = ()  # responses of that key which the verifier may lack, oldest first
    adapter: str | None = None  # name of a LoRA adapter, if the engine serves any
    priority: int = 0  # lower is served earlier
    target_inter_token_ms: float | None = None  # if slower, it keeps drafts longer under load; if far faster, shorter
    trace_parent: str | None = None  # W3C traceparent of the request's span; None: not traced
    session_id: str | None = None  # requests of one session share a prefix and prefer one verifier
    hands_over: bool = False  # after its first token it stands still, for another verifier to take it
    kv_source: KVSource | None = None  # its KV is there: take it over, or end as `NOT_TAKEN`
    most_waiting: int | None = None  # with it, for it to be taken; else it is refused. None: any number
    is_background: bool = False  # runs only while the engine has no other request; for the KV that it leaves cached

    def __post_init__(self) -> None:
        require(abs(self.priority) <= MAX_PRIORITY, "priority", f"in [-{MAX_PRIORITY}, {MAX_PRIORITY}]")
        target_ms, limit = self.target_inter_token_ms, MAX_TARGET_INTER_TOKEN_MS
        require(target_ms is None or 0.0 < target_ms <= limit, "target_inter_token_ms", f"in (0, {limit:g}]")


@dataclass(slots=True, kw_only=True)
class SpeculationMetrics:
    """Counters of one request's speculation, and two rates derived from them.

    draft_acceptance_rate  = num_accepted_tokens / num_draft_tokens (scheduled for verification)
    mean_acceptance_length = 1 + num_accepted_tokens / num_drafts   (bonus included, empty drafts left out)
    """

    enabled: bool = False
    disabled_reason: DisabledReason | None = None
    acceptance: AcceptanceRule = AcceptanceRule.STANDARD
    num_drafts: int = 0  # verifications of a non-empty draft
    num_draft_tokens: int = 0  # draft tokens scheduled for verification
    num_accepted_tokens: int = 0
    num_cut_tokens: int = 0  # received, but cut before verification
    num_empty_rounds: int = 0  # decode steps without a draft although speculation was on
    num_accepted_per_position: list[int] = field(default_factory=list)

    @property
    def is_lossy(self) -> bool:
        """Whether the output's law differs from the target's."""
        return self.acceptance.is_lossy

    def plus(self, other: SpeculationMetrics) -> SpeculationMetrics:
        """Return the sums of both, and the first reason that either has."""
        per_position = itertools.zip_longest(
            self.num_accepted_per_position, other.num_accepted_per_position, fillvalue=0
        )
        return SpeculationMetrics(
            enabled=self.enabled or other.enabled,
            disabled_reason=self.disabled_reason or other.disabled_reason,
            acceptance=self.acceptance,
            num_drafts=self.num_drafts + other.num_drafts,
            num_draft_tokens=self.num_draft_tokens + other.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens + other.num_accepted_tokens,
            num_cut_tokens=self.num_cut_tokens + other.num_cut_tokens,
            num_empty_rounds=self.num_empty_rounds + other.num_empty_rounds,
            num_accepted_per_position=[sum(accepted) for accepted in per_position],
        )

    @property
    def draft_acceptance_rate(self) -> float | None:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log probabilities of one token and of the likeliest ones, of the law that the request's `LogprobsMode` names."""

    token_id: int
    logprob: float
    rank: int  # 1: the likeliest
    top_token_ids: tuple[int, ...] = ()  # the likeliest first
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """When the step of an output ran, in Unix seconds; only for traced requests."""

    began_s: float
    ended_s: float
    num_scheduled_tokens: int
    drafter_id: str | None = None  # of the verified draft
    draft_asked_s: float | None = None
    draft_received_s: float | None = None


@dataclass(slots=True, kw_only=True)  # not frozen: one per request and step, and frozen takes 2.4 times as long
class RequestOutput:
    """One step's committed tokens of one request, and its counters so far; the last output has a finish reason."""

    request_id: str
    token_ids: tuple[int, ...]
    num_draft_tokens: int = 0  # verified in this step
    num_accepted_tokens: int = 0  # the first of `token_ids` are accepted draft tokens
    follows_leaf: bool = False  # the last token is a bonus token: no draft token followed the accepted ones
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per token, if asked for
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # one per prompt token, in the first output
    timing: StepTiming | None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    finish_reason: FinishReason | None = None
    error: str | None = None
    speculation: SpeculationMetrics | None = None
    weight_version: str = ""  # of the weights that drew `token_ids`; empty: unknown
    is_held: bool = False  # the request stands still after these tokens: another verifier may take it
    beams: tuple[RequestOutput, ...] = ()  # what a beam search has found, the best first, in its only output

    @classmethod
    def failed(cls, request_id: str, error: str) -> RequestOutput:
        """Return the only output of a request that cannot run."""
        return cls(request_id=request_id, token_ids=(), finish_reason=FinishReason.ERROR, error=error)

    @classmethod
    def not_taken(cls, request_id: str, error: str) -> RequestOutput:
        """Return the only output of a request that could not be taken over."""
        return cls(request_id=request_id, token_ids=(), finish_reason=FinishReason.NOT_TAKEN, error=error)

    @property
    def origins(self) -> tuple[TokenOrigin, ...]:
        """Return the origin of each of `token_ids`."""
        accepted = (TokenOrigin.ACCEPTED,) * self.num_accepted_tokens
        if len(accepted) == len(self.token_ids):
            return accepted  # a stop token within the draft ended the request
        if self.num_draft_tokens == 0:  # several tokens without a draft: vLLM does not report which were accepted
            return (TokenOrigin.PLAIN,) * len(self.token_ids)
        return (*accepted, TokenOrigin.BONUS if self.follows_leaf else TokenOrigin.RECOVERED)


@dataclass(slots=True, eq=False)
class Request:
    """The engine's record of a request: `num_computed_tokens` catches up with `num_tokens` plus the draft.

    token_ids   |<- prompt ->|<- output ->|<- draft (in `draft`, not yet in token_ids) ->|
    KV written  |<- num_computed_tokens ->|

    While a pipelined step is in flight, the last token may be a placeholder (`placeholder_token`).
    """

    request_id: str
    sampling: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    plan: SpeculationPlan
    arrival_s: float
    group_id: str | None = None
    cache_salt: str = ""
    partition: str = ""
    history_key: str | None = None
    may_learn: bool = False
    prediction_token_ids: tuple[int, ...] = ()
    priority: int = 0
    inter_token_time: InterTokenTime | None = None  # None: no target
    trace_parent: str | None = None
    is_background: bool = False
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # chained, of the full blocks of token_ids; extended lazily
    root_hash: bytes = b""  # of the weights under which its KV began: parent of the first hash
    draft: Draft | None = None  # checked, for exactly this position; None or empty: plain decoding
    predicted_ids: tuple[int, ...] = ()  # of the last verification; see `Commit`
    forced_ids: tuple[int, ...] = ()  # see `Commit`
    target_rows: list[SparseRow] = field(default_factory=list)  # of the tokens since the last `Commit`; see there
    hold_until_s: float | None = None  # its draft is in flight: no step schedules it before this deadline
    hands_over: bool = False  # after its next tokens it stands still
    stands_until_s: float | None = None  # it stands still for another verifier to take, so long; inf: it is being taken
    arrived: ArrivedKV | None = None  # KV from another verifier, that is not in blocks yet
    num_preemptions: int = 0
    num_seats: int = 1  # among the running; a beam search's first beam has those of all, the others none
    first_scheduled_s: float | None = None  # minus `arrival_s`: time in the queue
    stop_ids: frozenset[int] = frozenset()  # the tokens that end it
    limit: int = 0  # fewer tokens than these, none of them a stop, end nothing; 0: each step's have to be looked at
    metrics: SpeculationMetrics = field(default_factory=SpeculationMetrics)

    @classmethod
    def of(cls, message: GenerationRequest, now_s: float) -> Request:
        """Return the record of a message that has come, whose fields it takes over under their names."""
        target_ms = message.target_inter_token_ms
        return cls(
            **{name: getattr(message, name) for name in _TAKEN_OVER},
            token_ids=[*message.prompt_token_ids, *message.output_token_ids],
            num_prompt_tokens=len(message.prompt_token_ids),
            arrival_s=now_s,
            inter_token_time=None if target_ms is None else InterTokenTime(target_ms),
            metrics=SpeculationMetrics(acceptance=message.sampling.acceptance),
            num_seats=1 if message.sampling.beams is None else message.sampling.beams.width,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether the next step of this request samples: all tokens but the last have KV."""
        return self.num_computed_tokens >= self.num_tokens - 1


_TAKEN_OVER = {each.name for each in fields(Request)} & {each.name for each in fields(GenerationRequest)}
