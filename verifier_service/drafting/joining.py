"""Whether a step that could run should wait for requests whose drafts are about to come.

Requests that draft, and whose drafts come at different times, fall apart into groups that take turns: each step has the
weights to read for a part of the batch only. Together they need fewer steps, but wait for the last one's draft. So a
step waits as long as that makes more of it, in requests served per second, than it loses.

Only counts and earlier rounds' times decide, never what was drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter


@dataclass(frozen=True, slots=True)
class DueDraft:
    """A request that is held for its draft."""

    due_s: float  # when its draft usually comes
    latest_s: float  # when it has nearly always come
    num_tokens: int  # of its part of a step, draft included


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
