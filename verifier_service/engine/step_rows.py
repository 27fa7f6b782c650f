"""Which rows of a step's logits are sampled, and what is read from them besides the verified tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import torch

from outrider.verifier_service.engine.launched_step import LaunchedStep
from outrider.verifier_service.experts.routing import ExpertRouting
from outrider.verifier_service.gpu.transfers import upload_rows
from outrider.verifier_service.messages.request import LogprobsMode, Request, TokenLogprobs
from outrider.verifier_service.pricing.cost_model import CostModel
from outrider.verifier_service.sampling.logits_processors import LogitEdits
from outrider.verifier_service.sampling.logprobs import LogprobsQuery, shape_of_logprobs, token_logprobs
from outrider.verifier_service.sampling.sampler import first_largest
from outrider.verifier_service.sampling.sparse_rows import likeliest_rows
from outrider.verifier_service.scheduling.outcome import Outcome, num_choice_rows
from outrider.verifier_service.scheduling.schedule import ScheduledRequest


def sampling_rows(items: Sequence[ScheduledRequest], first_rows: Sequence[int]) -> list[int] | None:
    """Return the rows that tokens are sampled from, without the rows of prompts and masks; None: all rows."""
    if not [item for item in items if item.num_prompt_rows or item.masks is not None]:
        return None
    return [
        row + item.num_prompt_rows + offset
        for item, row in zip(items, first_rows, strict=True)
        for offset in range(num_choice_rows(item))
    ]


def output_logprobs(outcomes: Sequence[Outcome], step: LaunchedStep) -> list[tuple[TokenLogprobs, ...] | None]:
    """Return the logprobs of each outcome's committed tokens; None where the request did not ask for them."""
    samplings = [outcome.item.request.sampling for outcome in outcomes]
    wanted = [sampling.logprobs if sampling.beams is None else None for sampling in samplings]  # beams read their own
    asking = [outcome for outcome, num_top in zip(outcomes, wanted, strict=True) if num_top is not None]
    if not asking:
        return [None] * len(outcomes)
    edits = step.edits()
    queries = [_query(outcome, edits.get(outcome.item.request.request_id)) for outcome in asking]
    found = iter(token_logprobs(step.logits, queries))
    return [None if num_top is None else tuple(next(found)) for num_top in wanted]


def _query(outcome: Outcome, edits: LogitEdits | None) -> LogprobsQuery:
    sampling, rows = outcome.item.request.sampling, outcome.rows
    if sampling.logprobs_mode is LogprobsMode.RAW:
        edits = None
    return LogprobsQuery(
        rows=rows,
        token_ids=outcome.committed,
        num_top=sampling.logprobs or 0,
        shape=shape_of_logprobs(sampling),
        edits=None if edits is None else edits.of_rows([row - outcome.first_row for row in rows]),
    )


def count_experts(
    step: LaunchedStep, outcomes: Sequence[Outcome], routing: ExpertRouting, cost: CostModel | None
) -> None:
    """Count which experts a step's committed tokens took; now and then, tell the cost of steps what they read.

    These are each request's last token before the step, and its accepted draft tokens. The step must not be pipelined:
    then no later step has written to the record.
    """
    batch = step.schedule.batch
    tokens = [batch.logits_indices[row] for outcome in outcomes for row in outcome.rows]
    shares = routing.count(tokens, batch.num_tokens)
    if shares is not None and cost is not None and cost.experts is not None:
        cost.experts.shares = shares


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
    predicted = iter(first_largest(logits[upload_rows(rows, logits.device)]).tolist())
    for outcome in wanted:
        outcome.item.request.predicted_ids = tuple(islice(predicted, num_choice_rows(outcome.item)))


def note_target_rows(outcomes: Sequence[Outcome], logits: torch.Tensor, num_top: Callable[[Request], int]) -> None:
    """Add the rows of committed tokens to `target_rows`, with `num_top(request)` tokens each; 0: none are wanted.

    As raw log probabilities, a row is the model's own law, before penalties, temperature and truncation.
    """
    by_size: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        if size := num_top(outcome.item.request):
            by_size.setdefault(size, []).append(outcome)
    for size, wanted in by_size.items():
        rows = [row for outcome in wanted for row in outcome.rows]
        found = iter(likeliest_rows(logits[upload_rows(rows, logits.device)], size))
        for outcome in wanted:
            outcome.item.request.target_rows += islice(found, len(outcome.committed))
