"""What an engine process and the asyncio shell in front of it say to each other over their pipe."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.verifier_service.request import GenerationRequest, RequestOutput, SpeculationPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPlans:
    """The router's decisions for running requests."""

    plans: dict[str, SpeculationPlan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """A message of the verifier-drafter link, passed on unopened: `peer` is the other end of the link."""

    peer: str
    payload: bytes
    received_s: float | None = None  # when a draft arrived, by this machine's monotonic clock


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerState:
    """The other end of a link came up or went away."""

    peer: str
    is_up: bool
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """How long a step over `num_tokens` takes."""

    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """First message of an engine: it is loaded and will serve."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_kv_blocks: int
    step_times: tuple[StepTime, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLoad:
    """One request: its plan, and its counters since it started on this verifier."""

    request_id: str
    drafter_id: str | None
    draft_length: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_speculative_tokens: int | None  # the request's own cap; 0: it opted out


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterTime:
    """The smoothed time from asking a drafter to its draft."""

    drafter_id: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The verifier's state, sent a few times a second."""

    num_running: int
    num_waiting: int
    num_decoding: int
    kv_usage: float
    num_steps: int
    num_scheduled_tokens: int
    num_committed_tokens: int
    busy_s: float
    num_stale_drafts: int
    fallbacks: dict[str, int]
    requests: tuple[RequestLoad, ...]
    drafter_times: tuple[DrafterTime, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUpdate:
    """Everything one step produced, in one frame."""

    outputs: tuple[RequestOutput, ...] = ()
    relays: tuple[Relay, ...] = ()
    load: EngineLoad | None = None


ToEngine = GenerationRequest | Cancel | SetPlans | Relay | PeerState
TO_ENGINE = (GenerationRequest, Cancel, SetPlans, Relay, PeerState)
FROM_ENGINE = (EngineReady, EngineUpdate)
