"""The verifier's step loop: receive, schedule, execute, verify, commit, ask, publish.

The engine alone decides tokens. It knows nothing of processes, sockets or Ray: drafters are a `DraftClient`, the
model is a `Runner`, time is a function.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from outrider.verifier_service.drafting.coordinator import DraftCoordinator
from outrider.verifier_service.drafting.joining import joining_until_s
from outrider.verifier_service.engine.launched_step import LaunchedStep
from outrider.verifier_service.engine.request_extras import RequestExtras
from outrider.verifier_service.engine.request_limits import RequestLimits
from outrider.verifier_service.engine.runners import Runner
from outrider.verifier_service.engine.step_rows import note_predictions, output_logprobs, sampling_rows
from outrider.verifier_service.engine.step_stats import StepStats
from outrider.verifier_service.messages.request import (
    FinishReason,
    GenerationRequest,
    Request,
    RequestOutput,
    SpeculationPlan,
    StepTiming,
    TokenLogprobs,
)
from outrider.verifier_service.messages.tree import VerifiedTokens
from outrider.verifier_service.pricing.draft_pricing import DraftPricing
from outrider.verifier_service.pricing.offer import PricedStep
from outrider.verifier_service.sampling.entries import VerificationEntry
from outrider.verifier_service.sampling.grammar import GrammarCompiler
from outrider.verifier_service.sampling.verification import Verification, begin
from outrider.verifier_service.scheduling.outcome import (
    Outcome,
    count_draft,
    is_leaf,
    num_draft_tokens,
    row_starts,
)
from outrider.verifier_service.scheduling.schedule import ScheduledRequest
from outrider.verifier_service.scheduling.scheduler import Scheduler


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
        verify: Callable[..., Verification] = begin,
    ) -> None:
        """`grammars`: of the runner's tokens; without it structured output is refused.

        `pricing` is the one that scheduler and drafting go by. `runs_apart`: the runner's logits are there before they
        are computed, as on an accelerator. `verify` is called as `begin` is.
        """
        self.runs_apart = runs_apart
        self._verify = verify
        self.scheduler = scheduler
        self.drafting = drafting
        self.grammars = grammars
        self.pricing = DraftPricing() if pricing is None else pricing
        self.stats = StepStats()
        self.on_phase: Callable[[str], None] = lambda name: None  # told the name of each part of a step as it ends
        self._runner = runner
        self._limits = RequestLimits(
            vocab_size=runner.vocab_size, max_model_len=runner.max_model_len, eos_token_ids=runner.eos_token_ids
        )
        self._clock = clock
        self._generator = generator
        self._wall_clock = wall_clock
        self._requests: dict[str, Request] = {}
        self._extras = RequestExtras(self._limits, grammars)
        self._stuck_since_s: float | None = None  # since when all requests have waited for drafts
        self._joining_until_s: float | None = None  # until when a step that could run waits for more drafts
        self._verified_s: float | None = None  # when the last step was; None: there was nothing to do since
        self._ended_s = 0.0  # when the last step had ended

    def add(self, message: GenerationRequest) -> RequestOutput | None:
        """Queue a request; one that can never run is answered at once with its error."""
        try:
            if message.request_id in self._requests:
                raise ValueError(f"request_id: {message.request_id!r} is already running")
            self._limits.check(message)
            grammar_state = self._extras.open_grammar(message.sampling)
            request = Request.of(message, self._clock())
            self.scheduler.add(request)
        except ValueError as error:
            return failure(message.request_id, str(error))
        self._requests[request.request_id] = request
        self._extras.add(message, grammar_state)
        return None

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
        kept = self._extras.request_ids | self.drafting.request_ids | self.pricing.request_ids
        assert kept <= {*self._requests}, f"kept of requests that are gone: {kept - {*self._requests}}"

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[RequestOutput] | None:
        """Run one step to its end; None when nothing could run (no request, or each waits for its draft).

        Where the runner `runs_apart`, what changes nothing of this step is done while it does: `meanwhile` is called,
        which may not call the engine, and the last one is learnt from.
        """
        if not self.runs_apart:
            self.pricing.learn()
        step = self._launch()
        if step is None:
            return None
        if self.runs_apart:
            meanwhile()
            self.pricing.learn()
        return self._finish(step)

    def _launch(self, after: LaunchedStep | None = None) -> LaunchedStep | None:
        """Send the next step to the runner; None when nothing can run. `after` is the one that runs, if one does."""
        begin_s = self._clock()
        self.drafting.receive(self._requests, begin_s)
        self._joining_until_s = self._worth_waiting_until(begin_s)
        schedule = None if self._joining_until_s is not None else self.scheduler.schedule(begin_s)
        if schedule is None:
            is_stuck = bool(self._requests) and after is None
            self._stuck_since_s = (self._stuck_since_s or begin_s) if is_stuck else None
            return None
        waited_since_s, self._stuck_since_s = self._stuck_since_s or begin_s, None
        exposed_s = self._clock() - waited_since_s if after is None else 0.0
        self.on_phase("schedule")
        chosen = None if after is None else after.verification.chosen
        logits = self._runner.execute(schedule.batch, None if chosen is None else chosen.numbers)
        self.on_phase("forward")
        first_rows = row_starts(schedule.items)
        entries = [self._entry(item) for item in schedule.items if item.samples]
        return LaunchedStep(
            schedule=schedule,
            first_rows=first_rows,
            logits=logits,
            verification=self._verify(logits, entries, self._generator, sampling_rows(schedule.items, first_rows)),
            began_s=begin_s,
            waited_since_s=waited_since_s,
            exposed_s=exposed_s,
        )

    def _finish(self, step: LaunchedStep) -> list[RequestOutput]:
        """Read what a step has chosen, commit it, and ask for drafts after it."""
        verified = step.verification.collect()
        step.began_s = max(step.began_s, self._ended_s)
        outcomes = self._outcomes(step, verified)
        self._examine(step, outcomes)
        self.on_phase("verify")
        verified_s = self._clock()
        step_s = verified_s - (self._verified_s or step.waited_since_s) - step.exposed_s
        self._verified_s = verified_s
        self._price(step, outcomes, step_s)
        logprobs = output_logprobs(outcomes, step.logits)
        timings = [self._timing(step, outcome.item) for outcome in outcomes]
        accepted = ((outcome.item.request, len(outcome.path)) for outcome in outcomes if outcome.path)
        self.drafting.observe_accepted(accepted)
        self._commit(step, outcomes)
        replied = [self._reply(*result) for result in zip(outcomes, logprobs, timings, strict=True)]
        outputs = [output for output in replied if output is not None]
        self._move_states()
        self.on_phase("commit")
        self._ended_s = self._clock()
        self._ask(step, outcomes)
        self.on_phase("ask")
        self.stats.observe(step.schedule, outputs, began_s=step.began_s, ended_s=self._ended_s)
        return outputs

    def _examine(self, step: LaunchedStep, outcomes: Sequence[Outcome]) -> None:
        """Take of a step's logits what is wanted beyond its tokens."""
        self._extras.keep_prompt_logprobs(outcomes, step.logits)
        note_predictions(outcomes, step.logits, wants=self._wants_predictions)

    def _price(self, step: LaunchedStep, outcomes: Sequence[Outcome], step_s: float) -> None:
        """Tell pricing how the step's drafts went and how long it took."""
        if outcomes:
            held = [request for request in self.scheduler.running if request.hold_until_s is not None]
            shape = step.shape_of(outcomes)
            self.pricing.end_step(PricedStep(outcomes, held, shape, step_s=step_s, exposed_s=step.exposed_s))

    def _commit(self, step: LaunchedStep, outcomes: Sequence[Outcome]) -> None:
        """Append to every request what the step decided."""
        for outcome in outcomes:
            self._advance(outcome)

    def _ask(self, step: LaunchedStep, outcomes: Sequence[Outcome]) -> None:
        """Ask for drafts after the step."""
        going_on = [outcome.item.request for outcome in outcomes if outcome.item.samples]
        self.drafting.ask(filter(self._is_here, going_on), self._ended_s)

    def _is_here(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    def _worth_waiting_until(self, now_s: float) -> float | None:
        """Return until when a step that could run should wait for more drafts; None: it should not."""
        cost, running = self.pricing.cost, self.scheduler.running
        if cost is None or self.scheduler.num_waiting > len(running):
            return None
        return joining_until_s(now_s, running, self.scheduler.waiting, self.drafting.due, cost)

    def _outcomes(self, step: LaunchedStep, verified: Sequence[VerifiedTokens]) -> list[Outcome]:
        """Say what became of every request, given what was verified of those that reached their end in this step."""
        tokens_of = iter(verified)
        outcomes: list[Outcome] = []
        for item, row in zip(step.schedule.items, step.first_rows, strict=True):
            tokens = next(tokens_of) if item.samples else _NOTHING
            if not step.counts_for(item, self._requests):
                continue
            num_tokens = item.request.num_tokens - step.num_open(item)
            committed, finish_reason = self._until_finished(item.request, tokens.token_ids, num_tokens)
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

    def _until_finished(
        self, request: Request, verified: Sequence[int], num_tokens: int
    ) -> tuple[list[int], FinishReason | None]:
        if verified and self._extras.error(request) is not None:
            return list(verified[:1]), FinishReason.ERROR
        return self._limits.until_finished(request, verified, num_tokens)

    def _wants_predictions(self, request: Request) -> bool:
        return self.drafting.needs_of(request).predictions

    def _entry(self, item: ScheduledRequest) -> VerificationEntry:
        request = item.request
        return VerificationEntry(
            sampling=request.sampling,
            draft=item.draft,
            position=request.num_tokens,
            edits=self._extras.edits(request, item.draft),
        )

    def _advance(self, outcome: Outcome) -> None:
        """Append what a step decided for a request, up to the first token that ends it."""
        if outcome.item.samples:
            count_draft(outcome.item, num_accepted=len(outcome.path))
        self.scheduler.commit(outcome.item, outcome.committed, outcome.path)

    def _reply(
        self, outcome: Outcome, logprobs: tuple[TokenLogprobs, ...] | None, timing: StepTiming | None
    ) -> RequestOutput | None:
        """Say what a request got, and forget it if that ended it."""
        item, request = outcome.item, outcome.item.request
        error = self._extras.error(request)
        prompt_logprobs = self._extras.take_prompt_logprobs(request) if item.samples else None
        if outcome.finish_reason is None:
            self._extras.note_forced(request)
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
            prompt_logprobs=prompt_logprobs,
            timing=timing,
            num_cached_tokens=request.num_cached_tokens,
            finish_reason=outcome.finish_reason,
            error=error,
            speculation=request.metrics,
        )

    def _move_states(self) -> None:
        """Let the states of accepted tree paths follow at once: they are read before the next batch moves the KV."""
        moves = self.scheduler.moves
        if self._runner.states is not None:
            self._runner.states.move_slots([source for source, _ in moves], [target for _, target in moves])

    def _timing(self, step: LaunchedStep, item: ScheduledRequest) -> StepTiming | None:
        """Tell a traced request when its step ran, and its draft's round."""
        if item.request.trace_parent is None:
            return None
        now_s = self._clock()
        unix_s = self._wall_clock() - now_s
        timing = StepTiming(
            began_s=unix_s + step.began_s,
            ended_s=unix_s + now_s,
            num_scheduled_tokens=step.schedule.batch.num_tokens,
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

    def _forget(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._extras.forget(request.request_id)
        self.scheduler.remove(request.request_id)
        self.drafting.close(request)
        self.pricing.forget(request.request_id)
        if not self._requests:
            self._verified_s = None


_NOTHING = VerifiedTokens([], ())


def failure(request_id: str, error: str) -> RequestOutput:
    """Return the only output of a request that cannot be taken."""
    return RequestOutput(request_id=request_id, token_ids=(), finish_reason=FinishReason.ERROR, error=error)
