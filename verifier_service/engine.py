"""The verifier's step loop: receive, schedule, execute, verify, commit, ask, publish.

The engine alone decides tokens. It knows nothing of processes, sockets or Ray: drafters are a `DraftClient`, the
model is a `Runner`, time is a function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from outrider.verifier_service.batch import ScheduledBatch
from outrider.verifier_service.request import (
    FinishReason,
    GenerationRequest,
    Request,
    RequestOutput,
    SpeculationPlan,
)
from outrider.verifier_service.scheduler import Schedule, ScheduledRequest, Scheduler
from outrider.verifier_service.speculation import DraftCoordinator
from outrider.verifier_service.step_stats import StepStats
from outrider.verifier_service.verification import VerificationEntry, verify


class Runner(Protocol):
    """Executes a scheduled batch on every rank of the target model."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    eos_token_ids: tuple[int, ...]

    def execute(self, batch: ScheduledBatch) -> torch.Tensor:
        """Return float32 logits [len(batch.logits_indices), vocab_size]."""


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
    ) -> None:
        self.scheduler = scheduler
        self.drafting = drafting
        self.stats = StepStats()
        self._runner = runner
        self._clock = clock
        self._generator = generator
        self._requests: dict[str, Request] = {}

    def add(self, message: GenerationRequest) -> RequestOutput | None:
        """Queue a request; one that can never run is answered at once with its error."""
        try:
            self._check(message)
            request = Request.of(message, self._clock())
            self.scheduler.add(request)
        except ValueError as error:
            return _failure(message.request_id, str(error))
        self._requests[request.request_id] = request
        return None

    def _check(self, message: GenerationRequest) -> None:
        if message.request_id in self._requests:
            raise ValueError(f"request_id: {message.request_id!r} is already running")
        for name in ("prompt_token_ids", "output_token_ids"):
            if any(not 0 <= token_id < self._runner.vocab_size for token_id in getattr(message, name)):
                raise ValueError(f"{name}: ids must be in [0, {self._runner.vocab_size})")

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
        deadline_s = self.scheduler.next_deadline_s()
        return None if deadline_s is None else max(0.0, deadline_s - self._clock())

    def step(self) -> list[RequestOutput] | None:
        """Run one step; None when nothing could run (no request, or each waits for its draft)."""
        begin_s = self._clock()
        self.drafting.receive(self._requests, begin_s)
        schedule = self.scheduler.schedule(begin_s)
        if schedule is None:
            return None
        logits = self._runner.execute(schedule.batch)
        verified = self._verify(schedule, logits)
        outputs = [
            output
            for item in schedule.items
            if (output := self._commit(item, verified.get(item.request.request_id, []))) is not None
        ]
        end_s = self._clock()
        self.drafting.ask(self._running_after(schedule), end_s)
        self.stats.observe(
            schedule, num_committed=sum(len(output.token_ids) for output in outputs), seconds=end_s - begin_s
        )
        return outputs

    def _verify(self, schedule: Schedule, logits: torch.Tensor) -> dict[str, list[int]]:
        """Return the committed tokens of every request that reached its end in this step."""
        sampling = [item for item in schedule.items if item.samples]
        entries = [
            VerificationEntry(sampling=item.request.sampling, draft=item.draft, position=item.request.num_tokens)
            for item in sampling
        ]
        committed = verify(logits, entries, self._generator)
        return {item.request.request_id: tokens for item, tokens in zip(sampling, committed, strict=True)}

    def _commit(self, item: ScheduledRequest, verified: Sequence[int]) -> RequestOutput | None:
        """Append what was verified, up to the first token that ends the request."""
        request = item.request
        committed, finish_reason = self._until_finished(request, verified)
        if item.samples:
            # what a stop token cut off was not committed, so it does not count as accepted either
            _count_draft(item, num_accepted=len(committed) - 1)
        self.scheduler.commit(item, committed)
        if finish_reason is not None:
            self._forget(request)
        if not committed:
            return None
        return RequestOutput(
            request_id=request.request_id,
            token_ids=tuple(committed),
            num_cached_tokens=request.num_cached_tokens,
            finish_reason=finish_reason,
            speculation=request.metrics,
        )

    def _until_finished(self, request: Request, verified: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        sampling = request.sampling
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(self._runner.eos_token_ids))
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
        self.scheduler.remove(request.request_id)
        self.drafting.close(request)


def _count_draft(item: ScheduledRequest, *, num_accepted: int) -> None:
    metrics = item.request.metrics
    num_draft_tokens = len(item.draft.token_ids) if item.draft is not None else 0
    if num_draft_tokens == 0:
        metrics.num_empty_rounds += metrics.enabled and metrics.disabled_reason is None
        return
    metrics.num_drafts += 1
    metrics.num_draft_tokens += num_draft_tokens
    metrics.num_accepted_tokens += num_accepted
    per_position = metrics.num_accepted_per_position
    per_position.extend([0] * (num_draft_tokens - len(per_position)))
    for position in range(num_accepted):
        per_position[position] += 1


def _failure(request_id: str, error: str) -> RequestOutput:
    return RequestOutput(request_id=request_id, token_ids=(), finish_reason=FinishReason.ERROR, error=error)
