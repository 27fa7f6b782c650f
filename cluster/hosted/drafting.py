"""Drafts for an engine that verifies by itself: given what a step did, return what the next one should verify.

The core of every plug-in, without the engine's own types. An engine like vLLM asks once per step, for all requests, and
is blocked meanwhile. So `propose` waits until the asked drafts have arrived or their deadline, estimated from earlier
rounds, has passed; a drafter that is still prefilling is not waited for. The price includes the wait, so that drafts
are asked for only if they pay.

Drafts are point masses: a drafter returns its likeliest tokens at any temperature, and the engine's own rejection
sampling keeps the distribution.
"""

from __future__ import annotations

import collections
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from outrider.cluster.hosted.seen_steps import SeenSteps
from outrider.cluster.router.fleet import Directive
from outrider.verifier_service.drafting.asking import CoordinatorConfig
from outrider.verifier_service.drafting.coordinator import DraftCoordinator
from outrider.verifier_service.drafting.state_source import StateSource
from outrider.verifier_service.engine.counters import circuits_of, counters_of
from outrider.verifier_service.engine.step_stats import RecentRates, StepStats
from outrider.verifier_service.links.relay_client import RelayDraftClient
from outrider.verifier_service.messages.counts import HandoverCounts
from outrider.verifier_service.messages.draft import Draft
from outrider.verifier_service.messages.engine import (
    EngineLoad,
    LinkEvent,
    Relay,
    RequestLoad,
    StepTime,
)
from outrider.verifier_service.messages.request import DisabledReason, Request, SamplingParams, SpeculationPlan
from outrider.verifier_service.pricing.cost_model import StepShape
from outrider.verifier_service.pricing.draft_pricing import DraftPricing
from outrider.verifier_service.pricing.offer import PricedStep
from outrider.verifier_service.scheduling.outcome import Outcome, count_drafts, drafts_of, num_draft_tokens
from outrider.verifier_service.scheduling.schedule import first_nodes

IDLE_S = 30.0  # without a step; then all sessions are closed, and running requests open new ones
MIN_WAIT_S = 0.02  # so that a short stall does not cost every draft
# vLLM schedules, and has counters of its own
_UNCOUNTED = ("num_preemptions", "num_prefix_queried_tokens", "num_prefix_hit_tokens", *HandoverCounts._fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedConfig:
    """The engine's sizes, and how long its steps wait."""

    vocab_size: int
    max_model_len: int
    num_speculative_tokens: int  # the engine's longest draft
    is_pinned: bool = False  # always ask for the longest draft
    max_wait_s: float = 0.1  # the longest wait of a step for drafts
    opening_s: float = 10.0  # deadline of a drafter's prefill, which no step waits for
    learn: bool | Literal["all"] = False  # see `PluginOptions`

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_model_len", "num_speculative_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in ("max_wait_s", "opening_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive")

    def may_learn(self, store: bool | None) -> bool:
        """Return whether a pool may learn from a request that says so of `store`.

        The engine does not show the plug-in a request's salt. So silence is no permission, unless the operator says so.
        """
        return self.learn is not False and (self.learn == "all" if store is None else store)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRow:
    """One request's part of the engine's last step."""

    request_id: str
    num_tokens: int  # prompt and committed tokens, after the step
    num_scheduled_tokens: int  # computed in the step, including the draft
    num_draft_tokens: int  # verified in the step
    num_new_tokens: int  # committed by the step; 0: it is prefilling

    @property
    def num_accepted_tokens(self) -> int:
        return min(max(0, self.num_new_tokens - 1), self.num_draft_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRequest:
    """The parameters of a request that concern its drafts."""

    num_prompt_tokens: int
    max_tokens: int
    num_speculative_tokens: int | None = None  # a cap on the draft length; 0: off
    stop_token_ids: frozenset[int] = frozenset()  # tokens that end it
    store: bool | None = None  # whether a pool may learn from it, as its client says; None: the client says nothing
    cache_salt: str = ""  # only requests with the same salt draft from one another's texts


class Host(Protocol):
    """Look-ups of a step's rows, by row index."""

    began_s: float  # when the step began, by the monotonic clock

    def describe(self, row: int) -> HostRequest:
        """Describe the row's request; called once per request."""

    def token_ids(self, row: int, start: int, stop: int) -> Sequence[int]:
        """Return the request's tokens from `start` to `stop`."""

    def block_table(self, row: int) -> Sequence[int]:
        """Return the request's KV blocks; called only if drafters read states."""


class Drafters(Protocol):
    """The connection to the pool. `wait` blocks for its time-out at most, `send` never."""

    def send(self, relays: Sequence[Relay]) -> None:
        """Send frames, in order."""

    def wait(self, timeout_s: float) -> list[LinkEvent]:
        """Return what has arrived, oldest first; if nothing has, wait for the first message."""


class HostedDrafting:
    """Drafting for one engine. Its step loop calls `propose`; any thread may call the rest, which blocks no step."""

    def __init__(
        self,
        drafters: Drafters,
        config: HostedConfig,
        *,
        states: StateSource | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`states`: the source of the target's hidden states, if drafters may read any."""
        self.pricing = DraftPricing()
        self.stats = StepStats()
        self.num_undrafted: collections.Counter[str] = collections.Counter()  # by reason: requests without a draft
        self._lock = threading.Lock()  # guards everything below
        self._directives: queue.SimpleQueue[Directive] = queue.SimpleQueue()  # not followed yet
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
        self._drafts: dict[str, Draft] = {}  # given to the engine, not verified yet
        self._default_plan = self._effective_plan(SpeculationPlan(draft_length=config.num_speculative_tokens))
        self._last_ids: set[str] = set()  # requests of the last step
        self._ended_s = 0.0  # when `propose` last returned
        self._waited_s = 0.0  # how long it waited for drafts
        self._has_verified = False  # the last step verified drafts

    @property
    def step_times(self) -> tuple[StepTime, ...]:
        """The step times behind the price; empty: too few steps were seen."""
        return self._seen.profile

    def propose(self, rows: Sequence[HostRow], finished_ids: Iterable[str], host: Host) -> list[list[int]]:
        """Learn from a step; return the next step's draft for every row, [] for none."""
        with self._lock:
            return self._propose(rows, finished_ids, host)

    def follow(self, directive: Directive) -> None:
        """Follow the router from the next step on."""
        self._directives.put(directive)

    def refresh_load(self, known_ids: Callable[[], Iterable[str]]) -> EngineLoad | None:
        """Close requests that have left the engine; return its load, as seen here. None: `propose` is running.

        A request has left if it is not among `known_ids`, or if the engine is idle: the engine reports it only with its
        next step. `known_ids` is called under the lock: after a step in between, a new request would be closed.
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
        requests = [self._mirror(index, row, host) for index, row in enumerate(rows)]
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
        if self._seen.wants_plain and self._has_verified:  # every other step without drafts, until the profile is known
            self.num_undrafted[DisabledReason.WARMUP] += len(asking)
            asking = []
        asked_s = self._clock()
        self.coordinator.ask(asking, asked_s)
        self._send()
        self.num_undrafted.update(one.metrics.disabled_reason for one in asking if one.metrics.disabled_reason)
        self.pricing.learn()  # meanwhile the drafters work
        self._wait()
        self._waited_s = self._clock() - asked_s
        self._last_ids = {row.request_id for row in rows}
        drafts = self._hand_out(requests)
        self._ended_s = self._clock()
        return drafts

    # --- the parts of a call ---

    def _close(self, request_ids: Iterable[str]) -> None:
        """Close requests that have left the engine; unknown ids are ignored."""
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
            self._default_plan = self._effective_plan(directive.default_plan)
            for request_id in directive.plans.keys() & self._requests.keys():
                self._requests[request_id].plan = self._effective_plan(directive.plans[request_id])

    def _effective_plan(self, plan: SpeculationPlan) -> SpeculationPlan:
        """Return the plan to follow: drafts in spite of `warmup`, since only steps with drafts give a profile here."""
        if not self._config.is_pinned and plan.disabled_reason is not DisabledReason.WARMUP:
            return plan
        length = self._config.num_speculative_tokens
        return replace(plan, draft_length=length, is_pinned=self._config.is_pinned, disabled_reason=None)

    def _mirror(self, index: int, row: HostRow, host: Host) -> Request:
        """Return our copy of a row's request, before the step; create it for a new one."""
        request = self._requests.get(row.request_id)
        if request is not None and request.num_tokens <= row.num_tokens:
            return request
        self._close([row.request_id])  # the id is used again
        description = host.describe(index)
        before = row.num_tokens - row.num_new_tokens
        caps = (description.num_speculative_tokens, self._config.num_speculative_tokens)
        request = self._requests[row.request_id] = Request(
            request_id=row.request_id,
            sampling=SamplingParams(
                temperature=0.0,
                max_tokens=max(1, description.max_tokens),
                # the engine's longest draft, which the router does not know, bounds every plan
                num_speculative_tokens=min(cap for cap in caps if cap is not None),
            ),
            token_ids=list(host.token_ids(index, 0, before)),
            num_prompt_tokens=description.num_prompt_tokens,
            plan=self._default_plan,
            arrival_s=self._clock(),
            cache_salt=description.cache_salt,
            history_key="" if description.store is False else None,
            may_learn=self._config.may_learn(description.store),
        )
        self._stop_token_ids[row.request_id] = description.stop_token_ids
        return request

    def _end_step(self, rows: Sequence[HostRow], requests: Sequence[Request], began_s: float) -> None:
        """Pass the step's time and outcomes to pricing and to the drafters' records."""
        shape = StepShape(sum(row.num_scheduled_tokens for row in rows), sum(row.num_tokens for row in rows))
        outcomes = [self._take_outcome(*pair) for pair in zip(rows, requests, strict=True)]
        # step time includes the engine's work between steps, but not idle time
        pairs = [pair for pair in zip(rows, requests, strict=True) if pair[0].request_id in self._last_ids]
        # continuous: no step without a call, and no pause, since the last call
        is_continuous = any(row.num_tokens - row.num_new_tokens == request.num_tokens for row, request in pairs)
        step_s = self._clock() - (self._ended_s if is_continuous else began_s)
        exposed_s = self._waited_s if is_continuous else 0.0
        has_prompts = any(row.num_scheduled_tokens > 1 + row.num_draft_tokens for row in rows)
        if self._seen.observe(shape.num_tokens, step_s, has_prompts=has_prompts):
            self.pricing.use_profile(self._seen.profile)
        self._has_verified = any(outcome.item.draft is not None for outcome in outcomes)
        self.stats.step_s.observe(step_s)
        self.coordinator.observe_verified(drafts_of(outcomes))
        self.pricing.end_step(PricedStep(outcomes, (), shape, step_s=step_s, exposed_s=exposed_s))
        self.stats.num_steps += 1
        self.stats.num_scheduled_tokens += shape.num_tokens
        count_drafts(outcomes)
        for outcome in outcomes:
            num_drafted = num_draft_tokens(outcome.item)
            self.stats.num_committed_tokens += len(outcome.committed)
            self.stats.num_drafts += num_drafted > 0
            self.stats.num_draft_tokens += num_drafted
            self.stats.num_accepted_tokens += len(outcome.path)

    def _take_outcome(self, row: HostRow, request: Request) -> Outcome:
        """Take a row's draft; return its outcome. The engine may have verified only a part of it."""
        draft = self._drafts.pop(row.request_id, None)
        if draft is not None and draft.position != row.num_tokens - row.num_new_tokens:
            draft = None  # it was verified in a step without a call
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
        """Return whether one of the new tokens ends the request, as the engine will report later."""
        return not self._stop_token_ids[request.request_id].isdisjoint(request.token_ids[-num_new_tokens:])

    def _hand_out(self, requests: Sequence[Request]) -> list[list[int]]:
        """Return the tokens that the engine is to verify of each request's draft."""
        known = [(request, self._known_part(request.draft)) for request in requests if request.draft is not None]
        drafts = self.pricing.admit_all([(request, draft) for request, draft in known if draft.token_ids])
        self._drafts |= {draft.request_id: draft for draft in drafts if draft.token_ids}
        handed = {draft.request_id: list(draft.token_ids) for draft in drafts}
        for request in requests:
            request.draft = None
        return [handed.get(request.request_id, []) for request in requests]

    def _known_part(self, draft: Draft) -> Draft:
        """Return a draft up to the first token that the engine has no embedding for.

        A drafter's vocabulary may be padded beyond the engine's; a point mass may be cut by its value.
        """
        known = itertools.takewhile(lambda token_id: token_id < self._config.vocab_size, draft.token_ids)
        num_known = sum(1 for _ in known)
        return first_nodes(draft, max_nodes=num_known, max_depth=num_known)

    def _send(self) -> None:
        if relays := self._relays.take_outbox():
            self._drafters.send(relays)

    def _receive(self, timeout_s: float = 0.0) -> None:
        for message in self._drafters.wait(timeout_s):
            self._relays.feed(message)
        self.coordinator.receive(self._requests, self._clock())
        self._send()  # a drafter may have asked for a resync

    def _wait(self) -> None:
        """Wait until every asked draft has arrived or its deadline has passed."""
        while deadlines := [one.hold_until_s for one in self._requests.values() if one.hold_until_s is not None]:
            self._receive(max(0.0, min(deadlines) - self._clock()))

    def _load(self) -> EngineLoad:
        now_s, coordinator, stats = self._clock(), self.coordinator, self.stats
        self._rates.sample(stats, now_s, num_asks=coordinator.num_asks, num_asked_tokens=coordinator.num_asked_tokens)
        running = list(self._requests.values())
        return EngineLoad(
            num_running=len(running),
            num_waiting=0,  # the engine's queue is not visible here
            num_decoding=sum(request.is_decoding for request in running),
            kv_usage=0.0,
            tokens_per_s=self._rates.tokens_per_s,
            mean_step_s=self._rates.mean_step_s,
            price=self.pricing.price,
            knee=self.pricing.knee,
            draft_length_mean=self._rates.draft_length_mean,
            counters=counters_of(stats, coordinator, self.pricing, self._relays, uncounted=_UNCOUNTED),
            requests=tuple(RequestLoad.of(request, is_running=True) for request in running),
            drafters=coordinator.drafters(now_s),
            circuits=circuits_of(coordinator, now_s),
        )
