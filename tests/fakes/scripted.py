"""A target and drafters with known laws, joined by the real verifier-drafter link on one event loop.

The target regenerates every three tokens: the first of a triple is drawn without a look back, the second depends on
the first, the third on both (and reads the first of them through its block table, so that wrong KV shows). So the
triples of one output are independent draws of one joint law, and a long request is as good as many short ones, while
drafts reach across triples.
"""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import random
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import numpy as np
import torch

from outrider.drafter_service.service.service import DrafterLinkServicer
from outrider.proto.link_pb2_grpc import add_DrafterLinkServicer_to_server
from outrider.verifier_service.drafting.asking import CoordinatorConfig
from outrider.verifier_service.drafting.coordinator import DraftCoordinator
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.links.link_pool import LinkPool
from outrider.verifier_service.links.relay_client import RelayDraftClient
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.draft import (
    DRAFT_PROB_SCALE,
    Close,
    Commit,
    Commits,
    Draft,
    Open,
    SparseRow,
    VerifierMessage,
)
from outrider.verifier_service.messages.drafter_load import DrafterLoad
from outrider.verifier_service.messages.engine import PeerState, Relay
from outrider.verifier_service.messages.link import (
    CHANNEL_OPTIONS,
    VERIFIER_MESSAGES,
    DrafterEndpoint,
    DrafterIdentity,
    Hello,
    peek_type,
)
from outrider.verifier_service.messages.request import GenerationRequest, RequestOutput
from outrider.verifier_service.messages.wire import decode, encode
from outrider.verifier_service.model.paged_metadata import fill_placeholders
from outrider.verifier_service.scheduling.kv_cache import BlockPool
from outrider.verifier_service.scheduling.scheduler import Scheduler, SchedulerConfig
from support import parts
from support.clock import Clock

PERIOD = 3  # tokens of one independent draw
DRAFTER_ID = "scripted"
STEP_S = 3.0  # virtual time between steps: longer than any deadline and than the circuit breaker stays open
ARRIVAL_TIMEOUT_S = 60.0
MAX_MODEL_LEN = 256


# --- the target ---


def random_laws(vocab_size: int, *, seed: int, spread: float = 1.0) -> np.ndarray:
    """Return the next token's law by place in the triple and by the two tokens before it.

    float64 [PERIOD, vocab_size (second last), vocab_size (last), vocab_size]; a larger `spread` is a sharper law.
    """
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(PERIOD, vocab_size, vocab_size, vocab_size)) * spread
    logits[0] = logits[0, 0, 0]
    logits[1] = logits[1, 0]
    return softmax(logits)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def triple_law(laws: np.ndarray) -> np.ndarray:
    """Return the joint law of one triple: [vocab_size] * 3."""
    return laws[0, 0, 0][:, None, None] * laws[1, 0][:, :, None] * laws[2]


class ScriptedTarget:
    """A `Runner` with known laws whose KV is the token id; prompts must be whole triples."""

    eos_token_ids: tuple[int, ...] = ()
    states: None = None

    def __init__(
        self, laws: np.ndarray, *, num_blocks: int, block_size: int, max_model_len: int = MAX_MODEL_LEN
    ) -> None:
        self.vocab_size: int = laws.shape[-1]
        self.num_blocks, self.block_size, self.max_model_len = num_blocks, block_size, max_model_len
        self._logits = torch.tensor(np.log(laws), dtype=torch.float32)
        self._kv = np.zeros(num_blocks * block_size, dtype=np.int64)

    def execute(self, batch: ScheduledBatch, chosen: torch.Tensor | None = None) -> torch.Tensor:
        """Look the logits up: float32 [num_rows, vocab_size]."""
        if chosen is not None:
            token_ids = torch.tensor(batch.token_ids)
            fill_placeholders(token_ids, chosen)
            batch = dataclasses.replace(batch, token_ids=token_ids.tolist())
        blocks = self._kv.reshape(-1, self.block_size)
        self._kv[batch.move_targets] = self._kv[batch.move_sources]
        blocks[batch.copy_targets] = blocks[batch.copy_sources]
        self._kv[batch.slot_mapping] = batch.token_ids
        rows = np.asarray(batch.logits_indices)
        last = np.asarray(batch.token_ids)[rows]
        second_last = self._kv[self._slots_before(batch)][rows]
        places = (np.asarray(batch.positions)[rows] + 1) % PERIOD
        return self._logits[torch.from_numpy(places), torch.from_numpy(second_last), torch.from_numpy(last)]

    def _slots_before(self, batch: ScheduledBatch) -> list[int]:
        """Find the slot of the token before each token, by way of the block tables."""
        size = self.block_size
        slots: list[int] = []
        trees = batch.tree_parents or [[]] * len(batch.block_tables)
        sequences = zip(batch.block_tables, batch.context_lengths, batch.query_lengths, trees, strict=True)
        for table, context, query, parents in sequences:
            first = context - len(parents)  # of the tree's own places
            before = [*range(context - query - 1, first - 1), *(first + parent for parent in parents)]
            slots += [table[max(p, 0) // size] * size + max(p, 0) % size for p in before]
        return slots


# --- the drafter ---


@dataclass(frozen=True, slots=True)
class _Row:
    """One context's draft law, as it is drawn from and as it is sent."""

    sent: SparseRow
    ids: tuple[int, ...]
    cumulative: tuple[int, ...]

    def draw(self, rng: random.Random) -> int:
        return self.ids[bisect.bisect_right(self.cumulative, rng.randrange(DRAFT_PROB_SCALE))]


def sparse_row(probs: np.ndarray, top_n: int) -> SparseRow:
    """Truncate, renormalise and quantise one law: probs [draft_vocab_size]."""
    ids = np.argsort(-probs, kind="stable")[:top_n]
    weights = np.maximum(np.floor(probs[ids] / probs[ids].sum() * DRAFT_PROB_SCALE).astype(int), 1)
    weights[0] += DRAFT_PROB_SCALE - weights.sum()
    return SparseRow(token_ids=tuple(ids.tolist()), weights=tuple(weights.tolist()))


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a drafter drew: the tokens and the row that each was drawn from."""

    token_ids: list[int]
    rows: list[SparseRow]


def honest(drawn: Drawn) -> Drawn:
    return drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftScript:
    """How a scripted drafter drafts. `report` stands between what was drawn and what is sent: defects go there."""

    laws: np.ndarray  # [PERIOD, vocab_size, vocab_size, draft_vocab_size]
    top_n: int = 1 << 16
    seed: int = 0
    report: Callable[[Drawn], Drawn] = honest


@dataclass(slots=True)
class _Session:
    token_ids: list[int]
    is_seeded: bool


class ScriptedDrafter:
    """An `EnginePort` that answers inside `submit`; seeded requests get guesses as point masses."""

    def __init__(self, script: DraftScript) -> None:
        self._script = script
        self._rng = random.Random(script.seed)
        self._vocab_size = script.laws.shape[1]
        self.draft_vocab_size: int = script.laws.shape[-1]
        self._rows: dict[tuple[int, int, int], _Row] = {}
        self._sessions: dict[str, _Session] = {}
        self._deliver: dict[str, Callable[[bytes], None]] = {}

    def submit(self, peer: str, payload: bytes) -> None:
        for message in parts.singly([decode(payload, VERIFIER_MESSAGES)]):
            self._take(peer, message)

    def _take(self, peer: str, message: VerifierMessage) -> None:
        match message:
            case Open(request_id=request_id, token_ids=token_ids, sampling=sampling):
                self._sessions[request_id] = _Session(list(token_ids), sampling.seed is not None)
            case Commit() as commit:
                session = self._sessions[commit.request_id]
                assert commit.position == len(session.token_ids), "the link lost or doubled a commit"
                session.token_ids.extend(commit.token_ids)
                self._deliver[peer](encode(self._draft(commit, session)))
            case Close(request_id=request_id):
                del self._sessions[request_id]

    def _draft(self, commit: Commit, session: _Session) -> Draft:
        drawn = self._script.report(self._draw(session.token_ids, commit.max_length))
        return Draft(
            request_id=commit.request_id,
            round_id=commit.round_id,
            position=len(session.token_ids),
            token_ids=tuple(drawn.token_ids),
            draft_probs=None if session.is_seeded else tuple(drawn.rows),
        )

    def _draw(self, token_ids: Sequence[int], length: int) -> Drawn:
        second_last, last = token_ids[-2:]
        drawn = Drawn([], [])
        for position in range(len(token_ids), len(token_ids) + length):
            row = self._row(position % PERIOD, second_last, last)
            drawn.token_ids.append(row.draw(self._rng))
            drawn.rows.append(row.sent)
            second_last, last = last, min(drawn.token_ids[-1], self._vocab_size - 1)
        return drawn

    def _row(self, place: int, second_last: int, last: int) -> _Row:
        key = (place, second_last, last)
        if key not in self._rows:
            sent = sparse_row(self._script.laws[key], self._script.top_n)
            self._rows[key] = _Row(sent, sent.token_ids, tuple(np.cumsum(sent.weights).tolist()))
        return self._rows[key]

    def peer_gone(self, peer: str) -> None:
        self._sessions.clear()

    def subscribe(self, peer: str, deliver: Callable[[bytes], None]) -> None:
        self._deliver[peer] = deliver

    def unsubscribe(self, peer: str) -> None:
        self._deliver.pop(peer, None)

    def load(self) -> DrafterLoad:
        return DrafterLoad(num_sessions=len(self._sessions))


# --- the link ---


class ScriptedLink:
    """The verifier's side of a real link: one exchange sends the engine's frames and waits for every answer."""

    def __init__(self, vocab_size: int) -> None:
        hello = Hello(verifier_id="test", epoch=1, vocab_size=vocab_size)
        self._arrived: list[Relay | PeerState] = []
        self._num_wanted = 0
        self._is_complete = asyncio.Event()
        self._pool = LinkPool(hello, self._on_arrival)

    def _on_arrival(self, message: Relay | PeerState) -> None:
        self._arrived.append(message)
        if len(self._arrived) >= self._num_wanted:
            self._is_complete.set()

    async def connect(self, port: int) -> list[Relay | PeerState]:
        endpoint = DrafterEndpoint(drafter_id=DRAFTER_ID, endpoint=f"127.0.0.1:{port}", epoch=1)
        await self._pool.hold([endpoint])
        return await self._wait_for(1)

    async def exchange(self, relays: Sequence[Relay]) -> list[Relay | PeerState]:
        """Send the frames; return one answer per commit, in the order in which the commits were sent."""
        self._pool.send(relays)
        return await self._wait_for(sum(map(_num_asks, relays)))

    async def _wait_for(self, num_messages: int) -> list[Relay | PeerState]:
        self._num_wanted = num_messages
        while len(self._arrived) < num_messages:
            self._is_complete.clear()
            await asyncio.wait_for(self._is_complete.wait(), ARRIVAL_TIMEOUT_S)
        arrived, self._arrived = self._arrived, []
        assert len(arrived) == num_messages, "more answers than questions"
        return arrived

    async def close(self) -> None:
        await self._pool.close()


@asynccontextmanager
async def serving(drafter: ScriptedDrafter, max_model_len: int) -> AsyncIterator[int]:
    """Serve a scripted drafter on a port of its own, which is yielded."""
    identity = DrafterIdentity(
        drafter_id=DRAFTER_ID,
        vocab_size=drafter.draft_vocab_size,
        vocab_fingerprint="",
        max_draft_length=16,
        max_model_len=max_model_len,
    )
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    add_DrafterLinkServicer_to_server(DrafterLinkServicer(drafter, identity), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(grace=1.0)  # at once: the link has closed its stream


# --- the run ---


def never_late(prefix: Sequence[int]) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One engine, one drafter, and what goes wrong between them."""

    laws: np.ndarray  # of the target
    script: DraftScript
    is_late: Callable[[Sequence[int]], bool] = never_late  # of a draft, by the committed tokens that it follows
    num_blocks: int = 8192  # enough for all at once
    block_size: int = 4
    max_num_seqs: int = 512
    sampling_seed: int = 0


@dataclass(slots=True)
class Result:
    """Every request's output, and what happened on the way."""

    outputs: dict[str, list[int]] = field(default_factory=dict)
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_late: int = 0
    num_stale: int = 0
    num_preempted_waits: int = 0  # steps that preempted requests spent waiting, summed
    fallbacks: dict[str, int] = field(default_factory=dict)


def make_engine(scenario: Scenario, drafts: RelayDraftClient, clock: Clock) -> VerifierEngine:
    target = ScriptedTarget(scenario.laws, num_blocks=scenario.num_blocks, block_size=scenario.block_size)
    limits = {"max_model_len": target.max_model_len, "vocab_size": target.vocab_size}
    config = SchedulerConfig(max_num_batched_tokens=1 << 16, max_num_seqs=scenario.max_num_seqs, **limits)
    return VerifierEngine(
        target,
        Scheduler(config, BlockPool(scenario.num_blocks, scenario.block_size)),
        DraftCoordinator(drafts, CoordinatorConfig(**limits)),
        clock=clock,
        generator=torch.Generator().manual_seed(scenario.sampling_seed),
    )


class Driver:
    """Step the engine in lock step with the link, so that a run with real sockets is still deterministic."""

    def __init__(self, scenario: Scenario, link: ScriptedLink, drafts: RelayDraftClient) -> None:
        self._is_late = scenario.is_late
        self._max_num_seqs = scenario.max_num_seqs
        self._link = link
        self._clock = Clock()
        self._drafts = drafts
        self._late: list[Relay | PeerState] = []
        self.engine = make_engine(scenario, self._drafts, self._clock)
        self.result = Result()

    async def run(self, requests: Iterator[GenerationRequest]) -> Result:
        """Run all requests, as many at once as the engine takes."""
        self._refill(requests)
        while self.engine.has_work():
            self._clock.now_s += STEP_S
            self._collect(self.engine.step() or [])
            self.engine.check_integrity()
            self.result.num_preempted_waits += sum(r.num_preemptions > 0 for r in self.engine.scheduler.waiting)
            self._refill(requests)
            answers = await self._link.exchange(self._drafts.take_outbox())
            late, self._late = self._late, []
            for answer in [*self._on_time(answers), *late]:
                self._drafts.feed(answer)
        drafting = self.engine.drafting
        self.result.num_stale, self.result.fallbacks = drafting.num_stale_drafts, dict(drafting.fallbacks)
        return self.result

    def _on_time(self, answers: Iterable[Relay | PeerState]) -> list[Relay | PeerState]:
        """Keep back what is late: it is delivered one exchange on, after its deadline."""
        on_time: list[Relay | PeerState] = []
        for answer in answers:
            is_late = isinstance(answer, Relay) and self._is_late(self._prefix_of(answer))
            (self._late if is_late else on_time).append(answer)
        self.result.num_late += len(self._late)
        return on_time

    def _prefix_of(self, answer: Relay) -> Sequence[int]:
        request_id = decode(answer.payload, (Draft,)).request_id
        return self.engine.requests[request_id].token_ids

    def _refill(self, requests: Iterator[GenerationRequest]) -> None:
        while len(self.engine.requests) < self._max_num_seqs and (request := next(requests, None)) is not None:
            assert self.engine.add(request) is None

    def _collect(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            self.result.outputs.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.result.num_drafts += output.speculation.num_drafts
                self.result.num_draft_tokens += output.speculation.num_draft_tokens
                self.result.num_accepted_tokens += output.speculation.num_accepted_tokens


async def run_scenario(scenario: Scenario, requests: Iterable[GenerationRequest]) -> Result:
    """Generate all requests with the scripted target and, over a real link, the scripted drafter."""
    drafts, link = RelayDraftClient(), ScriptedLink(scenario.laws.shape[-1])
    async with serving(ScriptedDrafter(scenario.script), MAX_MODEL_LEN) as port:
        for state in await link.connect(port):
            drafts.feed(state)
        result = await Driver(scenario, link, drafts).run(iter(requests))
        await link.close()
    return result


def _num_asks(relay: Relay) -> int:
    """Return how many commits a frame has: the rows of columns are answered one by one."""
    kind = peek_type(relay.payload)
    return len(decode(relay.payload, (Commits,))) if kind == "Commits" else int(kind == "Commit")
