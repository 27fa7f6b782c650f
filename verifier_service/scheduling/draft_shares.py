"""How much of a step goes to a request's draft, and to masks that guess its next one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from outrider.verifier_service.messages.draft import LOCAL_DRAFTER_ID, Draft
from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.scheduling.masks import MaskPlanner, PlacedMasks
from outrider.verifier_service.scheduling.schedule import first_nodes


class Admission(Protocol):
    """Decides how much of drafts is verified."""

    def admit_all(self, drafts: Sequence[tuple[Request, Draft]]) -> Sequence[Draft]:
        """Return the part of each draft to verify; its length must not depend on tokens drawn beyond it."""

    def drafts_on(self, request: Request) -> bool:
        """Return whether a draft is wanted after the request's next step, as far as is known."""


class DraftShares:
    """Cuts drafts to what fits and pays, and places masks behind them."""

    def __init__(self, max_model_len: int, admission: Admission | None) -> None:
        self._max_model_len, self._admission = max_model_len, admission
        self.paying: dict[str, Draft] = {}  # of the step that is planned: each draft's part that is worth verifying
        self.masks: MaskPlanner | None = None  # for drafts by masks, of every request that has drafts

    def max_total_tokens(self, request: Request) -> int:
        """Return how many tokens a request can come to, its prompt included."""
        return min(self._max_model_len, request.num_prompt_tokens + request.sampling.max_tokens)

    def begin_step(self, running: Iterable[Request]) -> None:
        """Decide of all drafts of the running requests at once how much of them is worth verifying."""
        self.paying = self._admitted(running)

    def _admitted(self, requests: Iterable[Request]) -> dict[str, Draft]:
        drafts = [(one, one.draft) for one in requests if one.draft is not None and one.draft.token_ids]
        if self._admission is None or not drafts:
            return {}
        paying = self._admission.admit_all(drafts)
        return {request.request_id: part for (request, _), part in zip(drafts, paying, strict=True)}

    def cut_draft(self, request: Request, num_fitting: int) -> Draft | None:
        """Return the part of a request's draft that this step verifies; count the tokens that are cut.

        The cut depends on counts and on what precedes it, never on tokens drawn at or after it: that would bias the
        committed tokens of a sampled draft (docs/exactness.md, "The trap"). So an id outside the vocabulary stays
        in and is verified with target probability 0.
        """
        draft = request.draft
        if draft is None or not draft.token_ids:
            return None
        assert draft.position == request.num_tokens, f"draft for {draft.position} at {request.num_tokens} tokens"
        # One place is left for the recovered or bonus token.
        max_depth = self.max_total_tokens(request) - request.num_tokens - 1
        if request.request_id not in self.paying:  # it was not running yet when the step began
            self.paying |= self._admitted([request])
        paying = self.paying.pop(request.request_id, draft)
        kept = first_nodes(paying, max_nodes=max(0, num_fitting), max_depth=max(0, max_depth))
        request.metrics.num_cut_tokens += len(draft.token_ids) - len(kept.token_ids)
        return kept if kept.token_ids else None

    def place_masks(self, request: Request, draft: Draft | None, num_fitting: int) -> PlacedMasks | None:
        """Return the masks of a request's step, if its next draft is wanted and is to be made by masks."""
        if self.masks is None or not self._drafts_by_masks(request):
            return None
        num_left = self.max_total_tokens(request) - request.num_tokens
        # after the accepted and the drawn token, a draft needs two places: its own and that of the bonus token
        max_count = min(num_left - 3, self._max_model_len - self.masks.blocks.length - request.num_tokens)
        num_drafted = len(draft.token_ids) if draft is not None else 0
        return self.masks.place(num_drafted, num_fitting=num_fitting, max_count=max_count)

    def _drafts_by_masks(self, request: Request) -> bool:
        plan = request.plan
        if plan.draft_length == 0 or plan.drafter_id not in (None, LOCAL_DRAFTER_ID):
            return False
        is_asked_for = self._admission is None or self._admission.drafts_on(request)
        return request.sampling.num_speculative_tokens != 0 and is_asked_for
