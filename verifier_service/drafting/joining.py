"""Whether a step that could run should wait for requests whose drafts are about to come.

Requests that draft, and whose drafts come at different times, fall apart into groups that take turns: each step has the
weights to read for a part of the batch only. Together they need fewer steps, but wait for the last one's draft. So a
step waits as long as that makes more of it, in requests served per second, than it loses.

Only counts and earlier rounds' times decide, never what was drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.pricing.cost_model import CostModel, StepShape


@dataclass(frozen=True, slots=True)
class DueDraft:
    """A request that is held for its draft."""

    due_s: float  # when its draft usually comes
    latest_s: float  # when it has nearly always come
    num_tokens: int  # of its part of a step, draft included


def joining_until_s(
    now_s: float,
    running: Sequence[Request],
    waiting: Sequence[Request],
    due: Callable[[Request], DueDraft | None],
    cost: CostModel,
) -> float | None:
    """Return until when a step that could run should wait for more drafts; None: it should not.

    `due` says when a held request's draft is expected; None: earlier rounds do not tell.
    """
    held = [draft for request in running if (draft := due(request)) is not None]
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

    `step_s` is the time of a step by its tokens. What should have come long ago is not waited for: nobody knows when it
    will.
    """
    until_s, best = now_s, num_ready / step_s(num_ready_tokens)
    num_requests, num_tokens, latest_s = num_ready, num_ready_tokens, now_s
    coming = [
        (max(draft.due_s, (now_s + draft.latest_s) / 2), draft)  # the latter once it is late
        for draft in held
        if draft.latest_s > now_s
    ]
    for expected_s, draft in sorted(coming, key=itemgetter(0)):
        num_requests, num_tokens = num_requests + 1, num_tokens + draft.num_tokens
        latest_s = max(latest_s, draft.latest_s)  # of all of them
        rate = num_requests / (expected_s - now_s + step_s(num_tokens))
        if rate > best:
            until_s, best = latest_s, rate
    return until_s
