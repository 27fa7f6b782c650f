"""A step's outcome per request, in integers: committed tokens, accepted path, logits rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.verifier_service.messages.draft import ROOT, Draft
from outrider.verifier_service.messages.request import FinishReason, Request
from outrider.verifier_service.messages.tree import depths
from outrider.verifier_service.scheduling.schedule import ScheduledRequest


@dataclass(slots=True)  # not frozen: one per request and step, and frozen takes 2.4 times as long
class Outcome:
    """One request's outcome: its tokens up to the first that ends it, none after a prefill chunk."""

    item: ScheduledRequest
    first_row: int  # the logits row of the draft's root
    committed: list[int]
    path: tuple[int, ...]  # accepted draft tokens, without those cut off by a stop token
    follows_leaf: bool  # the last token is a bonus token: no draft token followed the accepted ones
    finish_reason: FinishReason | None

    @classmethod
    def counted(
        cls,
        request: Request,
        draft: Draft | None,
        *,
        num_new_tokens: int,
        num_committed: int,
        num_accepted: int,
    ) -> Outcome:
        """Return a chain's outcome for pricing, which reads counts only; token ids are 0."""
        path = tuple(range(num_accepted))
        return cls(
            item=ScheduledRequest(
                request=request, num_new_tokens=num_new_tokens, draft=draft, samples=num_committed > 0
            ),
            first_row=0,
            committed=[0] * num_committed,
            path=path,
            follows_leaf=is_leaf(draft, path),
            finish_reason=None,
        )

    @property
    def rows(self) -> list[int]:
        """The logits rows that the committed tokens were sampled from."""
        return [self.first_row, *(self.first_row + 1 + node for node in self.path)][: len(self.committed)]

    @property
    def num_judged(self) -> int:
        """Draft positions that were judged: the accepted ones, and the one where all draft tokens were rejected."""
        was_rejected = not self.follows_leaf and len(self.committed) > len(self.path)
        return len(self.path) + (self.item.draft is not None and was_rejected)


def is_leaf(draft: Draft | None, path: Sequence[int]) -> bool:
    """Return whether the accepted path ends at a leaf, so that a bonus token follows."""
    if draft is None:
        return False
    if draft.parents is None:
        return len(path) == len(draft.token_ids)
    return (path[-1] if path else ROOT) not in draft.parents


def num_draft_tokens(item: ScheduledRequest) -> int:
    """Return how many draft tokens the step verifies for a request."""
    return len(item.draft.token_ids) if item.draft is not None else 0


def num_choice_rows(item: ScheduledRequest) -> int:
    """Return how many logits rows are sampled for a request."""
    return 1 + num_draft_tokens(item) if item.samples else 0


def num_mask_rows(item: ScheduledRequest) -> int:
    """Return how many logits rows a request's masks have."""
    return 0 if item.masks is None else item.masks.num_tokens


def row_starts(items: Sequence[ScheduledRequest]) -> list[int]:
    """Return where each item's rows begin in the step's logits: those of its prompt, the sampled ones, the masks'."""
    starts, start = [], 0
    for item in items:
        starts.append(start)
        is_plain = item.draft is None and item.masks is None and item.samples
        start += item.num_prompt_rows + (1 if is_plain else num_choice_rows(item) + num_mask_rows(item))
    return starts


def drafts_of(outcomes: Sequence[Outcome]) -> list[tuple[str, int, int]]:
    """Return each draft's request, and how many of its tokens were verified and accepted."""
    return [
        (outcome.item.request.request_id, len(outcome.item.draft.token_ids), len(outcome.path))
        for outcome in outcomes
        if outcome.item.draft is not None
    ]


def going_on(outcomes: Sequence[Outcome]) -> list[Request]:
    """Return the requests that have another token, have not ended with it, and do not stand still."""
    return [
        outcome.item.request
        for outcome in outcomes
        if outcome.committed and outcome.finish_reason is None and outcome.item.request.stands_until_s is None
    ]


def count_drafts(outcomes: Sequence[Outcome]) -> None:
    """Add a step's verifications to their requests' counters."""
    for outcome in outcomes:
        item = outcome.item
        metrics, draft, num_accepted = item.request.metrics, item.draft, len(outcome.path)
        if draft is None:
            metrics.num_empty_rounds += item.samples and metrics.enabled and metrics.disabled_reason is None
            continue
        metrics.num_drafts += 1
        metrics.num_draft_tokens += len(draft.token_ids)
        metrics.num_accepted_tokens += num_accepted
        depth = len(draft.token_ids) if draft.parents is None else 1 + max(depths(draft.parents))
        per_position = metrics.num_accepted_per_position
        if depth > len(per_position):
            per_position.extend([0] * (depth - len(per_position)))
        for position in range(num_accepted):
            per_position[position] += 1
