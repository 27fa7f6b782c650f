"""The verifier's step loop: receive, schedule, execute, verify, commit, ask, publish.

The engine alone decides tokens. It knows nothing of processes, sockets or Ray: drafters are a `DraftClient`, the
model is a `Runner`, time is a function.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Protocol

import torch

from outrider.verifier_service.drafting.coordinator import DraftCoordinator
from outrider.verifier_service.drafting.joining import worth_waiting_until
from outrider.verifier_service.engine.step_rows import output_logprobs, sampling_rows
from outrider.verifier_service.engine.step_stats import StepStats
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.request import (
    FinishReason,
    GenerationRequest,
    Request,
    RequestOutput,
    SamplingParams,
    SpeculationPlan,
    StepTiming,
    TokenLogprobs,
)
from outrider.verifier_service.messages.tree import VerifiedTokens
from outrider.verifier_service.messages.wire import MAX_FRAME_BYTES
from outrider.verifier_service.model.paged_metadata import upload_rows
from outrider.verifier_service.model.state_pool import StatePool
from outrider.verifier_service.pricing.cost_model import StepShape
from outrider.verifier_service.pricing.draft_pricing import DraftPricing
from outrider.verifier_service.pricing.offer import PricedStep
from outrider.verifier_service.sampling.entries import VerificationEntry
from outrider.verifier_service.sampling.grammar import GrammarCompiler, GrammarState
from outrider.verifier_service.sampling.logits_processors import LogitsProcessor
from outrider.verifier_service.sampling.logprobs import LogprobsQuery, encoded_bytes, token_logprobs
from outrider.verifier_service.sampling.verification import begin
from outrider.verifier_service.scheduling.outcome import (
    Outcome,
    count_draft,
    is_leaf,
    num_choice_rows,
    num_draft_tokens,
    row_starts,
)
from outrider.verifier_service.scheduling.schedule import Schedule, ScheduledRequest
from outrider.verifier_service.scheduling.scheduler import Scheduler

MAX_PROMPT_LOGPROBS_BYTES = MAX_FRAME_BYTES * 3 // 4  # they come in one output, and an output in one frame


class Runner(Protocol):
    """Executes a scheduled batch on every rank of the target model."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    eos_token_ids: tuple[int, ...]
    states: StatePool | None  # of the tokens computed so far, where drafters read them

    def execute(self, batch: ScheduledBatch) -> torch.Tensor:
        """Return float32 logits [len(batch.logits_indices), vocab_size], good until the next call."""


class VerifierEngine:
    """Continuous batching over one target model, with drafts where there are any."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        drafting: DraftCoordinator,
        *,
        clock: Callable[[], float],
        generator: torch.Generator,
        wall_clock: Callable[[], float] = time.time,
        grammars: GrammarCompiler | None = None,
        pricing: DraftPricing | None = None,
        runs_apart: bool = False,
    ) -> None:
        """`grammars`: of the runner's tokens; without it structured output is refused.

        `pricing` is the one that scheduler and drafting go by. `runs_apart`: the runner's logits are there before they
        are computed, as on an accelerator.
        """
        self.runs_apart = runs_apart
        self.scheduler = scheduler
        self.drafting = drafting
        self.grammars = grammars
        self.pricing = DraftPricing() if pricing is None else pricing
        self.stats = StepStats()
        self.on_phase: Callable[[str], None] = lambda name: None  # told the name of each part of a step as it ends
        self._runner = runner
        self._clock = clock
        self._generator = generator
        self._wall_clock = wall_clock
        self._requests: dict[str, Request] = {}
        self._processors: dict[str, LogitsProcessor] = {}  # of the requests that need one
        self._grammar_states: dict[str, GrammarState] = {}  # of those with structured output
        self._prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}  # of those whose first output is to come
        self._stuck_since_s: float | None = None  # since when all requests have waited for drafts
        self._joining_until_s: float | None = None  # until when a step that could run waits for more drafts
        self._verified_s: float | None = None  # when the last step was; None: there was nothing to do since

    def add(self, message: GenerationRequest) -> RequestOutput | None:
        """Queue a request; one that can never run is answered at once with its error."""
        try:
            self._check(message)
            grammar_state = self._open_grammar(message.sampling)
            request = Request.of(message, self._clock())
            self.scheduler.add(request)
        except ValueError as error:
            return failure(message.request_id, str(error))
        self._requests[request.request_id] = request
        if grammar_state is not None:
            self._grammar_states[request.request_id] = grammar_state
        if LogitsProcessor.is_needed(request.sampling):
            self._processors[request.request_id] = LogitsProcessor(
                request.sampling,
                num_prompt_tokens=request.num_prompt_tokens,
                stop_token_ids=self._stop_token_ids(request.sampling),
                vocab_size=self._runner.vocab_size,
                mask=grammar_state,
            )
        if request.sampling.prompt_logprobs is not None and not message.output_token_ids:
            self._prompt_logprobs[request.request_id] = [None] * request.num_prompt_tokens
        return None

    def _check(self, message: GenerationRequest) -> None:
        if message.request_id in self._requests:
            raise ValueError(f"request_id: {message.request_id!r} is already running")
        for name in ("prompt_token_ids", "output_token_ids"):
            self._check_token_ids(name, getattr(message, name))
        self._check_token_ids("logit_bias", (item.token_id for item in message.sampling.logit_bias))
        num_top = message.sampling.prompt_logprobs
        if num_top is not None and encoded_bytes(len(message.prompt_token_ids), num_top) > MAX_PROMPT_LOGPROBS_BYTES:
            raise ValueError(f"prompt_logprobs: too many for a prompt of {len(message.prompt_token_ids)} tokens")
        vocabulary = range(self._runner.vocab_size)
        num_stops = sum(token_id in vocabulary for token_id in self._stop_token_ids(message.sampling))
        if message.sampling.min_tokens and num_stops == len(vocabulary):
            raise ValueError("min_tokens: every token of the vocabulary is a stop token")

    def _check_token_ids(self, name: str, token_ids: Iterable[int]) -> None:
        if any(not 0 <= token_id < self._runner.vocab_size for token_id in token_ids):
            raise ValueError(f"{name}: ids must be in [0, {self._runner.vocab_size})")

    def _open_grammar(self, sampling: SamplingParams) -> GrammarState | None:
        if sampling.structured is None:
            return None
        if self.grammars is None:
            raise ValueError("structured: this engine does not know the text of its tokens")
        return self.grammars.open(sampling.structured, (*sampling.stop_token_ids, *self._runner.eos_token_ids))

    def _stop_token_ids(self, sampling: SamplingParams) -> set[int]:
        return {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._runner.eos_token_ids)}

    def cancel(self, request_id: str) -> None:
        """Stop a request and free what it holds; unknown ids (already finished) are no error."""
        if request_id in self._requests:
            self._forget(self._requests[request_id])

    def set_plans(self, plans: Mapping[str, SpeculationPlan]) -> None:
        """Follow the router's latest decisions from the next ask on."""
        for request_id in plans.keys() & self._requests.keys():
            self._requests[request_id].plan = plans[request_id]

    @property
    def requests(self) -> Mapping[str, Request]:
        return self._requests

    def has_work(self) -> bool:
        return bool(self._requests)

    def idle_s(self) -> float | None:
        """Return how long a step that found nothing to run may wait for drafts; None: for new requests only."""
        deadline_s = self._joining_until_s or self.scheduler.next_deadline_s()
        return None if deadline_s is None else max(0.0, deadline_s - self._clock())

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless all books agree and nothing is kept of a request that is gone."""
        self.scheduler.check_integrity()
        assert {request.request_id for request in (*self.scheduler.running, *self.scheduler.waiting)} == {
            *self._requests
        }, "the scheduler's requests are not the engine's"
        kept = {*self._processors, *self._grammar_states, *self._prompt_logprobs, *self.drafting.request_ids}
        kept |= self.pricing.request_ids
        assert kept <= {*self._requests}, f"kept of requests that are gone: {kept - {*self._requests}}"

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[RequestOutput] | None:
        """Run one step; None when nothing could run (no request, or each waits for its draft).

        Where the runner `runs_apart`, what changes nothing of this step is done while it does: `meanwhile` is called,
        which may not call the engine, and the step before is learnt from.
        """
        if not self.runs_apart:
            self.pricing.learn()
        begin_s = self._clock()
        self.drafting.receive(self._requests, begin_s)
        self._joining_until_s = self._worth_waiting_until(begin_s)
        schedule = None if self._joining_until_s is not None else self.scheduler.schedule(begin_s)
        if schedule is None:
            self._stuck_since_s = (self._stuck_since_s or begin_s) if self._requests else None
            return None
        waited_since_s, self._stuck_since_s = self._stuck_since_s or begin_s, None
        exposed_s = self._clock() - waited_since_s
        self.on_phase("schedule")
        logits = self._runner.execute(schedule.batch)
        self.on_phase("forward")
        first_rows = row_starts(schedule.items)
        entries = [self._entry(item) for item in schedule.items if item.samples]
        verification = begin(logits, entries, self._generator, sampling_rows(schedule.items, first_rows))
        if self.runs_apart:
            meanwhile()
            self.pricing.learn()
        outcomes = self._outcomes(schedule.items, first_rows, verification.collect())
        self._keep_prompt_logprobs(schedule.items, first_rows, logits)
        self._note_predictions(outcomes, logits)
        self.on_phase("verify")
        verified_s = self._clock()
        step_s = verified_s - (self._verified_s or waited_since_s) - exposed_s
        self._verified_s = verified_s
        held = [request for request in self.scheduler.running if request.hold_until_s is not None]
        shape = StepShape(schedule.batch.num_tokens, sum(schedule.batch.context_lengths))
        self.pricing.end_step(PricedStep(outcomes, held, shape, step_s=step_s, exposed_s=exposed_s))
        logprobs = output_logprobs(outcomes, logits)
        timings = [self._timing(schedule, item, begin_s) for item in schedule.items]
        accepted = ((outcome.item.request, len(outcome.path)) for outcome in outcomes if outcome.path)
        self.drafting.observe_accepted(accepted)
        committed = [self._commit(*result) for result in zip(outcomes, logprobs, timings, strict=True)]
        outputs = [output for output in committed if output is not None]
        self._move_states()
        self.on_phase("commit")
        end_s = self._clock()
        self.drafting.ask(self._running_after(schedule), end_s)
        self.on_phase("ask")
        self.stats.observe(schedule, outputs, began_s=begin_s, ended_s=end_s)
        return outputs

    def _worth_waiting_until(self, now_s: float) -> float | None:
        """Return until when a step that could run should wait for more drafts; None: it should not."""
        cost, running = self.pricing.cost, self.scheduler.running
        if cost is None or self.scheduler.num_waiting > len(running):
            return None
        held = [due for request in running if (due := self.drafting.due(request)) is not None]
        if not held:
            return None
        ready = [request for request in (*running, *self.scheduler.waiting) if request.hold_until_s is None]
        if not ready:
            return None
        num_tokens = sum(request.num_tokens - request.num_computed_tokens for request in ready)
        num_tokens += sum(len(request.draft.token_ids) for request in ready if request.draft is not None)
        num_context_tokens = sum(request.num_computed_tokens for request in running)
        until_s = worth_waiting_until(
            now_s,
            held,
            num_ready=len(ready),
            num_ready_tokens=num_tokens,
            step_s=lambda count: cost.seconds(StepShape(count, num_context_tokens, is_drafting=True)),
        )
        return until_s if until_s > now_s else None

    def _keep_prompt_logprobs(
        self, items: Sequence[ScheduledRequest], first_rows: Sequence[int], logits: torch.Tensor
    ) -> None:
        """Look up the prompt tokens that this step's rows predict; a chunk computed again gives the same again."""
        kept: list[tuple[list[TokenLogprobs | None], int]] = []
        queries: list[LogprobsQuery] = []
        for item, row in zip(items, first_rows, strict=True):
            entries = self._prompt_logprobs.get(item.request.request_id)
            if entries is None:
                continue
            start = item.request.num_computed_tokens + 1
            token_ids = item.request.token_ids[start : start + item.num_prompt_rows]
            kept.append((entries, start))
            num_top = item.request.sampling.prompt_logprobs or 0
            rows = range(row, row + len(token_ids))
            queries.append(LogprobsQuery(rows=rows, token_ids=token_ids, num_top=num_top))
        for (entries, start), found in zip(kept, token_logprobs(logits, queries), strict=True):
            entries[start : start + len(found)] = found

    def _outcomes(
        self, items: Sequence[ScheduledRequest], first_rows: Sequence[int], verified: Sequence[VerifiedTokens]
    ) -> list[Outcome]:
        """Say what became of every request, given what was verified of those that reached their end in this step."""
        tokens_of = iter(verified)
        outcomes: list[Outcome] = []
        for item, row in zip(items, first_rows, strict=True):
            tokens = next(tokens_of) if item.samples else _NOTHING
            committed, finish_reason = self._until_finished(item.request, tokens.token_ids)
            outcomes.append(
                Outcome(
                    item=item,
                    first_row=row + item.num_prompt_rows,
                    committed=committed,
                    path=tokens.path[: len(committed)],
                    follows_leaf=is_leaf(item.draft, tokens.path),
                    finish_reason=finish_reason,
                )
            )
        return outcomes

    def _note_predictions(self, outcomes: Sequence[Outcome], logits: torch.Tensor) -> None:
        """Keep the likeliest token of every row for the drafters that want to know."""
        wanted: list[Outcome] = []
        for outcome in outcomes:
            outcome.item.request.predicted_ids = ()
            if outcome.item.samples and self.drafting.needs_of(outcome.item.request).predictions:
                wanted.append(outcome)
        if not wanted:
            return
        rows = [outcome.first_row + index for outcome in wanted for index in range(num_choice_rows(outcome.item))]
        predicted = iter(logits[upload_rows(rows, logits.device)].argmax(dim=1).tolist())
        for outcome in wanted:
            outcome.item.request.predicted_ids = tuple(islice(predicted, num_choice_rows(outcome.item)))

    def _entry(self, item: ScheduledRequest) -> VerificationEntry:
        request = item.request
        processor = self._processors.get(request.request_id)
        draft_token_ids = item.draft.token_ids if item.draft is not None else ()
        parents = item.draft.parents if item.draft is not None else None
        return VerificationEntry(
            sampling=request.sampling,
            draft=item.draft,
            position=request.num_tokens,
            edits=None if processor is None else processor.edits(request.token_ids, draft_token_ids, parents),
        )

    def _commit(
        self, outcome: Outcome, logprobs: tuple[TokenLogprobs, ...] | None, timing: StepTiming | None
    ) -> RequestOutput | None:
        """Append what was verified, up to the first token that ends the request."""
        item, request = outcome.item, outcome.item.request
        if item.samples:
            count_draft(item, num_accepted=len(outcome.path))
        self.scheduler.commit(item, outcome.committed, outcome.path)
        error = self._grammar_error(request)
        prompt_logprobs = self._prompt_logprobs.pop(request.request_id, None) if item.samples else None
        if outcome.finish_reason is None:
            self._note_forced(request)
        else:
            self._forget(request)
        if not outcome.committed:
            return None
        return RequestOutput(
            request_id=request.request_id,
            token_ids=tuple(outcome.committed),
            num_draft_tokens=num_draft_tokens(item),
            num_accepted_tokens=len(outcome.path),
            follows_leaf=outcome.follows_leaf,
            logprobs=logprobs,
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
            timing=timing,
            num_cached_tokens=request.num_cached_tokens,
            finish_reason=outcome.finish_reason,
            error=error,
            speculation=request.metrics,
        )

    def _grammar_error(self, request: Request) -> str | None:
        state = self._grammar_states.get(request.request_id)
        return None if state is None else state.error

    def _note_forced(self, request: Request) -> None:
        """Look up what the grammar forces next, for the drafter."""
        state = self._grammar_states.get(request.request_id)
        if state is not None and request.plan.draft_length > 0:
            request.forced_ids = state.forced_ids(request.token_ids[request.num_prompt_tokens :])
        else:
            request.forced_ids = ()

    def _move_states(self) -> None:
        """Let the states of accepted tree paths follow at once: they are read before the next batch moves the KV."""
        moves = self.scheduler.moves
        if self._runner.states is not None:
            self._runner.states.move_slots([source for source, _ in moves], [target for _, target in moves])

    def _timing(self, schedule: Schedule, item: ScheduledRequest, begin_s: float) -> StepTiming | None:
        """Tell a traced request when its step ran, and its draft's round."""
        if item.request.trace_parent is None:
            return None
        now_s = self._clock()
        unix_s = self._wall_clock() - now_s
        timing = StepTiming(
            began_s=unix_s + begin_s, ended_s=unix_s + now_s, num_scheduled_tokens=schedule.batch.num_tokens
        )
        answered = self.drafting.answered_round(item.request) if item.draft is not None else None
        if answered is None:
            return timing
        return replace(
            timing,
            drafter_id=answered.drafter_id,
            draft_asked_s=unix_s + answered.asked_s,
            draft_received_s=unix_s + answered.received_s,
        )

    def _until_finished(self, request: Request, verified: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        if verified and self._grammar_error(request) is not None:
            return list(verified[:1]), FinishReason.ERROR
        sampling = request.sampling
        stops = self._stop_token_ids(sampling)
        room = min(
            sampling.max_tokens - request.num_output_tokens,
            self._runner.max_model_len - request.num_tokens,
        )
        committed: list[int] = []
        for token_id in verified:
            committed.append(token_id)
            if token_id in stops:
                return committed, FinishReason.STOP
            if len(committed) == room:
                return committed, FinishReason.LENGTH
        return committed, None

    def _running_after(self, schedule: Schedule) -> list[Request]:
        return [item.request for item in schedule.items if item.samples and item.request.request_id in self._requests]

    def _forget(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._processors.pop(request.request_id, None)
        self._grammar_states.pop(request.request_id, None)
        self._prompt_logprobs.pop(request.request_id, None)
        self.scheduler.remove(request.request_id)
        self.drafting.close(request)
        self.pricing.forget(request.request_id)
        if not self._requests:
            self._verified_s = None


_NOTHING = VerifiedTokens([], ())


def failure(request_id: str, error: str) -> RequestOutput:
    """Return the only output of a request that cannot be taken."""
    return RequestOutput(request_id=request_id, token_ids=(), finish_reason=FinishReason.ERROR, error=error)
