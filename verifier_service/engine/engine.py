"""The verifier's step loop. The engine alone decides tokens.

No processes, sockets or Ray: drafters are a `DraftClient`, the model is a `Runner`, time is a function.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from outrider.verifier_service.drafting.coordinator import DraftCoordinator
from outrider.verifier_service.drafting.joining import joining_until_s
from outrider.verifier_service.engine.beams import BeamSearches
from outrider.verifier_service.engine.launched_step import LaunchedStep
from outrider.verifier_service.engine.mask_rows import MaskRows
from outrider.verifier_service.engine.outputs import OutputBuilder
from outrider.verifier_service.engine.request_extras import RequestExtras
from outrider.verifier_service.engine.request_limits import RequestLimits
from outrider.verifier_service.engine.runners import Runner
from outrider.verifier_service.engine.step_rows import count_experts, note_predictions, note_target_rows, sampling_rows
from outrider.verifier_service.engine.step_stats import StepStats
from outrider.verifier_service.experts.routing import ExpertRouting
from outrider.verifier_service.handover.giver import HOLD_S
from outrider.verifier_service.handover.handovers import Handovers, NoHandovers
from outrider.verifier_service.messages.handover import ArrivedKV
from outrider.verifier_service.messages.request import (
    FinishReason,
    GenerationRequest,
    Request,
    RequestOutput,
    SpeculationPlan,
)
from outrider.verifier_service.pricing.draft_pricing import DraftPricing
from outrider.verifier_service.pricing.masked_drafts import MaskedDrafts
from outrider.verifier_service.pricing.offer import PricedStep
from outrider.verifier_service.sampling.grammar import GrammarCompiler
from outrider.verifier_service.sampling.unread import UnreadTokens
from outrider.verifier_service.sampling.verification import Verification, begin
from outrider.verifier_service.scheduling.masks import MaskBlocks, MaskPlanner
from outrider.verifier_service.scheduling.outcome import Outcome, count_drafts, drafts_of, going_on, row_starts
from outrider.verifier_service.scheduling.prefix_cache import root_hash
from outrider.verifier_service.scheduling.schedule import Schedule
from outrider.verifier_service.scheduling.scheduler import Scheduler


class VerifierEngine:
    """Continuous batching over one target model, with speculative decoding where there are drafters.

    A `step` is

        receive   attach the drafts that have arrived           `drafting.receive`
        schedule  choose tokens and drafts, reserve KV          `scheduler.schedule`
        execute   run one forward pass over all of them         `runner.execute`
        verify    accept draft tokens, sample one token more    `verify`
        commit    append tokens, free the KV of rejected ones   `scheduler.commit`
        ask       send new tokens to drafters, ask for drafts   `drafting.ask`
        output    make the outputs, while drafters draft        `outputs.build`

    `_launch` begins a step, up to its verification; `_finish` reads the tokens and does the rest. `PipelinedEngine`
    launches the next step in between. `EngineLoop` publishes the outputs.
    """

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
        runs_async: bool = False,
        verify: Callable[..., Verification] = begin,
    ) -> None:
        """`pricing` is the object that scheduler and drafting use. Without `grammars`, structured output is refused.

        `runs_async`: the runner returns before its logits are computed, as on an accelerator.
        """
        self.runs_async = runs_async
        self.scheduler = scheduler
        self.drafting = drafting
        self.grammars = grammars
        self.pricing = DraftPricing() if pricing is None else pricing
        self.stats = StepStats()
        self.on_phase: Callable[[str], None] = lambda name: None  # called with each phase of a step as it ends
        self.routing: ExpertRouting | None = None  # of a mixture of experts whose drafts are priced
        self._runner = runner
        self._verify = verify
        self._clock, self._wall_clock = clock, wall_clock
        self._generator = generator
        self._limits = RequestLimits(
            vocab_size=runner.vocab_size, max_model_len=runner.max_model_len, eos_token_ids=runner.eos_token_ids
        )
        self._requests: dict[str, Request] = {}
        self._extras = RequestExtras(self._limits, grammars)
        self._outputs = OutputBuilder(self._extras, drafting, clock=clock, wall_clock=wall_clock)
        self._beams = BeamSearches(
            *(self._requests, scheduler, self._limits, grammars), ended=self._outputs.ended, forget=self._forget
        )
        self.mask_rows = MaskRows()
        self._stuck_since_s: float | None = None  # since when all requests have waited for drafts
        self._joining_until_s: float | None = None  # until when a step that could run waits for more drafts
        self._verified_s: float | None = None  # when the last step was verified; None: the engine was idle since
        self._ended_s = 0.0  # when the last step had ended
        self.is_paused = False  # no step runs
        self.pause_asked_s = 0.0  # see `EngineLoad`
        self.pause_ends_s: float | None = None  # when the pause ends by itself, by the control's clock
        self.weights_error: str | None = None  # why no request is served: the model's weights are old and new ones
        self.weights_folder: str | None = None  # see `EngineLoad`
        self.weights_digest, self.weights_taken_s = "", 0.0
        self._num_updates = 0
        self.handovers: Handovers = NoHandovers()  # how requests come from and go to other verifiers with their KV

    def add(self, message: GenerationRequest, arrived: ArrivedKV | None = None) -> RequestOutput | None:
        """Queue a request, perhaps with KV of another verifier; return its error if it can never run."""
        try:
            if self.weights_error is not None:
                raise ValueError(self.weights_error)
            if message.request_id in self._requests:
                raise ValueError(f"request_id: {message.request_id!r} is already running")
            self._limits.check(message)
            grammar_state = self._extras.open_grammar(message.sampling)
            request = Request.of(message, self._clock())
            request.arrived = arrived
            self._limits.tell(request, looks_closer=grammar_state is not None)
            self.scheduler.add(request)
        except ValueError as error:
            return RequestOutput.failed(message.request_id, str(error))
        self._requests[request.request_id] = request
        self._extras.add(message, grammar_state)
        self._beams.add(request)
        self.drafting.filing.seed(request, message.history)
        return None

    def use_masks(self, blocks: MaskBlocks) -> None:
        """Have masks in steps, for a drafter in this process, and price its drafts with them."""
        self.scheduler.shares.masks, self.pricing.masked = MaskPlanner(blocks), MaskedDrafts(blocks)

    def cancel(self, request_id: str) -> None:
        """Stop a request and free what it holds; an unknown id (already finished) is no error."""
        if request_id in self._requests:
            self._forget(self._requests[request_id])

    def set_plans(self, plans: Mapping[str, SpeculationPlan]) -> None:
        """Follow the router's latest plans from the next ask on."""
        for request_id in plans.keys() & self._requests.keys():
            self._requests[request_id].plan = plans[request_id]

    @property
    def weight_version(self) -> str:
        """What the weights are called that draw tokens now."""
        return self._outputs.weight_version

    def drain(self) -> list[RequestOutput]:
        """Finish the step in flight, if any, without another; return its outputs."""
        self._verified_s = self._stuck_since_s = None  # what comes now is no part of a step's time
        return []

    def end_all(self, reason: FinishReason, error: str | None = None) -> list[RequestOutput]:
        """End all requests, running and waiting; return their last outputs. No step may be in flight."""
        asked = [request for request in self._requests.values() if request.num_seats]
        ended = [(request, self._outputs.ended(request, reason, error)) for request in asked]
        for request, _ in ended:
            self._forget(request)
        return [output for _, output in ended]

    def take_version(self, version: str | None, folder: str | None = None, digest: str = "") -> None:
        """The model has new weights: name them (None: by their number) and find no KV of older ones.

        `folder`: where they came from; None: from a trainer's group. `digest`: of all of them.

        No step may be in flight. Running requests go on with the KV that they have. Drafts in flight may still be
        verified: by the new weights, and any draft is verified exactly. Hidden states lie in the slots of KV, so those
        of older weights are found no more than their KV. Drafters in this process that run the target's own layers
        have the new weights, too.
        """
        self._num_updates += 1
        self._outputs.weight_version = str(self._num_updates) if version is None else version
        self.scheduler.change_root(root_hash(self.weight_version, self._num_updates))
        self.drafting.filing.weight_version = self.weight_version
        self.drafting.updates.take_version(self.weight_version)
        for request in self._requests.values():
            request.predicted_ids = ()  # the older weights' guesses
            self.handovers.release(request)  # the older weights' KV
        self.weights_error = None
        self.weights_folder, self.weights_digest, self.weights_taken_s = folder, digest, self._wall_clock()

    @property
    def requests(self) -> Mapping[str, Request]:
        return self._requests

    def has_work(self) -> bool:
        return bool(self._requests)

    def idle_s(self) -> float | None:
        """Return how long to sleep after a step that could not run; None: until a new request arrives."""
        if self.is_paused:
            return None
        deadline_s = self._joining_until_s or self.scheduler.next_deadline_s()
        if deadline_s is None or deadline_s == math.inf:
            return None
        return max(0.0, deadline_s - self._clock())

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless all books agree and nothing is kept of a finished request."""
        self.scheduler.check_integrity()
        known = (*self.scheduler.running, *self.scheduler.waiting, *self.scheduler.background)
        assert {request.request_id for request in known} == {*self._requests}, (
            "the scheduler's requests are not the engine's"
        )
        kept = self._extras.request_ids | self.drafting.request_ids | self.pricing.request_ids
        kept |= self.mask_rows.request_ids | self._beams.request_ids
        assert kept <= {*self._requests}, f"kept of requests that are gone: {kept - {*self._requests}}"

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[RequestOutput] | None:
        """Run one step to its end; return None if none could run: no request, or each waits for its draft.

        With an asynchronous runner, `meanwhile` is called while the step runs, and pricing learns from the last step.
        `meanwhile` must not call the engine.
        """
        if not self.runs_async:
            self.pricing.learn()
        step = self._launch()
        if step is None:
            return None
        if self.runs_async:
            meanwhile()
            self.pricing.learn()
        return self._finish(step)

    def _launch(self, after: LaunchedStep | None = None) -> LaunchedStep | None:
        """Send the next step to the runner; return None if nothing can run. `after`: the step in flight, if any."""
        begin_s = self._clock()
        unread = self._receive(begin_s)
        if self.is_paused:
            return None
        self._joining_until_s = self._worth_waiting_until(begin_s)
        schedule = None if self._joining_until_s is not None else self._schedule(begin_s)
        if schedule is None:
            is_stuck = bool(self._requests) and after is None
            self._stuck_since_s = (self._stuck_since_s or begin_s) if is_stuck else None
            return None
        waited_since_s, self._stuck_since_s = self._stuck_since_s or begin_s, None
        exposed_s = self._clock() - waited_since_s if after is None else 0.0
        self.on_phase("schedule")
        chosen = None if after is None else after.verification.chosen
        numbers = None if chosen is None else chosen.numbers
        logits = self._runner.execute(schedule.batch, numbers if unread is None else unread.numbers)
        self.on_phase("forward")
        first_rows = row_starts(schedule.items)
        entries, rows = self._extras.verification_entries(schedule.items), sampling_rows(schedule.items, first_rows)
        return LaunchedStep(
            schedule=schedule,
            first_rows=first_rows,
            logits=logits,
            entries=entries,
            verification=self._verify(logits, entries, self._generator, rows, unread),
            began_s=begin_s,
            waited_since_s=waited_since_s,
            exposed_s=exposed_s,
            unread=unread,
        )

    def _receive(self, now_s: float) -> UnreadTokens | None:
        """Attach drafts; return the tokens of those that nobody has read yet, if there are any."""
        self.drafting.receive(self._requests, now_s)
        return None

    def _schedule(self, now_s: float) -> Schedule | None:
        """Choose the next step. A request that comes with KV joins a later one: its draft is asked for first."""
        self._beams.restart_broken()
        schedule = self.scheduler.schedule(now_s)
        placed = self.scheduler.take_arrived()
        if not placed:
            return schedule
        for request, start in placed:
            self.handovers.write(request, start)
            self.scheduler.publish_arrived(request, start)
        self.drafting.ask((request for request, _ in placed if request.num_output_tokens), now_s)
        return schedule or self.scheduler.schedule(now_s)

    def hold(self, max_held: int | None = None) -> list[RequestOutput]:
        """Let decoding requests stand still, for other verifiers to take; return an output that says so of each.

        At most `max_held` stand still at a time (None: all), the least senior ones first: a preemption would take them
        first. No step may be in flight. Where nothing can be given, nothing happens.
        """
        if not self.handovers.can_give:
            return []
        running = self.scheduler.running[::-1]
        decoding = [request for request in running if request.is_decoding and request.num_output_tokens]
        decoding = [request for request in decoding if request.sampling.beams is None]
        held = [request for request in decoding if request.stands_until_s is None]
        if max_held is not None:
            held = held[: max(0, max_held - len(decoding) + len(held))]
        for request in held:
            request.stands_until_s = self._clock() + HOLD_S
        return [replace(self._outputs.ended(request, None), is_held=True) for request in held]

    def _hold_givers(self, outcomes: Sequence[Outcome]) -> set[str]:
        """Let requests stand still that wait for a taker after these tokens; return their ids."""
        held: set[str] = set()
        for outcome in outcomes:
            request = outcome.item.request
            if request.hands_over and outcome.committed and outcome.finish_reason is None:
                request.hands_over, request.stands_until_s = False, self._clock() + HOLD_S
                held.add(request.request_id)
        return held

    def _finish(self, step: LaunchedStep) -> list[RequestOutput]:
        """Read the step's tokens, commit them, and ask for drafts after them."""
        verified = step.verification.collect()
        step.began_s = max(step.began_s, self._ended_s)
        outcomes = step.outcomes(verified, self._requests, self._extras.until_finished)
        self._examine(step, outcomes)
        self.on_phase("verify")
        verified_s = self._clock()
        step_s = verified_s - (self._verified_s or step.waited_since_s) - step.exposed_s
        self._verified_s = verified_s
        self._price(step, outcomes, step_s)
        held = self._hold_givers(outcomes)
        self.drafting.observe_verified(drafts_of(outcomes))
        self._commit(step, outcomes)
        self._move_states()
        self._extras.note_forced(outcomes)
        self.on_phase("commit")
        self._ended_s = self._clock()
        self._ask(step, outcomes)
        self.on_phase("ask")
        outputs = self._outputs.build(step, outcomes)  # while drafters draft
        for output in outputs if held else ():
            output.is_held = output.request_id in held
        for outcome in outcomes:
            if outcome.finish_reason is not None:
                self._forget(outcome.item.request)
        self.on_phase("outputs")
        self.stats.observe(step.schedule, outputs, began_s=step.began_s, ended_s=self._ended_s)
        return self._beams.advance(step, outcomes, outputs)

    def _examine(self, step: LaunchedStep, outcomes: Sequence[Outcome]) -> None:
        """Read prompt logprobs, predictions, masks and what drafters learn from of the step's logits."""
        self._extras.keep_prompt_logprobs(outcomes, step.logits)
        if self.drafting.reads_logits:
            note_predictions(outcomes, step.logits, wants=lambda request: self.drafting.needs_of(request).predictions)
            note_target_rows(outcomes, step.logits, self._num_top)
        if self.scheduler.shares.masks is not None:
            self.mask_rows.note(outcomes, step.logits)

    def _num_top(self, request: Request) -> int:
        """Return how many of the target's likeliest tokens are read for a request's pool to learn from.

        They cost the pipelining of steps: where that is possible, those alone whose drafters are asked have them.
        """
        return self.drafting.num_top_of(request, is_unasked=not self.runs_async)

    def _price(self, step: LaunchedStep, outcomes: Sequence[Outcome], step_s: float) -> None:
        """Tell pricing what the step accepted and how long it took."""
        if outcomes:
            held = [request for request in self.scheduler.running if request.hold_until_s is not None]
            shape = step.shape_of(outcomes)
            self.pricing.end_step(PricedStep(outcomes, held, shape, step_s=step_s, exposed_s=step.exposed_s))

    def _commit(self, step: LaunchedStep, outcomes: Sequence[Outcome]) -> None:
        """Append the tokens of every outcome."""
        if self.routing is not None:
            count_experts(step, outcomes, self.routing, self.pricing.cost)
        self._advance(outcomes)

    def _advance(self, outcomes: Sequence[Outcome]) -> None:
        count_drafts(outcomes)
        self.scheduler.commit(outcomes)

    def _ask(self, step: LaunchedStep, outcomes: Sequence[Outcome]) -> None:
        """Ask for drafts after the step."""
        self.drafting.ask(going_on(outcomes), self._ended_s)

    def _worth_waiting_until(self, now_s: float) -> float | None:
        """Return until when a step that could run should wait for more drafts; None: run it now."""
        cost, running = self.pricing.cost, self.scheduler.running
        if cost is None or self.scheduler.num_waiting > len(running):
            return None
        return joining_until_s(now_s, running, self.scheduler.waiting, self.drafting.due, cost)

    def _move_states(self) -> None:
        """Move the hidden states of accepted tree paths; drafters get them before the next batch moves the KV."""
        moves = self.scheduler.moves
        if self._runner.states is not None:
            self._runner.states.move_slots([source for source, _ in moves], [target for _, target in moves])

    def _forget(self, request: Request) -> None:
        for fork in self._beams.drop(request.request_id):
            self._forget(fork)
        self.handovers.release(request)
        del self._requests[request.request_id]
        self._extras.forget(request.request_id)
        self.mask_rows.forget(request.request_id)
        self.drafting.close(request)  # before its slots are free: drafters may be told states
        self.scheduler.remove(request.request_id)
        self.pricing.forget(request.request_id)
        if not self._requests:
            self._verified_s = None
