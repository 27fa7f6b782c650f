"""Draft for an engine that verifies by itself: told what each of its steps did, say what the next one should verify.

The core of every plug-in, free of the engine's own types. An engine like vLLM asks once per step, for all its requests
together, and runs nothing meanwhile. So a step waits here until the drafts that were asked for are there or their
deadline, known from earlier rounds, has passed; a drafter that still reads a prompt is not waited for at all. What is
asked for is what pays: the wait is the first thing that the price counts.

Drafts are point masses here: a drafter is asked for its likeliest tokens, whatever the request's temperature, and the
engine's own rejection sampling keeps the distribution.
"""

from __future__ import annotations

import collections
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from outrider.cluster.hosted.seen_steps import SeenSteps
from outrider.cluster.router.fleet import Directive
from outrider.verifier_service.drafting.coordinator import CoordinatorConfig, DraftCoordinator
from outrider.verifier_service.drafting.state_source import StateSource
from outrider.verifier_service.engine.counters import circuits_of, counters_of
from outrider.verifier_service.engine.step_stats import RecentRates, StepStats
from outrider.verifier_service.links.relay_client import RelayDraftClient
from outrider.verifier_service.messages.draft import Draft
from outrider.verifier_service.messages.engine import (
    EngineLoad,
    PeerState,
    Relay,
    RequestLoad,
    StepTime,
)
from outrider.verifier_service.messages.request import DisabledReason, Request, SamplingParams, SpeculationPlan
from outrider.verifier_service.pricing.cost_model import StepShape
from outrider.verifier_service.pricing.draft_pricing import DraftPricing
from outrider.verifier_service.pricing.offer import PricedStep
from outrider.verifier_service.scheduling.outcome import Outcome, count_draft
from outrider.verifier_service.scheduling.schedule import first_nodes

IDLE_S = 30.0  # without a step: what still runs then opens its session anew
MIN_WAIT_S = 0.02  # a stall of the machine must not cost every draft


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedConfig:
    """What the engine is, and how patient its steps are."""

    vocab_size: int
    max_model_len: int
    num_speculative_tokens: int  # the longest draft that the engine has room for
    is_pinned: bool = False  # the longest draft is always asked for
    max_wait_s: float = 0.1  # the longest that a step waits for drafts, whatever earlier rounds took
    opening_s: float = 10.0  # how long a drafter may read a prompt, which nothing waits for

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_model_len", "num_speculative_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in ("max_wait_s", "opening_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRow:
    """One request's share of a step that the engine has just done."""

    request_id: str
    num_tokens: int  # of the request now: its prompt and all that was committed
    num_scheduled_tokens: int  # computed in the step, its draft included
    num_draft_tokens: int  # verified in the step
    num_new_tokens: int  # committed by the step; 0: it still reads its prompt

    @property
    def num_accepted_tokens(self) -> int:
        return min(max(0, self.num_new_tokens - 1), self.num_draft_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRequest:
    """What of a request matters to its drafts."""

    num_prompt_tokens: int
    max_tokens: int
    num_speculative_tokens: int | None = None  # a cap on its drafts; 0: it wants none
    stop_token_ids: frozenset[int] = frozenset()  # that end it


class Host(Protocol):
    """How to look up what a step's rows leave out; of the row with the same index."""

    began_s: float  # when the step began, by the monotonic clock

    def describe(self, row: int) -> HostRequest:
        """Describe the row's request; asked once."""

    def token_ids(self, row: int, start: int, stop: int) -> Sequence[int]:
        """Return the request's tokens from `start` to `stop`."""

    def block_table(self, row: int) -> Sequence[int]:
        """Return the request's KV blocks; asked only where drafters read states."""


class Drafters(Protocol):
    """The way to the pool. Neither call blocks for longer than it is told to."""

    def send(self, relays: Sequence[Relay]) -> None:
        """Hand frames over, in order."""

    def wait(self, timeout_s: float) -> list[PeerState | Relay]:
        """Return what has arrived, oldest first; where nothing has, wait for the first of it."""


class HostedDrafting:
    """Drafting for one engine: `propose` is called by its step loop, the rest from any thread, and never blocks it."""

    def __init__(
        self,
        drafters: Drafters,
        config: HostedConfig,
        *,
        states: StateSource | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`states`: where the engine keeps the target's, if drafters may read any."""
        self.pricing = DraftPricing()
        self.stats = StepStats()
        self.num_undrafted: collections.Counter[str] = collections.Counter()  # requests in steps, by why not
        self._lock = threading.Lock()  # held while anything below changes
        self._directives: queue.SimpleQueue[Directive] = queue.SimpleQueue()  # to be followed
        self._drafters = drafters
        self._states = states
        self._config = config
        self._clock = clock
        self._relays = RelayDraftClient(clock=clock)
        limits = CoordinatorConfig(
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len,
            first_deadline_s=config.max_wait_s,
            max_deadline_s=config.max_wait_s,
            min_deadline_s=min(MIN_WAIT_S, config.max_wait_s),
            background_opening_s=config.opening_s,
        )
        self.coordinator = DraftCoordinator(self._relays, limits, states, self.pricing)
        self._seen = SeenSteps()
        self._rates = RecentRates()
        self._requests: dict[str, Request] = {}
        self._stop_token_ids: dict[str, frozenset[int]] = {}
        self._drafts: dict[str, Draft] = {}  # handed out, to be verified
        self._default_plan = self._heeded(SpeculationPlan(draft_length=config.num_speculative_tokens))
        self._last_ids: set[str] = set()  # requests of the last step
        self._ended_s = 0.0  # when the last call that drafted returned
        self._waited_s = 0.0  # in it, for drafts
        self._has_verified = False  # drafts, in the last step

    @property
    def step_times(self) -> tuple[StepTime, ...]:
        """The step times that steps are priced by; empty: too few were seen yet."""
        return self._seen.profile

    def propose(self, rows: Sequence[HostRow], finished_ids: Iterable[str], host: Host) -> list[list[int]]:
        """Take in a step and return what to verify in the next one, for every row; an empty list: nothing."""
        with self._lock:
            return self._propose(rows, finished_ids, host)

    def follow(self, directive: Directive) -> None:
        """Follow the router from the next step on."""
        self._directives.put(directive)

    def load(self, known_ids: Callable[[], Iterable[str]]) -> EngineLoad | None:
        """Describe the engine's state, as far as it is seen here; None: it is drafting just now.

        Requests that are not among `known_ids`, the engine's own, are forgotten: it says so only with its next step.
        So are all of an engine that stands still. The engine is asked while no step can come in between, or a request
        that has just come would be forgotten.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            self._follow()
            is_idle = self._clock() - self._ended_s >= IDLE_S
            self._close(self._requests.keys() - (set() if is_idle else set(known_ids())))
            return self._load()
        finally:
            self._lock.release()

    def _propose(self, rows: Sequence[HostRow], finished_ids: Iterable[str], host: Host) -> list[list[int]]:
        self._follow()
        self._close(finished_ids)
        self._receive()
        requests = [self._mirrored(index, row, host) for index, row in enumerate(rows)]
        self._end_step(rows, requests, host.began_s)
        asking = []
        for index, (row, request) in enumerate(zip(rows, requests, strict=True)):
            request.token_ids.extend(host.token_ids(index, request.num_tokens, row.num_tokens))
            request.num_computed_tokens = row.num_tokens - (row.num_new_tokens > 0)
            if self._states is not None:
                request.block_table = list(host.block_table(index))
            request.draft = None
            if row.num_new_tokens > 0 and not self._has_ended(request, row.num_new_tokens):
                asking.append(request)
        if self._seen.wants_plain and self._has_verified:  # every other step, until it is known what drafts cost
            self.num_undrafted[DisabledReason.WARMUP] += len(asking)
            asking = []
        asked_s = self._clock()
        self.coordinator.ask(asking, asked_s)
        self._send()
        self.num_undrafted.update(one.metrics.disabled_reason for one in asking if one.metrics.disabled_reason)
        self.pricing.learn()  # drafters work meanwhile
        self._wait()
        self._waited_s = self._clock() - asked_s
        self._last_ids = {row.request_id for row in rows}
        drafts = [self._handed_out(request) for request in requests]
        self._ended_s = self._clock()
        return drafts

    # --- the parts of a call ---

    def _close(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have left the engine; unknown ones are fine."""
        for request_id in request_ids:
            if (request := self._requests.pop(request_id, None)) is None:
                continue
            self._stop_token_ids.pop(request_id)
            self._drafts.pop(request_id, None)
            self.coordinator.close(request)
            self.pricing.forget(request_id)
        self._send()

    def _follow(self) -> None:
        while not self._directives.empty():
            directive = self._directives.get_nowait()
            self._default_plan = self._heeded(directive.default_plan)
            for request_id in directive.plans.keys() & self._requests.keys():
                self._requests[request_id].plan = self._heeded(directive.plans[request_id])

    def _heeded(self, plan: SpeculationPlan) -> SpeculationPlan:
        """Return what is made of the router's plan: it waits for step times, which only drafting gives it here."""
        if not self._config.is_pinned and plan.disabled_reason is not DisabledReason.WARMUP:
            return plan
        length = self._config.num_speculative_tokens
        return replace(plan, draft_length=length, is_pinned=self._config.is_pinned, disabled_reason=None)

    def _mirrored(self, index: int, row: HostRow, host: Host) -> Request:
        """Return what is remembered of a row's request, as it was before the step."""
        request = self._requests.get(row.request_id)
        if request is not None and request.num_tokens <= row.num_tokens:
            return request
        self._close([row.request_id])  # an id that is used again
        description = host.describe(index)
        before = row.num_tokens - row.num_new_tokens
        caps = (description.num_speculative_tokens, self._config.num_speculative_tokens)
        request = self._requests[row.request_id] = Request(
            request_id=row.request_id,
            sampling=SamplingParams(
                temperature=0.0,
                max_tokens=max(1, description.max_tokens),
                # no plan's draft may be longer than the engine has room for: the router does not know that
                num_speculative_tokens=min(cap for cap in caps if cap is not None),
            ),
            token_ids=list(host.token_ids(index, 0, before)),
            num_prompt_tokens=description.num_prompt_tokens,
            plan=self._default_plan,
            arrival_s=self._clock(),
        )
        self._stop_token_ids[row.request_id] = description.stop_token_ids
        return request

    def _end_step(self, rows: Sequence[HostRow], requests: Sequence[Request], began_s: float) -> None:
        """Let pricing and drafters' records take in what became of the drafts, and how long the step took."""
        shape = StepShape(sum(row.num_scheduled_tokens for row in rows), sum(row.num_tokens for row in rows))
        outcomes = [self._outcome(*pair) for pair in zip(rows, requests, strict=True)]
        # what the engine does between steps counts; an engine that had nothing to do was idle for a while, not slow
        pairs = [pair for pair in zip(rows, requests, strict=True) if pair[0].request_id in self._last_ids]
        # nor is there a step between two calls, unless the engine passed one over
        is_continuous = any(row.num_tokens - row.num_new_tokens == request.num_tokens for row, request in pairs)
        step_s = self._clock() - (self._ended_s if is_continuous else began_s)
        exposed_s = self._waited_s if is_continuous else 0.0
        has_prompts = any(row.num_scheduled_tokens > 1 + row.num_draft_tokens for row in rows)
        if self._seen.observe(shape.num_tokens, step_s, has_prompts=has_prompts):
            self.pricing.use_profile(self._seen.profile)
        self._has_verified = any(outcome.item.draft is not None for outcome in outcomes)
        self.stats.step_s.observe(step_s)
        accepted = [(outcome.item.request, len(outcome.path)) for outcome in outcomes if outcome.path]
        self.coordinator.observe_accepted(accepted)
        self.pricing.end_step(PricedStep(outcomes, (), shape, step_s=step_s, exposed_s=exposed_s))
        self.stats.num_steps += 1
        self.stats.num_scheduled_tokens += shape.num_tokens
        for outcome in outcomes:
            if outcome.item.samples:
                count_draft(outcome.item, num_accepted=len(outcome.path))
            num_draft_tokens = 0 if outcome.item.draft is None else len(outcome.item.draft.token_ids)
            self.stats.num_committed_tokens += len(outcome.committed)
            self.stats.num_drafts += num_draft_tokens > 0
            self.stats.num_draft_tokens += num_draft_tokens
            self.stats.num_accepted_tokens += len(outcome.path)

    def _outcome(self, row: HostRow, request: Request) -> Outcome:
        """Say what became of a row's draft; the engine may have verified less of it than it was given."""
        draft = self._drafts.pop(row.request_id, None)
        if draft is not None and draft.position != row.num_tokens - row.num_new_tokens:
            draft = None  # it was verified in a step that asked for no drafts
        if draft is not None:
            draft = first_nodes(draft, max_nodes=row.num_draft_tokens, max_depth=row.num_draft_tokens)
        if draft is not None and not draft.token_ids:
            draft = None
        num_accepted = 0 if draft is None else min(row.num_accepted_tokens, len(draft.token_ids))
        return Outcome.counted(
            request,
            draft,
            num_new_tokens=row.num_scheduled_tokens,
            num_committed=row.num_new_tokens,
            num_accepted=num_accepted,
        )

    def _has_ended(self, request: Request, num_new_tokens: int) -> bool:
        """Return whether the engine is about to end a request at one of its new tokens, which it tells only later."""
        return not self._stop_token_ids[request.request_id].isdisjoint(request.token_ids[-num_new_tokens:])

    def _handed_out(self, request: Request) -> list[int]:
        draft, request.draft = request.draft, None
        if draft is None:
            return []
        # a drafter's vocabulary may be padded beyond the engine's, which has no embedding for such a token; point
        # masses may be cut by what they are
        num_known = sum(
            1 for _ in itertools.takewhile(lambda token_id: token_id < self._config.vocab_size, draft.token_ids)
        )
        draft = first_nodes(draft, max_nodes=num_known, max_depth=num_known)
        if not draft.token_ids:
            return []
        draft = self.pricing.admit(request, draft)
        if not draft.token_ids:
            return []
        self._drafts[request.request_id] = draft
        return list(draft.token_ids)

    def _send(self) -> None:
        if relays := self._relays.take_outbox():
            self._drafters.send(relays)

    def _receive(self, timeout_s: float = 0.0) -> None:
        for message in self._drafters.wait(timeout_s):
            self._relays.feed(message)
        self.coordinator.receive(self._requests, self._clock())
        self._send()  # a drafter may want a prefix again

    def _wait(self) -> None:
        """Wait until every draft that was asked for is there or its deadline has passed."""
        while deadlines := [one.hold_until_s for one in self._requests.values() if one.hold_until_s is not None]:
            self._receive(max(0.0, min(deadlines) - self._clock()))

    def _load(self) -> EngineLoad:
        now_s, coordinator, stats = self._clock(), self.coordinator, self.stats
        self._rates.sample(stats, now_s, num_asks=coordinator.num_asks, num_asked_tokens=coordinator.num_asked_tokens)
        running = list(self._requests.values())
        return EngineLoad(
            num_running=len(running),
            num_waiting=0,  # the engine's own queue is not seen here
            num_decoding=sum(request.is_decoding for request in running),
            kv_usage=0.0,
            tokens_per_s=self._rates.tokens_per_s,
            mean_step_s=self._rates.mean_step_s,
            price=self.pricing.price,
            knee=self.pricing.knee,
            draft_length_mean=self._rates.draft_length_mean,
            counters=counters_of(stats, coordinator, self.pricing, self._relays),
            requests=tuple(RequestLoad.of(request, is_running=True) for request in running),
            drafters=coordinator.drafters(now_s),
            circuits=circuits_of(coordinator, now_s),
        )
