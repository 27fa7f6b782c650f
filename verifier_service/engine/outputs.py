"""Build a step's outputs: tokens, logprobs, counters, and the times of traced requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from outrider.verifier_service.drafting.coordinator import DraftCoordinator
from outrider.verifier_service.engine.launched_step import LaunchedStep
from outrider.verifier_service.engine.request_extras import RequestExtras
from outrider.verifier_service.engine.step_rows import output_logprobs
from outrider.verifier_service.messages.request import FinishReason, Request, RequestOutput, StepTiming
from outrider.verifier_service.scheduling.outcome import Outcome
from outrider.verifier_service.scheduling.schedule import ScheduledRequest

START_VERSION = "default"  # of the weights that an engine starts with, as SGLang calls them


class OutputBuilder:
    """Makes one `RequestOutput` for each request that got tokens."""

    def __init__(
        self,
        extras: RequestExtras,
        drafting: DraftCoordinator,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],  # Unix time, seconds
    ) -> None:
        self._extras, self._drafting = extras, drafting
        self._clock, self._wall_clock = clock, wall_clock
        self.weight_version = START_VERSION

    def build(self, step: LaunchedStep, outcomes: Sequence[Outcome]) -> list[RequestOutput]:
        """Return the outputs of a verified step; call it before a finished request is forgotten."""
        outputs: list[RequestOutput] = []
        extras, version = self._extras, self.weight_version
        for outcome, logprobs in zip(outcomes, output_logprobs(outcomes, step), strict=True):
            if not outcome.committed:
                continue
            item, request = outcome.item, outcome.item.request
            output = RequestOutput(
                request_id=request.request_id,
                token_ids=tuple(outcome.committed),
                num_draft_tokens=0 if item.draft is None else len(item.draft.token_ids),
                num_accepted_tokens=len(outcome.path),
                follows_leaf=outcome.follows_leaf,
                logprobs=logprobs,
                num_cached_tokens=request.num_cached_tokens,
                finish_reason=outcome.finish_reason,
                speculation=request.metrics,
                weight_version=version,
            )
            if request.sampling.prompt_logprobs is not None:
                output.prompt_logprobs = extras.take_prompt_logprobs(request)
            if outcome.finish_reason is FinishReason.ERROR:
                output.error = extras.error(request)
            if request.trace_parent is not None:
                output.timing = self._timing(step, item)
            outputs.append(output)
        return outputs

    def ended(self, request: Request, reason: FinishReason | None, error: str | None = None) -> RequestOutput:
        """Return the output of a request that ends, or pauses, without another token."""
        return RequestOutput(
            request_id=request.request_id,
            token_ids=(),
            num_cached_tokens=request.num_cached_tokens,
            finish_reason=reason,
            error=error,
            speculation=request.metrics,
            weight_version=self.weight_version,
        )

    def _timing(self, step: LaunchedStep, item: ScheduledRequest) -> StepTiming:
        """Return when the step and the draft's round of a traced request ran, in Unix time."""
        now_s = self._clock()
        unix_s = self._wall_clock() - now_s
        timing = StepTiming(
            began_s=unix_s + step.began_s,
            ended_s=unix_s + now_s,
            num_scheduled_tokens=step.schedule.batch.num_tokens,
        )
        answered = self._drafting.answered_round(item.request) if item.draft is not None else None
        if answered is None:
            return timing
        return replace(
            timing,
            drafter_id=answered.drafter_id,
            draft_asked_s=unix_s + answered.asked_s,
            draft_received_s=unix_s + answered.received_s,
        )
