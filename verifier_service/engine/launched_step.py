"""A step on its way: what was sent to the runner, and what must be known of it when its outcome is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from outrider.verifier_service.drafting.drafter_record import WantedDraft
from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.pricing.cost_model import StepShape
from outrider.verifier_service.pricing.offer import PricedStep
from outrider.verifier_service.sampling.verification import Verification
from outrider.verifier_service.scheduling.outcome import Outcome
from outrider.verifier_service.scheduling.schedule import Schedule, ScheduledRequest


@dataclass(slots=True, kw_only=True)
class LaunchedStep:
    """One step between its launch and its end.

    It is *foreseen* when the next one is planned before it is read: every request then has its next token already,
    which stands open.
    """

    schedule: Schedule
    first_rows: Sequence[int]  # where each item's rows begin in the logits
    logits: torch.Tensor
    verification: Verification
    began_s: float
    waited_since_s: float  # when it could have begun, but for drafts
    exposed_s: float  # how long it was held up since
    void: set[str] = field(default_factory=set)  # requests whose open tokens were not what it was given
    foreseen: PricedStep | None = None  # what pricing was told of it then; None: it is not foreseen
    wanted: Sequence[WantedDraft] = ()  # what is to be asked for after it, known when it is foreseen

    def num_open(self, item: ScheduledRequest) -> int:
        """Return how many tokens stand open that an item's request was given for those of this step."""
        return int(self.foreseen is not None and item.samples)

    def shape_of(self, outcomes: Sequence[Outcome]) -> StepShape:
        """Return the step's shape as pricing sees it: rows that count for nobody are left out."""
        num_tokens = sum(outcome.item.num_new_tokens for outcome in outcomes)
        return StepShape(num_tokens, sum(self.schedule.batch.context_lengths))

    def counts_for(self, item: ScheduledRequest, requests: Mapping[str, Request]) -> bool:
        """Return whether an item's outcome is its request's: not if that is gone, or began with another token."""
        request = item.request
        return requests.get(request.request_id) is request and request.request_id not in self.void

    @property
    def _sampled_ids(self) -> list[str]:
        return [item.request.request_id for item in self.schedule.items if item.samples]

    def places(self) -> dict[str, int]:
        """Return where among the numbers that the step chooses each request's token is, of those that get one."""
        chosen = self.verification.chosen
        return {} if chosen is None else dict(zip(self._sampled_ids, chosen.places, strict=True))

    def corrected(self) -> set[str]:
        """Return the requests whose tokens turned out to be others than the device had chosen first."""
        if not self.verification.corrected:
            return set()
        sampled_ids = self._sampled_ids
        return {sampled_ids[index] for index in self.verification.corrected} - self.void
