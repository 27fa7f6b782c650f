"""A step loop that launches the next step before it reads one: what asynchronous scheduling is elsewhere.

    in turn      | launch 1 | runs 1 | read 1, commit | launch 2 | runs 2 | …
    pipelined    | launch 1 | launch 2 | read 1, commit, launch 3 | read 2, …
                            | runs 1         | runs 2         | …

Where nobody drafts, all of a step is known beforehand but which token each request gets. So that is committed as one
that stands open, and the next step finds it on the device. Where anything else depends on a step, the next one waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.engine.launched_step import LaunchedStep
from outrider.verifier_service.messages.batch import open_token
from outrider.verifier_service.messages.request import FinishReason, Request, RequestOutput
from outrider.verifier_service.pricing.offer import PricedStep
from outrider.verifier_service.scheduling.outcome import Outcome
from outrider.verifier_service.scheduling.schedule import ScheduledRequest


class PipelinedEngine(VerifierEngine):
    """An engine over a runner that runs apart, as on an accelerator."""

    def __init__(self, *parts: Any, **options: Any) -> None:
        """Take what `VerifierEngine` takes."""
        super().__init__(*parts, runs_apart=True, **options)
        self.launches_early = True  # off: in turn, to compare
        self._next: LaunchedStep | None = None  # the step after the one that was read last, where it is on its way
        self._corrected: set[str] = set()  # requests whose last token was another than the device had chosen first

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[RequestOutput] | None:
        """Run one step to its end, as `VerifierEngine.step` does; the next one is on its way then, if it can be."""
        step, self._next = self._next or self._launch(), None
        if step is None:
            return None
        self._next = self._launch_after(step) if self.launches_early else None
        meanwhile()
        if step.foreseen is None:  # else pricing has the step already, but not how long it takes
            self.pricing.learn()
        return self._finish(step)

    def _launch_after(self, step: LaunchedStep) -> LaunchedStep | None:
        """Launch the step after one that runs; None: it depends on more than that one's tokens, or there is none.

        Where nobody drafts, all but which token each request gets is known. So one is committed that stands open, and
        the next step finds it on the device. Who turns out to stop with it is in that step for nothing.
        """
        items = [item for item in step.schedule.items if step.counts_for(item, self._requests)]
        if not self._is_foreseeable(step, items):
            return None
        places = step.places()
        outcomes = [self._foresee(item, places.get(item.request.request_id)) for item in items]
        step.foreseen = PricedStep(outcomes, (), step.shape_of(outcomes))
        self.pricing.end_step(step.foreseen)
        going_on = (outcome.item.request for outcome in outcomes if outcome.committed and not outcome.finish_reason)
        step.wanted = self.drafting.choose(going_on, self._clock())
        if step.wanted:
            return None
        return self._launch(after=step)

    def _is_foreseeable(self, step: LaunchedStep, items: Sequence[ScheduledRequest]) -> bool:
        """Return whether nothing but the tokens of a step is unknown, and nobody but the next step must know them.

        `items` are those that count.
        """
        return (
            bool(items)
            and self.pricing.knows(len(items))
            and all(request.hold_until_s is None for request in self.scheduler.running)
            and all(item.draft is None and not self._extras.are_due(item.request) for item in items)
            and all(item.request.plan.is_off or not item.request.prediction_token_ids for item in items)
            and self._corrected.isdisjoint(item.request.request_id for item in items)  # they would be void every time
        )

    def _foresee(self, item: ScheduledRequest, place: int | None) -> Outcome:
        """Commit the token that a request will get, as one that stands open; who has no room for more is done."""
        request = item.request
        is_last = place is not None and self._limits.room(request, request.num_tokens) == 1
        outcome = Outcome(
            item=item,
            first_row=0,
            committed=[] if place is None else [open_token(place)],
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
        if self._next is None:  # of a step that was followed early nobody wants more than its tokens
            super()._examine(step, outcomes)
        else:
            self._next.void |= corrected

    def _price(self, step: LaunchedStep, outcomes: Sequence[Outcome], step_s: float) -> None:
        if step.foreseen is None:
            super()._price(step, outcomes, step_s)
        else:
            step.foreseen.step_s, step.foreseen.exposed_s = step_s, step.exposed_s

    def _commit(self, step: LaunchedStep, outcomes: Sequence[Outcome]) -> None:
        if step.foreseen is None:
            super()._commit(step, outcomes)
            return
        for outcome in outcomes:
            if outcome.committed:
                outcome.item.request.token_ids[-1] = outcome.committed[0]

    def _ask(self, step: LaunchedStep, outcomes: Sequence[Outcome]) -> None:
        if step.foreseen is None:
            super()._ask(step, outcomes)
        else:
            self.drafting.send((one for one in step.wanted if self._is_here(one.request)), self._ended_s)

    def _forget(self, request: Request) -> None:
        super()._forget(request)
        self._corrected.discard(request.request_id)
        if not self._requests:  # of a step that is on its way nobody needs to know how it ends
            self._next = None
