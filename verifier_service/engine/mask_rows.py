"""What the masks of a step have guessed, kept until the next draft is made of it.

The masks: `verifier_service/scheduling/masks.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.verifier_service.gpu.transfers import upload_rows
from outrider.verifier_service.scheduling.outcome import Outcome, num_choice_rows


class MaskRows:
    """The logits of one block of masks for each request: the block of what was accepted."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[int, torch.Tensor]] = {}  # tokens that the request then has, [length, vocab_size]

    @property
    def request_ids(self) -> set[str]:
        """The requests with rows."""
        return {*self._kept}

    def note(self, outcomes: Sequence[Outcome], logits: torch.Tensor) -> None:
        """Keep the rows of each outcome that goes on, float32 [num_rows, vocab_size]; call it before the commit."""
        found: list[tuple[Outcome, range]] = []
        for outcome in outcomes:
            masks = outcome.item.masks
            self.forget(outcome.item.request.request_id)
            own = None if masks is None else masks.rows_of(len(outcome.path))
            if own is not None and outcome.finish_reason is None:
                found.append((outcome, own))
        if not found:
            return
        rows = [outcome.first_row + num_choice_rows(outcome.item) + row for outcome, own in found for row in own]
        parts = logits.index_select(0, upload_rows(rows, logits.device)).split([len(own) for _, own in found])
        for (outcome, _), part in zip(found, parts, strict=True):
            request = outcome.item.request
            self._kept[request.request_id] = (request.num_tokens + len(outcome.committed), part)

    def after(self, request_id: str, num_tokens: int) -> torch.Tensor | None:
        """Return a block's logits, float32 [length, vocab_size], the first for the token at index `num_tokens`.

        None: there are none, or the request has another number of tokens.
        """
        at, rows = self._kept.get(request_id, (0, None))
        return rows if at == num_tokens else None

    def forget(self, request_id: str) -> None:
        self._kept.pop(request_id, None)
