"""A step loop that launches the next step before it reads this one's tokens: asynchronous scheduling.

    in turn      | launch 1 | step 1 runs | read 1, commit | launch 2 | step 2 runs | …
    pipelined    | launch 1 | launch 2    | read 1, commit, launch 3  | read 2, …
                            | step 1 runs | step 2 runs               | …

Without drafts, only the sampled tokens of a step are unknown. So a placeholder is committed for each, and the device
fills it in when the next step runs. If the next step depends on anything else, it is launched after this one is read.

With drafts of a drafter on the same device, the next step depends on the number of tokens that were accepted, and not
on the drafted tokens: their number is known when they are asked for. So it is launched right after the drafter, with
placeholders for drafts, and nobody waits between the two. The drafts are read while they are verified.

    in turn      | read 1, commit, ask | draft 2 | read drafts, launch 2 | verify 2 | read 2, …
    unread       | read 1, commit, ask, launch 2 | read drafts                      | read 2, …
                                       | draft 2 | verify 2                         |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.engine.launched_step import LaunchedStep
from outrider.verifier_service.engine.unread import DraftsHere, attach
from outrider.verifier_service.messages.request import Request, RequestOutput
from outrider.verifier_service.pricing.offer import PricedStep
from outrider.verifier_service.sampling.unread import UnreadTokens
from outrider.verifier_service.scheduling.outcome import Outcome, going_on


class PipelinedEngine(VerifierEngine):
    """An engine over an asynchronous runner, as on an accelerator."""

    def __init__(self, *parts: Any, **options: Any) -> None:
        """Take the arguments of `VerifierEngine`."""
        super().__init__(*parts, runs_async=True, **options)
        self.launches_early = True  # False: steps run in turn, to compare
        self._next: LaunchedStep | None = None  # in flight after the step that was read last
        self.drafts_here: DraftsHere | None = None  # whose drafts may be verified unread
        self._undrafted: list[Request] = []  # with placeholders for drafts
        self._corrected: set[str] = set()  # requests whose last token differs from the one that the device chose first

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[RequestOutput] | None:
        """Run one step to its end, as `VerifierEngine.step`; leave the next one in flight if it can be pipelined."""
        step, self._next = self._next or self._launch(), None
        if step is None:
            return None
        self._next = self._launch_after(step) if self.launches_early else None
        meanwhile()
        if step.unread is not None:
            self._read_drafts(step)
        if not step.has_placeholders:  # else pricing already has the step, without its time
            self.pricing.learn()
        return self._finish(step)

    def drain(self) -> list[RequestOutput]:
        step, self._next = self._next, None
        outputs: list[RequestOutput] = []
        if step is not None:
            self.pricing.learn()
            outputs = self._finish(step)
        return outputs + super().drain()

    def _receive(self, now_s: float) -> UnreadTokens | None:
        self._drop_placeholders()
        unread = None
        if self.drafts_here and self.launches_early and not self.is_paused and not self.pricing.awaits_claims:
            unread = self.drafts_here.unread()
        if unread is not None and not self._extras.are_edited(unread.request_ids):
            self._undrafted = attach(unread, self.scheduler.running, self.drafting.round_of)
        if unread is not None and self._undrafted:
            return unread.chains.tokens
        return super()._receive(now_s)

    def _read_drafts(self, step: LaunchedStep) -> None:
        """Read the drafts that a step verifies already. What they claim comes too late to cut them, and is learnt."""
        self.drafting.receive(self._requests, self._clock())
        step.exposed_s = self._clock() - step.waited_since_s
        self.pricing.admit_all(step.take_drafts())
        self._drop_placeholders()
        lost = [self._requests[request_id] for request_id in step.void & self._requests.keys()]
        counts = {"num_new_tokens": 0, "num_committed": 0, "num_accepted": 0}
        self.scheduler.commit([Outcome.counted(request, None, **counts) for request in lost])  # their KV is given back

    def _drop_placeholders(self) -> None:
        for request in self._undrafted:
            if request.draft is not None and request.draft.is_unread:
                request.draft = None
        self._undrafted = []

    def _launch_after(self, step: LaunchedStep) -> LaunchedStep | None:
        """Launch the step after one in flight; return None if it depends on more than that one's tokens.

        A request that finishes with its token wastes one slot of the next step.
        """
        if step.unread is not None or not self._can_pipeline(step):
            return None
        outcomes = step.placeholders(self._requests)
        self._advance(outcomes)
        for outcome in outcomes:
            if outcome.finish_reason is not None:
                self.scheduler.remove(outcome.item.request.request_id)
        step.early_price = PricedStep(outcomes, (), step.shape_of(outcomes))
        self.pricing.end_step(step.early_price)
        step.wanted = self.drafting.choose(going_on(outcomes), self._clock())
        if step.wanted:
            return None
        return self._launch(after=step)

    def _can_pipeline(self, step: LaunchedStep) -> bool:
        """Return whether the next step can be planned before this step's tokens are read."""
        items = step.counting(self._requests)
        requests = [item.request for item in items]
        return (
            bool(items)
            and self.pricing.can_learn_later(len(items))
            and not any(item.draft is not None or item.masks is not None for item in items)
            and not any(request.hold_until_s is not None for request in self.scheduler.running)
            and not any(item.request.hands_over and item.samples for item in items)  # they stand still after this step
            and not any(request.prediction_token_ids and not request.plan.is_off for request in requests)
            and not self._extras.needs_logits(requests)
            and not (self.drafting.reads_logits and any(self._num_top(request) > 0 for request in requests))
            # they would be void every time
            and (not self._corrected or self._corrected.isdisjoint(request.request_id for request in requests))
        )

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
        if not step.has_placeholders:
            super()._commit(step, outcomes)
            return
        for outcome in outcomes:
            if outcome.committed:
                outcome.item.request.token_ids[-1] = outcome.committed[0]

    def _ask(self, step: LaunchedStep, outcomes: Sequence[Outcome]) -> None:
        if step.has_placeholders:
            requests = self._requests
            here = [one for one in step.wanted if requests.get(one.request.request_id) is one.request]
            self.drafting.send(here, self._ended_s)
        else:
            super()._ask(step, outcomes)

    def _forget(self, request: Request) -> None:
        super()._forget(request)
        self._corrected.discard(request.request_id)
        if not self._requests:  # drop the step in flight: no request is left to receive its tokens
            self._next = None
