"""A step loop that launches the next step before it reads this one's tokens: asynchronous scheduling.

    in turn      | launch 1 | step 1 runs | read 1, commit | launch 2 | step 2 runs | …
    pipelined    | launch 1 | launch 2    | read 1, commit, launch 3  | read 2, …
                            | step 1 runs | step 2 runs               | …

Without drafts, only the sampled tokens of a step are unknown. So a placeholder is committed for each, and the device
fills it in when the next step runs. If the next step depends on anything else, it is launched after this one is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.engine.launched_step import LaunchedStep
from outrider.verifier_service.messages.batch import placeholder_token
from outrider.verifier_service.messages.request import FinishReason, Request, RequestOutput
from outrider.verifier_service.pricing.offer import PricedStep
from outrider.verifier_service.scheduling.outcome import Outcome
from outrider.verifier_service.scheduling.schedule import ScheduledRequest


class PipelinedEngine(VerifierEngine):
    """An engine over an asynchronous runner, as on an accelerator."""

    def __init__(self, *parts: Any, **options: Any) -> None:
        """Take the arguments of `VerifierEngine`."""
        super().__init__(*parts, runs_async=True, **options)
        self.launches_early = True  # False: steps run in turn, to compare
        self._next: LaunchedStep | None = None  # in flight after the step that was read last
        self._corrected: set[str] = set()  # requests whose last token differs from the one that the device chose first

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[RequestOutput] | None:
        """Run one step to its end, as `VerifierEngine.step`; leave the next one in flight if it can be pipelined."""
        step, self._next = self._next or self._launch(), None
        if step is None:
            return None
        self._next = self._launch_after(step) if self.launches_early else None
        meanwhile()
        if not step.is_pipelined:  # else pricing already has the step, without its time
            self.pricing.learn()
        return self._finish(step)

    def drain(self) -> list[RequestOutput]:
        step, self._next = self._next, None
        outputs: list[RequestOutput] = []
        if step is not None:
            self.pricing.learn()
            outputs = self._finish(step)
        return outputs + super().drain()

    def _launch_after(self, step: LaunchedStep) -> LaunchedStep | None:
        """Launch the step after one in flight; return None if it depends on more than that one's tokens.

        A request that finishes with its token wastes one slot of the next step.
        """
        items = [item for item in step.schedule.items if step.counts_for(item, self._requests)]
        if not self._can_pipeline(step, items):
            return None
        places = step.places()
        outcomes = [self._commit_placeholder(item, places.get(item.request.request_id)) for item in items]
        step.early_price = PricedStep(outcomes, (), step.shape_of(outcomes))
        self.pricing.end_step(step.early_price)
        going_on = (outcome.item.request for outcome in outcomes if outcome.committed and not outcome.finish_reason)
        step.wanted = self.drafting.choose(going_on, self._clock())
        if step.wanted:
            return None
        return self._launch(after=step)

    def _can_pipeline(self, step: LaunchedStep, items: Sequence[ScheduledRequest]) -> bool:
        """Return whether the next step can be planned before this step's tokens are read.

        `items` are those whose requests are still here.
        """
        return (
            bool(items)
            and self.pricing.can_learn_later(len(items))
            and all(request.hold_until_s is None for request in self.scheduler.running)
            and all(item.draft is None and not self._needs_logits(item.request) for item in items)
            and not any(item.samples and item.request.hands_over for item in items)  # they stand still after this step
            and all(item.masks is None for item in items)
            and all(item.request.plan.is_off or not item.request.prediction_token_ids for item in items)
            and self._corrected.isdisjoint(item.request.request_id for item in items)  # they would be void every time
        )

    def _needs_logits(self, request: Request) -> bool:
        """Return whether a step's logits are still needed when its tokens are read."""
        return self._num_top(request) > 0 or self._extras.needs_logits(request)

    def _commit_placeholder(self, item: ScheduledRequest, place: int | None) -> Outcome:
        """Commit a placeholder for a request's token; stop scheduling the request if it has reached its limit.

        `place`: the token's index among `verification.chosen`; None after a prefill chunk, which samples nothing.
        """
        request = item.request
        is_last = place is not None and self._limits.room(request, request.num_tokens) == 1
        outcome = Outcome(
            item=item,
            first_row=0,
            committed=[] if place is None else [placeholder_token(place)],
            path=(),
            follows_leaf=False,
            finish_reason=FinishReason.LENGTH if is_last else None,
        )
        self._advance(outcome)
        if is_last:
            self.scheduler.remove(request.request_id)
        return outcome

    def _examine(self, step: LaunchedStep, outcomes: Sequence[Outcome]) -> None:
        corrected = step.corrected()
        if corrected or self._corrected:
            self._corrected -= {outcome.item.request.request_id for outcome in outcomes if outcome.committed}
            self._corrected |= corrected
        if self._next is None:  # `_can_pipeline`: if a step is in flight, this one's logits are not needed
            super()._examine(step, outcomes)
        else:
            self._next.void |= corrected

    def _price(self, step: LaunchedStep, outcomes: Sequence[Outcome], step_s: float) -> None:
        if step.early_price is None:
            super()._price(step, outcomes, step_s)
        else:
            step.early_price.step_s, step.early_price.exposed_s = step_s, step.exposed_s

    def _commit(self, step: LaunchedStep, outcomes: Sequence[Outcome]) -> None:
        if not step.is_pipelined:
            super()._commit(step, outcomes)
            return
        for outcome in outcomes:
            if outcome.committed:
                outcome.item.request.token_ids[-1] = outcome.committed[0]

    def _ask(self, step: LaunchedStep, outcomes: Sequence[Outcome]) -> None:
        if step.is_pipelined:
            self.drafting.send((wanted for wanted in step.wanted if self._is_here(wanted.request)), self._ended_s)
        else:
            super()._ask(step, outcomes)

    def _forget(self, request: Request) -> None:
        super()._forget(request)
        self._corrected.discard(request.request_id)
        if not self._requests:  # drop the step in flight: no request is left to receive its tokens
            self._next = None
