"""The messages between an engine process and its asyncio shell, over their pipe."""

from __future__ import annotations

import enum
from dataclasses import MISSING, dataclass, field

import msgspec

from outrider.verifier_service.messages.counts import EngineCounters
from outrider.verifier_service.messages.draft import DraftNeeds
from outrider.verifier_service.messages.handover import (
    HANDOVER_MESSAGES,
    EndTake,
    GivenFrame,
    HandOver,
    PartsRead,
    PullKV,
    TakeKV,
    TakenFrame,
)
from outrider.verifier_service.messages.metric import shown
from outrider.verifier_service.messages.request import GenerationRequest, Request, RequestOutput, SpeculationPlan
from outrider.verifier_service.messages.tensor_route import TensorRoute
from outrider.verifier_service.messages.wire import WireError, decode, head_of, packed, unpacked

NEVER = 1.0  # the price of a draft token at which none pays: no survival exceeds it


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPlans:
    """The router's decisions for running requests."""

    plans: dict[str, SpeculationPlan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """A message of the verifier-drafter link, still encoded; `peer` is the other end of the link."""

    peer: str
    payload: bytes
    received_s: float | None = None  # when a draft arrived, by this machine's monotonic clock


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerState:
    """The other end of a link came up or went away."""

    peer: str
    is_up: bool
    vocab_size: int | None = None
    needs: DraftNeeds = DraftNeeds()
    tensors: TensorRoute | None = None  # the link's tensor channel; None: states go as bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerWeights:
    """A drafter has weights of its own, and this is what they are called since their last update; "": as at start."""

    peer: str
    weight_version: str


LinkEvent = PeerState | PeerWeights | Relay  # what links tell the engine


class PauseMode(enum.StrEnum):
    """What becomes of running requests when generation pauses."""

    ABORT = "abort"  # they end with finish reason `abort`, waiting ones too
    WAIT = "wait"  # they finish; the pause begins then. New requests queue
    KEEP = "keep"  # they stop between two steps and go on afterwards, with the KV that they have
    RETRACT = "retract"  # the same, without their KV: prompt and output are computed again, by the weights then


# What a door calls: it gives every call an id of its own and waits for the `ControlResult` with that id in an
# `EngineUpdate`. All calls may be repeated. One update:
#
#   PauseGeneration(mode)               or none: an update then takes place between two steps
#   UpdateWeights(folder=...)           or, with a group, one `UpdateWeights(names=...)` per bucket
#   ContinueGeneration()
#
# A group: `InitWeightsGroup` is answered when the trainer, its rank 0, has joined as well. A door sends an
# `UpdateWeights(names=...)` before the trainer broadcasts these tensors, and its answer comes after the broadcasts.
# Buckets are staged in host memory: the engine serves the old weights until the last missing tensor is here
# (`num_missing_tensors` of the answer is 0). `InitWeightsGroup` and `DestroyWeightsGroup` drop what is staged.
# While tensors are missing, `ContinueGeneration` is refused. Joining, receiving and checking go on beside steps; one
# change at a time, and a second one is refused.


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseGeneration:
    """Run no step until `ContinueGeneration`; answered once that is so.

    `lease_s`: the engine goes on by itself after so many seconds without a newer pause. `asked_s`: the fleet's number
    of this order, in Unix seconds; an order that is not newer than the last one changes nothing. 0: without a fleet.
    """

    call_id: str
    mode: PauseMode = PauseMode.ABORT
    lease_s: float | None = None
    asked_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinueGeneration:
    """Go on. `asked_s`: as in `PauseGeneration`."""

    call_id: str
    asked_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AskState:
    """Change nothing; the answer says whether the engine is paused, and its weights' version."""

    call_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushCache:
    """Empty the prefix cache; refused while requests hold KV. An update needs none: see `weight_version`."""

    call_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InitWeightsGroup:
    """Join a torch.distributed group whose rank 0 is the trainer, as rank `rank_offset` + tensor-parallel rank."""

    call_id: str
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str = "nccl"  # or gloo
    timeout_s: float = 45.0  # of the rendezvous, and of each broadcast; less than a rank waits for another


@dataclass(frozen=True, slots=True, kw_only=True)
class DestroyWeightsGroup:
    call_id: str
    group_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWeights:
    """Take new weights: from a folder, or `names` in order from a group's rank 0.

    `weight_version`: what the weights are called once all are here; None: the next number.
    """

    call_id: str
    folder: str | None = None
    names: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()  # of each tensor: bfloat16, float32, ...
    shapes: tuple[tuple[int, ...], ...] = ()
    group_name: str = ""
    is_flattened: bool = False  # one broadcast of all tensors' bytes: SGLang's `flattened_bucket`
    weight_version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateDraftWeights:
    """Give a drafter new weights of its own: those of a head or draft model, in the format that it started from.

    To a drafter in a pool, or to a verifier for the drafter in its process. Embeddings that a head borrows from the
    target are read where they were at the start, unless `folder` has its own.
    `weight_version`: what the drafter's weights are called; the target's version that they belong to, if it has a name.
    None: the next number after "draft-".
    """

    call_id: str
    folder: str
    weight_version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishWeights:
    """Rank 0 to its followers: finish the change that has begun."""

    is_abandoned: bool = False  # receive no more


WeightChange = InitWeightsGroup | DestroyWeightsGroup | UpdateWeights
WEIGHT_CHANGES = (InitWeightsGroup, DestroyWeightsGroup, UpdateWeights)  # what every rank does
Control = PauseGeneration | ContinueGeneration | AskState | FlushCache | WeightChange | UpdateDraftWeights
CONTROLS = (PauseGeneration, ContinueGeneration, AskState, FlushCache, *WEIGHT_CHANGES, UpdateDraftWeights)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlResult:
    """The answer to one call; after an error nothing has changed, unless the load report has a `weights_error`."""

    call_id: str
    error: str | None = None
    weight_version: str = ""  # after the call, of the target; of the drafter, if its weights were to change
    weight_digest: str = ""  # of the target's tensors; "": those that it started with
    num_missing_tensors: int = 0  # of an update that is half here
    num_requests: int = 0  # aborted by the call, or kept
    is_paused: bool = False  # after the call


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The time of a step over `num_tokens`."""

    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """First message of an engine: the model is loaded, the engine serves."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_kv_blocks: int
    step_times: tuple[StepTime, ...]
    vocab_fingerprint: str = ""  # empty: unknown
    dtype: str = ""  # of the weights, as torch names it: bfloat16; empty: unknown
    batch_dependent: tuple[str, ...] | None = None  # see `model.batch_invariance`; None: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLoad:
    """One request: its plan, its priority and its speed."""

    request_id: str
    is_running: bool  # False: it waits
    drafter_id: str | None
    draft_length: int
    num_speculative_tokens: int | None  # the request's own cap; 0: it opted out
    priority: int = 0
    target_inter_token_ms: float | None = None
    inter_token_ms: float | None = None  # over its last tokens; None: no target, or no second token yet

    @classmethod
    def of(cls, request: Request, *, is_running: bool) -> RequestLoad:
        inter_token_time = request.inter_token_time
        return cls(
            request_id=request.request_id,
            is_running=is_running,
            drafter_id=request.plan.drafter_id,
            draft_length=request.plan.draft_length,
            num_speculative_tokens=request.sampling.num_speculative_tokens,
            priority=request.priority,
            target_inter_token_ms=None if inter_token_time is None else inter_token_time.target_ms,
            inter_token_ms=None if inter_token_time is None else inter_token_time.recent_ms,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterPerformance:
    """One drafter's round trip, late share and yield, as a verifier measures them."""

    drafter_id: str
    round_trip_s: float  # from ask to draft, smoothed
    late_share: float = 0.0  # share of its drafts that missed their deadline
    accepted_per_round: float | None = None  # accepted tokens; None: too few recent rounds
    num_updates_behind: int | None = None  # of the target, since its own last one; None: no weights of its own


class BreakerState(enum.Enum):
    """State of a circuit breaker."""

    CLOSED = "closed"  # healthy: calls pass
    OPEN = "open"  # failing: no call passes
    HALF_OPEN = "half_open"  # one probe may pass; its outcome decides


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterCircuit:
    """The state of a drafter's circuit breaker: closed, half_open or open."""

    drafter_id: str
    state: str

    @property
    def is_open(self) -> bool:
        """Whether the drafter is failing and gets no asks."""
        return self.state == BreakerState.OPEN.value


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The engine's load report to its replica, sent a few times a second."""

    num_running: int = shown(
        "num_requests_running", "Requests that hold KV in a verifier", is_gauge=True, has_alias=True, default=MISSING
    )
    num_waiting: int = shown(
        "num_requests_waiting", "Requests in a verifier's queue", is_gauge=True, has_alias=True, default=MISSING
    )
    num_decoding: int
    kv_usage: float = shown(
        "kv_cache_usage_perc", "KV blocks in use / KV blocks, 0 to 1", is_gauge=True, has_alias=True, default=MISSING
    )
    tokens_per_s: float = 0.0  # committed, over the last two seconds
    mean_step_s: float | None = None  # over the last two seconds; None: no step ran
    price: float | None = None  # cost of one more verified position in committed tokens; None: not priced
    knee: float | None = shown(
        "verify_knee_tokens",
        "Tokens of a step from which a verifier is compute-bound; no sample where it never is, or does not know",
        is_gauge=True,
        default=None,
    )
    draft_length_mean: float = shown(
        "draft_length_mean",
        "Draft tokens asked for per decoding request and step, of the last two seconds: what the price makes of plans",
        is_gauge=True,
        default=0.0,
    )
    verify_idle_share: float = shown(
        "verify_idle_share",
        "Share of the last two seconds without a step because every request waited for its draft",
        is_gauge=True,
        default=0.0,
    )
    counters: EngineCounters = field(default_factory=EngineCounters)
    requests: tuple[RequestLoad, ...] = ()
    drafters: tuple[DrafterPerformance, ...] = ()  # that have answered
    circuits: tuple[DrafterCircuit, ...] = ()  # of every drafter that is up
    weight_version: str = ""  # empty: unknown
    weights_taken_s: float = 0.0  # when they came, in Unix seconds; 0: the engine started with them
    weights_digest: str = ""  # of all their tensors; "": the engine started with them
    weights_folder: str | None = None  # where they came from; None: a trainer's group, or the engine started with them
    weights_error: str | None = None  # an update broke off while weights were copied: no request is served
    is_paused: bool = False
    pause_asked_s: float = 0.0  # number of the last order to pause or to go on; 0: there was none
    pause_left_s: float | None = None  # of the pause's lease; None: it has none, or there is no pause


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """An output on its way to its gateway, which alone opens it."""

    request_id: str
    is_last: bool
    packed: msgspec.Raw

    @classmethod
    def of(cls, output: RequestOutput) -> Published:
        is_last = output.finish_reason is not None
        return cls(request_id=output.request_id, is_last=is_last, packed=packed(output))

    def opened(self) -> RequestOutput:
        """Return the output; raises `WireError`."""
        output: RequestOutput = unpacked(self.packed, RequestOutput)
        return output


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUpdate:
    """Everything that one step produced."""

    outputs: tuple[Published, ...] = ()
    relays: tuple[Relay, ...] = ()
    load: EngineLoad | None = None
    results: tuple[ControlResult, ...] = ()
    given: tuple[GivenFrame, ...] = ()
    pulls: tuple[PullKV, ...] = ()


HandoverEvent = TakeKV | EndTake | PartsRead | TakenFrame
ToEngine = GenerationRequest | Cancel | SetPlans | LinkEvent | Control | HandOver | HandoverEvent
TO_ENGINE = (GenerationRequest, Cancel, SetPlans, PeerState, PeerWeights, Relay, *CONTROLS, *HANDOVER_MESSAGES)
FROM_ENGINE = (EngineReady, EngineUpdate)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRequest:
    """A request that does not decode: the error, which names the field, is its answer."""

    request_id: str
    error: str


def read_frame(frame: bytes) -> ToEngine | BadRequest:
    """Decode a frame to an engine.

    A gateway's request passes the shell unopened, so its fields are checked here. Whatever else does not decode was
    said by the shell itself: raises `WireError`.
    """
    try:
        message: ToEngine = decode(frame, TO_ENGINE)
    except WireError as error:
        return BadRequest(request_id=head_of(frame, GenerationRequest).request_id, error=str(error))
    return message
