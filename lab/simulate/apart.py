"""Prefill and decode on verifiers of their own, beside two verifiers that do both, on the same two accelerators.

    together   each verifier computes prompts in chunks between its tokens' steps: a step of at most
               `max_num_batched_tokens` tokens
    apart      one computes every prompt and draws the first token, the other all later tokens; the KV goes from one to
               the other through a link, chunk by chunk, as it is computed

Streams decode all the time, and long prompts come at random. Every verifier is the service's own scheduler, block pool
and price of drafts; the roofline says how long a step takes, a law how many draft tokens are right.

Drafts are waited for; each verifier that decodes has a drafter of its own. Arrived KV is found in the prefix cache, so
its taker computes the prompt's last, open block again: less than a block of tokens. Left out: the gateway, and the room
that KV takes until it is sent.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from outrider.lab.simulate.load import poisson_arrivals
from outrider.lab.simulate.paged_verifier import BLOCK_SIZE, DRAFTER_ID, PlayedEngine, draft_of, outcome_of
from outrider.lab.simulate.simulation import FleetShape
from outrider.lab.simulate.system import LoadLaw, System
from outrider.verifier_service.messages.request import GenerationRequest, Request, SamplingParams, SpeculationPlan
from outrider.verifier_service.scheduling.kv_cache import BlockPool
from outrider.verifier_service.scheduling.outcome import Outcome, num_draft_tokens
from outrider.verifier_service.scheduling.prefix_cache import extend_hashes
from outrider.verifier_service.scheduling.schedule import ScheduledRequest

# Streams that decode all the time, where one ends the next begins; long prompts, by the share of what one verifier
# computes that does nothing else.
CELLS = ((32, 0.2), (32, 0.4), (32, 0.6), (32, 0.8), (192, 0.2), (192, 0.6))
STREAM_PROMPT, STREAM_OUTPUT = 256, 256  # tokens, the output's half as many or half as many more
LONG_PROMPT, LONG_OUTPUT = (2048, 8192), 64
BUDGETS = (512, 2048, 8192)  # `max_num_batched_tokens`
PREFILL_BUDGET = 2048  # where nobody decodes: a part of KV is sent as often
LINKS = (50e9, 25e9, 1.25e9)  # bytes per second: NVLink or several RDMA cards, one of 200 Gb/s, TCP at 10 Gb/s
HANDOVER_S = 1e-3  # calls of a hand-over beside the bytes: a guess
WARM_UP_SHARE = 0.25  # of the time, which does not count


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How two verifiers share the work."""

    max_num_batched_tokens: int
    link_bytes_per_s: float | None = None  # None: both do both

    @property
    def name(self) -> str:
        if self.link_bytes_per_s is None:
            return f"together, steps of {self.max_num_batched_tokens}"
        return f"apart, {self.link_bytes_per_s / 1e9:g} GB/s"


LAYOUTS = (
    *(Layout(max_num_batched_tokens=budget) for budget in BUDGETS),
    *(Layout(max_num_batched_tokens=PREFILL_BUDGET, link_bytes_per_s=link) for link in LINKS),
)


@dataclass(slots=True)
class Client:
    """A request as its client sees it."""

    arrival_s: float
    is_long: bool
    num_prompt_tokens: int
    num_output_tokens: int
    outputs_s: list[float] = field(default_factory=list)  # when each came
    num_tokens: list[int] = field(default_factory=list)  # and what it brought


@dataclass(frozen=True, slots=True, kw_only=True)
class ApartFigures:
    """What clients see, in seconds. An output is what one step brings of a request: one token, or more with drafts."""

    tokens_per_s: float  # of all requests
    long_ttft_p50_s: float
    long_ttft_p99_s: float
    short_ttft_p99_s: float  # of the streams' prompts
    gap_p50_s: float  # between two outputs of a request
    gap_p99_s: float
    second_p99_s: float  # between its first output and its second: a hand-over is in it
    tokens_per_output: float

    @classmethod
    def of(cls, clients: Sequence[Client], end_s: float) -> ApartFigures:
        """Sum up the requests and outputs that came between the end of the warm-up and the end."""
        begin_s = WARM_UP_SHARE * end_s
        shown = [client for client in clients if begin_s <= client.arrival_s < end_s]
        first_s = {
            is_long: [client.outputs_s[0] - client.arrival_s for client in shown if client.is_long is is_long]
            for is_long in (True, False)
        }
        seconds_s = [client.outputs_s[1] - client.outputs_s[0] for client in shown if len(client.outputs_s) > 1]
        pairs = (pair for client in clients for pair in itertools.pairwise(client.outputs_s))
        gaps_s = [later - earlier for earlier, later in pairs if begin_s <= later < end_s]
        outputs = (one for client in clients for one in zip(client.outputs_s, client.num_tokens, strict=True))
        sizes = [num_tokens for at_s, num_tokens in outputs if begin_s <= at_s < end_s]
        return cls(
            tokens_per_s=sum(sizes) / (end_s - begin_s),
            long_ttft_p50_s=float(np.quantile(first_s[True], 0.5)),
            long_ttft_p99_s=float(np.quantile(first_s[True], 0.99)),
            short_ttft_p99_s=float(np.quantile(first_s[False], 0.99)),
            gap_p50_s=float(np.quantile(gaps_s, 0.5)),
            gap_p99_s=float(np.quantile(gaps_s, 0.99)),
            second_p99_s=float(np.quantile(seconds_s, 0.99)),
            tokens_per_output=sum(sizes) / len(sizes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ApartRow:
    """One run."""

    name: str
    num_streams: int
    load: float  # see `CELLS`
    qps: float  # long prompts
    has_drafts: bool
    figures: ApartFigures


class PlayedVerifier(PlayedEngine):
    """One verifier, and the drafter that it has for itself."""

    def __init__(self, fleet: FleetShape, budget: int, acceptance: float, random: np.random.Generator) -> None:
        """`acceptance`: of every draft token; 0: nothing is drafted."""
        assert fleet.drafter is not None
        plan = SpeculationPlan()
        if acceptance:
            plan = SpeculationPlan(drafter_id=DRAFTER_ID, draft_length=fleet.drafter.max_draft_length)
        pool = BlockPool(fleet.verifier.kv_tokens // BLOCK_SIZE, BLOCK_SIZE)
        super().__init__(replace(fleet.verifier, max_num_batched_tokens=budget), plan, pool, 2 * LONG_PROMPT[1])
        self.is_stepping = False
        self._drafter, self._acceptance, self._random = fleet.drafter, acceptance, random

    @property
    def num_tokens_left(self) -> int:
        """Tokens of all requests that have no KV yet."""
        everyone = (*self.scheduler.running, *self.scheduler.waiting)
        return sum(request.num_tokens - request.num_computed_tokens for request in everyone)

    def take(self, number: int, client: Client, max_tokens: int, *, has_kv: bool) -> None:
        """Take a request; `has_kv`: another verifier has drawn the first token and sent the prompt's KV."""
        prompt = (number,) * client.num_prompt_tokens  # no other request has a prefix of it
        message = GenerationRequest(
            request_id=str(number),
            prompt_token_ids=prompt,
            output_token_ids=(0,) if has_kv else (),
            sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
            plan=self._plan,
        )
        num_blocks = len(prompt) // BLOCK_SIZE
        if has_kv and num_blocks <= self.pool.num_free_blocks:  # else it computes the prompt again
            hashes: list[bytes] = []
            extend_hashes(hashes, prompt, BLOCK_SIZE, num_blocks)
            block_ids = self.pool.allocate(num_blocks)
            for block_id, hash_ in zip(block_ids, hashes, strict=True):
                self.pool.publish(block_id, hash_)
            self.pool.release(block_ids)
        self.scheduler.add(Request.of(message, client.arrival_s))

    def step(self, now_s: float) -> tuple[float, Sequence[Outcome]]:
        """Run a step; return its seconds, the wait for drafts included, and its outcomes: none without requests."""
        exposed_s = self._draft()
        schedule = self.scheduler.schedule(now_s)
        if schedule is None:
            return 0.0, ()
        outcomes = [self._verify(item) for item in schedule.items]
        return self._end_step(schedule, outcomes, exposed_s) + exposed_s, outcomes

    def _draft(self) -> float:
        """Give the decoding requests their drafts; return how long they are waited for."""
        if self._plan.is_off:
            return 0.0
        decoding = [request for request in self.scheduler.running if request.is_decoding]
        for request, length in zip(decoding, self._ask(decoding), strict=True):
            request.draft = draft_of(request, length) if length else None
        self._pricing.learn()
        longest = max((len(request.draft.token_ids) for request in decoding if request.draft), default=0)
        context = sum(request.num_tokens for request in decoding)
        return self._drafter.link_s + longest * self._drafter.timing.seconds(len(decoding), context) if longest else 0.0

    def _verify(self, item: ScheduledRequest) -> Outcome:
        num_right = int(self._random.geometric(1.0 - self._acceptance)) - 1 if item.draft else 0
        return outcome_of(item, min(num_right, num_draft_tokens(item)))


class ApartRun:
    """One layout under one load, in virtual time; `run` once."""

    def __init__(self, fleet: FleetShape, layout: Layout, acceptance: float, token_s: float, seed: int) -> None:
        """`acceptance` 0: without drafts; `token_s`: of a token's KV on the link."""
        self.clients: list[Client] = []
        self._is_apart, self._token_s, self._link_free_s = layout.link_bytes_per_s is not None, token_s, 0.0
        self._random = np.random.default_rng((seed, 1))
        self._verifiers = [
            PlayedVerifier(fleet, layout.max_num_batched_tokens, acceptance, np.random.default_rng((seed, place)))
            for place in (2, 3)
        ]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()

    def run(self, prompts: Iterable[Client], num_streams: int, duration_s: float) -> None:
        """Let the long prompts come, and streams for so long; run until all requests have ended."""
        self._end_s = duration_s
        for client in prompts:
            self._at(client.arrival_s, partial(self._arrive, client))
        for place in range(1, num_streams + 1):  # as if they had begun one after another
            output = max(1, place * STREAM_OUTPUT // num_streams)
            self._at(0.0, partial(self._arrive, Client(0.0, False, STREAM_PROMPT, output)))
        while self._events:
            now_s, _, event = heapq.heappop(self._events)
            event(now_s)

    def _at(self, at_s: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), event))

    def _arrive(self, client: Client, now_s: float) -> None:
        """Send a request to the verifier that has least to compute; where they are apart, to the first."""
        number = len(self.clients)
        self.clients.append(client)
        first, second = self._verifiers
        verifier = first if self._is_apart else min(first, second, key=lambda one: one.num_tokens_left)
        verifier.take(number, client, 1 if self._is_apart else client.num_output_tokens, has_kv=False)
        self._wake(verifier, now_s)

    def _take_over(self, number: int, now_s: float) -> None:
        client = self.clients[number]
        self._verifiers[1].take(number, client, client.num_output_tokens, has_kv=True)
        self._wake(self._verifiers[1], now_s)

    def _wake(self, verifier: PlayedVerifier, now_s: float) -> None:
        if not verifier.is_stepping:
            verifier.is_stepping = True
            self._at(now_s, partial(self._step, verifier))

    def _step(self, verifier: PlayedVerifier, now_s: float) -> None:
        seconds, outcomes = verifier.step(now_s)
        verifier.is_stepping = bool(outcomes)
        if outcomes:
            self._at(now_s + seconds, partial(self._end_step, verifier, outcomes))

    def _end_step(self, verifier: PlayedVerifier, outcomes: Sequence[Outcome], now_s: float) -> None:
        """Show clients their tokens, send the prompts' new KV, and begin the next step."""
        for outcome in outcomes:
            number = int(outcome.item.request.request_id)
            client = self.clients[number]
            if is_giver := self._is_apart and verifier is self._verifiers[0]:
                self._link_free_s = max(self._link_free_s, now_s) + outcome.item.num_new_tokens * self._token_s
            if not outcome.committed:
                continue
            client.outputs_s.append(now_s)
            client.num_tokens.append(len(outcome.committed))
            if sum(client.num_tokens) == client.num_output_tokens:
                self._end(client, now_s)
            elif is_giver:
                self._at(self._link_free_s + HANDOVER_S, partial(self._take_over, number))
        self._step(verifier, now_s)

    def _end(self, client: Client, now_s: float) -> None:
        """Let the next stream begin where one has ended."""
        if not client.is_long and now_s < self._end_s:
            spread = STREAM_OUTPUT // 2
            output = int(self._random.integers(STREAM_OUTPUT - spread, STREAM_OUTPUT + spread, endpoint=True))
            self._at(now_s, partial(self._arrive, Client(now_s, False, STREAM_PROMPT, output)))


def study_apart(
    system: System, load: LoadLaw, *, duration_s: float, seed: int, on_run: Callable[[], None] = lambda: None
) -> list[ApartRow]:
    """Run every layout at every load, without drafts and with drafts; all meet the same long prompts."""
    if load.traces:
        raise ValueError("--traces: this study has lengths of its own")
    fleet, rows = system.disaggregated(2, 2), []
    token_s = fleet.verifier.timing.seconds(PREFILL_BUDGET, 0) / PREFILL_BUDGET
    for (num_streams, share), acceptance, layout in itertools.product(CELLS, (0.0, load.acceptance), LAYOUTS):
        random, qps = np.random.default_rng(seed), share / (token_s * sum(LONG_PROMPT) / 2)
        arrivals = poisson_arrivals(qps, max(1, round(qps * duration_s)), random).tolist()
        sizes = random.integers(*LONG_PROMPT, len(arrivals), endpoint=True).tolist()
        link = layout.link_bytes_per_s
        sent_s = 0.0 if link is None else system.target.kv_bytes_per_token / link
        run = ApartRun(fleet, layout, acceptance, sent_s, seed)
        clients = (Client(at_s, True, size, LONG_OUTPUT) for at_s, size in zip(arrivals, sizes, strict=True))
        run.run(clients, num_streams, duration_s)
        rows.append(
            ApartRow(
                name=layout.name,
                num_streams=num_streams,
                load=share,
                qps=qps,
                has_drafts=acceptance > 0.0,
                figures=ApartFigures.of(run.clients, duration_s),
            )
        )
        on_run()
    return rows
