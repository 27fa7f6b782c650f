"""Whether a step that could run should wait for requests whose drafts are about to arrive.

If drafts arrive at different times, requests split into groups that take turns, and each step reads all weights for a
part of the batch. One batch needs fewer steps, but delays all until the slowest draft. So a step waits while waiting
raises the requests served per second.

Only counts and times of earlier rounds decide, never drafted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.pricing.cost_model import CostModel, StepShape


@dataclass(frozen=True, slots=True)
class DueDraft:
    """A draft that a request is held for."""

    due_s: float  # expected arrival
    latest_s: float  # nearly all drafts have arrived by then
    num_tokens: int  # the request's share of a step, draft included


def joining_until_s(
    now_s: float,
    running: Sequence[Request],
    waiting: Sequence[Request],
    due: Callable[[Request], DueDraft | None],
    cost: CostModel,
) -> float | None:
    """Return until when a step that could run should wait for more drafts; None: run it now.

    `due` gives a held request's expected draft; None: unknown.
    """
    held = [one for request in running if request.hold_until_s is not None and (one := due(request)) is not None]
    if not held:
        return None
    ready = [request for request in (*running, *waiting) if request.hold_until_s is None]
    if not ready:
        return None
    num_tokens = sum(request.num_tokens - request.num_computed_tokens for request in ready)
    num_tokens += sum(len(request.draft.token_ids) for request in ready if request.draft is not None)
    num_context_tokens = sum(request.num_computed_tokens for request in running)
    until_s = worth_waiting_until(
        now_s,
        held,
        num_ready=len(ready),
        num_ready_tokens=num_tokens,
        step_s=lambda count: cost.seconds(StepShape(count, num_context_tokens, is_drafting=True)),
    )
    return until_s if until_s > now_s else None


def worth_waiting_until(
    now_s: float,
    held: Iterable[DueDraft],
    *,
    num_ready: int,
    num_ready_tokens: int,
    step_s: Callable[[int], float],
) -> float:
    """Return until when, at most, a step of `num_ready` requests should wait for held ones; `now_s`: not at all.

    `step_s` gives a step's seconds by its number of tokens. A draft past its `latest_s` is not waited for.
    """
    until_s, best = now_s, num_ready / step_s(num_ready_tokens)
    num_requests, num_tokens, latest_s = num_ready, num_ready_tokens, now_s
    coming = [
        (max(draft.due_s, (now_s + draft.latest_s) / 2), draft)  # once overdue: halfway to `latest_s`
        for draft in held
        if draft.latest_s > now_s
    ]
    for expected_s, draft in sorted(coming, key=itemgetter(0)):
        num_requests, num_tokens = num_requests + 1, num_tokens + draft.num_tokens
        latest_s = max(latest_s, draft.latest_s)
        rate = num_requests / (expected_s - now_s + step_s(num_tokens))
        if rate > best:
            until_s, best = latest_s, rate
    return until_s
