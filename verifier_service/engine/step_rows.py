"""Which rows of a step's logits are sampled, and what is read from them besides the verified tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import torch

from outrider.verifier_service.gpu.transfers import upload_rows
from outrider.verifier_service.messages.request import Request, TokenLogprobs
from outrider.verifier_service.sampling.logprobs import LogprobsQuery, token_logprobs
from outrider.verifier_service.scheduling.outcome import Outcome, num_choice_rows
from outrider.verifier_service.scheduling.schedule import ScheduledRequest


def sampling_rows(items: Sequence[ScheduledRequest], first_rows: Sequence[int]) -> list[int] | None:
    """Return the rows that tokens are sampled from, without the prompt rows; None: all rows."""
    if all(item.num_prompt_rows == 0 for item in items):
        return None
    return [
        row + item.num_prompt_rows + offset
        for item, row in zip(items, first_rows, strict=True)
        for offset in range(num_choice_rows(item))
    ]


def output_logprobs(outcomes: Sequence[Outcome], logits: torch.Tensor) -> list[tuple[TokenLogprobs, ...] | None]:
    """Return the logprobs of each outcome's committed tokens; None where the request did not ask for them."""
    wanted = [outcome.item.request.sampling.logprobs for outcome in outcomes]
    queries = [
        LogprobsQuery(rows=outcome.rows, token_ids=outcome.committed, num_top=num_top)
        for outcome, num_top in zip(outcomes, wanted, strict=True)
        if num_top is not None
    ]
    found = iter(token_logprobs(logits, queries))
    return [None if num_top is None else tuple(next(found)) for num_top in wanted]


def note_predictions(outcomes: Sequence[Outcome], logits: torch.Tensor, wants: Callable[[Request], bool]) -> None:
    """Set `predicted_ids`, the likeliest token of every row, of requests with `wants(request)`; clear the others'."""
    wanted: list[Outcome] = []
    for outcome in outcomes:
        outcome.item.request.predicted_ids = ()
        if outcome.item.samples and wants(outcome.item.request):
            wanted.append(outcome)
    if not wanted:
        return
    rows = [outcome.first_row + index for outcome in wanted for index in range(num_choice_rows(outcome.item))]
    predicted = iter(logits[upload_rows(rows, logits.device)].argmax(dim=1).tolist())
    for outcome in wanted:
        outcome.item.request.predicted_ids = tuple(islice(predicted, num_choice_rows(outcome.item)))
