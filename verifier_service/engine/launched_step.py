"""A step in flight: what was sent to the runner, and what `_finish` needs to read its outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from outrider.verifier_service.drafting.drafter_record import WantedDraft
from outrider.verifier_service.messages.request import FinishReason, Request
from outrider.verifier_service.messages.tree import VerifiedTokens
from outrider.verifier_service.pricing.cost_model import StepShape
from outrider.verifier_service.pricing.offer import PricedStep
from outrider.verifier_service.sampling.entries import VerificationEntry
from outrider.verifier_service.sampling.logits_processors import LogitEdits
from outrider.verifier_service.sampling.verification import Verification
from outrider.verifier_service.scheduling.outcome import Outcome, is_leaf
from outrider.verifier_service.scheduling.schedule import Schedule, ScheduledRequest

UntilFinished = Callable[[Request, Sequence[int], int], tuple[list[int], FinishReason | None]]
_NO_TOKENS = VerifiedTokens([], ())


@dataclass(slots=True, kw_only=True)
class LaunchedStep:
    """One step between its launch and its end.

    A step is *pipelined* if placeholders for its tokens were committed before these are read. The next step is launched
    then, unless a draft is to be asked for.
    """

    schedule: Schedule
    first_rows: Sequence[int]  # where each item's rows begin in the logits
    logits: torch.Tensor
    entries: Sequence[VerificationEntry]  # of the items that sample
    verification: Verification
    began_s: float
    waited_since_s: float  # when the step could have begun without waiting for drafts
    exposed_s: float  # from `waited_since_s` to the launch
    void: set[str] = field(default_factory=set)  # requests whose placeholder was filled wrongly: their rows are ignored
    early_price: PricedStep | None = None  # given to pricing before the step was read; None: not pipelined
    wanted: Sequence[WantedDraft] = ()  # drafts to ask for after a pipelined step

    @property
    def is_pipelined(self) -> bool:
        return self.early_price is not None

    def outcomes(
        self, verified: Sequence[VerifiedTokens], requests: Mapping[str, Request], until_finished: UntilFinished
    ) -> list[Outcome]:
        """Return the step's outcome for each request that is still among `requests`.

        `verified` has the tokens of each sampling item, in order. `until_finished` cuts a request's tokens after the
        first that ends it, given the number of tokens that it had before.
        """
        tokens_of = iter(verified)
        outcomes: list[Outcome] = []
        for item, row in zip(self.schedule.items, self.first_rows, strict=True):
            tokens = next(tokens_of) if item.samples else _NO_TOKENS
            if not self.counts_for(item, requests):
                continue
            num_placeholders = int(self.is_pipelined and item.samples)
            num_tokens = item.request.num_tokens - num_placeholders
            committed, finish_reason = until_finished(item.request, tokens.token_ids, num_tokens)
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

    def shape_of(self, outcomes: Sequence[Outcome]) -> StepShape:
        """Return the step's shape for pricing, without the tokens of void or finished requests."""
        num_tokens = sum(outcome.item.num_new_tokens for outcome in outcomes)
        return StepShape(num_tokens, sum(self.schedule.batch.context_lengths))

    def counts_for(self, item: ScheduledRequest, requests: Mapping[str, Request]) -> bool:
        """Return whether an item's outcome is valid: its request is still here and is not void."""
        request = item.request
        return requests.get(request.request_id) is request and request.request_id not in self.void

    @property
    def _sampled_ids(self) -> list[str]:
        return [item.request.request_id for item in self.schedule.items if item.samples]

    def edits(self) -> dict[str, LogitEdits]:
        """Return the changes that verification makes to the sampled rows, by request id, where there are any."""
        by_id = zip(self._sampled_ids, self.entries, strict=True)
        return {request_id: entry.edits for request_id, entry in by_id if entry.edits is not None}

    def places(self) -> dict[str, int]:
        """Return, by request id, the index of its token among `verification.chosen`."""
        chosen = self.verification.chosen
        return {} if chosen is None else dict(zip(self._sampled_ids, chosen.places, strict=True))

    def corrected(self) -> set[str]:
        """Return the requests whose token differs from the one that the device chose first."""
        if not self.verification.corrected:
            return set()
        sampled_ids = self._sampled_ids
        return {sampled_ids[index] for index in self.verification.corrected} - self.void
