"""A step in flight: what was sent to the runner, and what `_finish` needs to read its outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from outrider.verifier_service.drafting.drafter_record import WantedDraft
from outrider.verifier_service.messages.batch import placeholder_token
from outrider.verifier_service.messages.draft import Draft
from outrider.verifier_service.messages.request import FinishReason, Request
from outrider.verifier_service.messages.tree import VerifiedTokens
from outrider.verifier_service.pricing.cost_model import StepShape
from outrider.verifier_service.pricing.offer import PricedStep
from outrider.verifier_service.sampling.entries import VerificationEntry
from outrider.verifier_service.sampling.logits_processors import LogitEdits
from outrider.verifier_service.sampling.unread import UnreadTokens
from outrider.verifier_service.sampling.verification import Verification
from outrider.verifier_service.scheduling.outcome import Outcome, is_leaf
from outrider.verifier_service.scheduling.schedule import Schedule, ScheduledRequest, first_nodes

UntilFinished = Callable[[Request, Sequence[int], int], tuple[list[int], FinishReason | None]]
_NO_TOKENS = VerifiedTokens([], ())


@dataclass(slots=True, kw_only=True)
class LaunchedStep:
    """One step between its launch and its end.

    A step has placeholders if some were committed in place of its tokens before these are read. The next step is
    launched then, unless a draft is to be asked for.
    """

    schedule: Schedule
    first_rows: Sequence[int]  # where each item's rows begin in the logits
    logits: torch.Tensor
    entries: Sequence[VerificationEntry]  # of the items that sample
    verification: Verification
    began_s: float
    waited_since_s: float  # when the step could have begun without waiting for drafts
    exposed_s: float  # from `waited_since_s` to the launch, or until the drafts were read that it verifies unread
    unread: UnreadTokens | None = None  # what the placeholders of its drafts stand for, until they are read
    void: set[str] = field(default_factory=set)  # requests whose placeholder was filled wrongly: their rows are ignored
    early_price: PricedStep | None = None  # given to pricing before the step was read; None: no placeholders
    wanted: Sequence[WantedDraft] = ()  # drafts to ask for after a step with placeholders

    @property
    def has_placeholders(self) -> bool:
        return self.early_price is not None

    def outcomes(
        self, verified: Sequence[VerifiedTokens], requests: Mapping[str, Request], until_finished: UntilFinished
    ) -> list[Outcome]:
        """Return the step's outcome for each request that is still among `requests`.

        `verified` has the tokens of each sampling item, in order. `until_finished` cuts a request's tokens after the
        first that ends it, given the number of tokens that it had before.
        """
        tokens_of, has_placeholders, void = iter(verified), self.has_placeholders, self.void
        outcomes: list[Outcome] = []
        for item, row in zip(self.schedule.items, self.first_rows, strict=True):
            request, draft = item.request, item.draft
            tokens = next(tokens_of) if item.samples else _NO_TOKENS
            if requests.get(request.request_id) is not request or request.request_id in void:
                continue
            committed, path, finish_reason = tokens.token_ids, tokens.path, None
            num_tokens = len(request.token_ids) - (has_placeholders and item.samples)
            if num_tokens + len(committed) >= request.limit or not request.stop_ids.isdisjoint(committed):
                committed, finish_reason = until_finished(request, committed, num_tokens)
            follows_leaf = draft is not None and is_leaf(draft, path)
            if finish_reason is not None:
                path = path[: len(committed)]
            outcomes.append(Outcome(item, row + item.num_prompt_rows, committed, path, follows_leaf, finish_reason))
        return outcomes

    def take_drafts(self) -> list[tuple[Request, Draft]]:
        """Put the drafts that were read, cut as their placeholders were, in the place of these; return all of them.

        The rows of a request without one are ignored.
        """
        taken: list[tuple[Request, Draft]] = []
        sampling = [item for item in self.schedule.items if item.samples]
        for item, entry in zip(sampling, self.entries, strict=True):
            if item.draft is None:
                continue
            draft, length = item.request.draft, len(item.draft.token_ids)
            if draft is None or draft.is_unread:
                self.void.add(item.request.request_id)
                draft = replace(item.draft, token_ids=(0,) * length)
            else:
                taken.append((item.request, draft))
                draft = first_nodes(draft, max_nodes=length, max_depth=length)
            item.draft = entry.draft = draft
        self.unread = None
        return taken

    def shape_of(self, outcomes: Sequence[Outcome]) -> StepShape:
        """Return the shape for pricing: without the tokens of void or finished requests, with the context of all."""
        num_tokens = sum([outcome.item.num_new_tokens for outcome in outcomes])
        return StepShape(num_tokens, sum(self.schedule.batch.context_lengths))

    def counting(self, requests: Mapping[str, Request]) -> list[ScheduledRequest]:
        """Return the items whose outcome is valid: their request is still among `requests` and is not void."""
        void = self.void
        here = [item for item in self.schedule.items if requests.get(item.request.request_id) is item.request]
        return [item for item in here if item.request.request_id not in void] if void else here

    def placeholders(self, requests: Mapping[str, Request]) -> list[Outcome]:
        """Return outcomes with a placeholder for each token that is not read yet, of requests still in `requests`."""
        chosen = self.verification.chosen
        places = iter(() if chosen is None else chosen.places)
        outcomes: list[Outcome] = []
        for item in self.schedule.items:
            request = item.request
            committed = [placeholder_token(next(places))] if item.samples else []
            if requests.get(request.request_id) is request and request.request_id not in self.void:
                is_last = item.samples and len(request.token_ids) + 1 == request.limit
                outcomes.append(Outcome(item, 0, committed, (), False, FinishReason.LENGTH if is_last else None))
        return outcomes

    @property
    def _sampled_ids(self) -> list[str]:
        return [item.request.request_id for item in self.schedule.items if item.samples]

    def edits(self) -> dict[str, LogitEdits]:
        """Return the changes that verification makes to the sampled rows, by request id, where there are any."""
        by_id = zip(self._sampled_ids, self.entries, strict=True)
        return {request_id: entry.edits for request_id, entry in by_id if entry.edits is not None}

    def corrected(self) -> set[str]:
        """Return the requests whose token differs from the one that the device chose first."""
        if not self.verification.corrected:
            return set()
        sampled_ids = self._sampled_ids
        return {sampled_ids[index] for index in self.verification.corrected} - self.void
