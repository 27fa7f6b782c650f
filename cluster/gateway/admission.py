"""Whether a gateway takes a new request: a pure function of its last snapshot and of its own counts.

The rule: at most `max_queued_requests` may wait for each live verifier. The default, 1024, is four times the requests
that a verifier runs by default: the last in the queue waits for about four generations, and what it costs in memory is
its prompt. A verifier whose KV cache is full may have a quarter of that: there the next one waits for whole
generations to end, not for the next step. Requests of priority 0 may fill the queue, those above 0 half of it; those
below 0 a quarter more.

What waits is what the verifiers report plus what the router has sent them since, or what this gateway itself has sent
and not heard of yet if that is more: reports are up to a second old, and a burst is faster.

Who is refused is told when to come back: once those that wait have begun, and those that were told so before. A burst
that all came back at once would be refused again but for a queue's length, and clients give up after a few times.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from outrider.cluster.common.errors import Overloaded, Unavailable
from outrider.cluster.router.fleet import FleetSnapshot, RouterPolicy, VerifierState, is_fresh

FULL_KV_USAGE = 0.95
FULL_KV_SHARE = 0.25
LOW_PRIORITY_SHARE = 0.5
HIGH_PRIORITY_SHARE = 1.25
MIN_RETRY_S, MAX_RETRY_S = 1.0, 30.0
START_RETRY_S = 2.0  # where no request has begun yet that would tell how fast the queue moves
RATE_MEMORY_S = 10.0  # over which the rate of begun requests is smoothed


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnQueue:
    """What a gateway knows of its own requests, whatever the age of its snapshot."""

    num_waiting: int = 0  # sent, without a first token
    begun_per_s: float = 0.0  # how fast they get one, while any waits
    watched_s: float = 0.0  # how long any has waited, of late: what the rate was seen in
    promised: tuple[tuple[float, int], ...] = ()  # refused: in how many seconds how many come back, soonest first


def refusal(
    snapshot: FleetSnapshot,
    own: OwnQueue,
    *,
    priority: int,
    max_queued_requests: int,
    now_s: float,
    policy: RouterPolicy,
) -> Overloaded | Unavailable | None:
    """Return why a new request is not taken, or None when it is; without any verifier that is for `route` to say.

    `now_s` is of the snapshot's clock.
    """
    if snapshot.is_stopping:
        return Unavailable("the service is stopping")
    live = [
        state
        for state in snapshot.verifiers
        if is_fresh(state.reported_s, snapshot.decided_at_s, policy) and not state.report.draining
    ]
    if not live:
        return None
    limit = _priority_share(priority) * sum(max_queued_requests * _kv_share(state) for state in live)
    # loads in a stale snapshot mean nothing
    is_stale = now_s - snapshot.decided_at_s > policy.stale_snapshot_s
    num_reported = 0 if is_stale else sum(_num_waiting(state) for state in live)
    num_waiting = max(num_reported, own.num_waiting)
    if num_waiting < limit:
        return None
    return Overloaded(
        f"{num_waiting} requests wait for {len(live)} verifiers, {limit:.0f} may",
        retry_after_s=_retry_after_s(own, limit),
    )


def _num_waiting(state: VerifierState) -> int:
    return state.report.load.num_waiting + state.num_assigned


def _kv_share(state: VerifierState) -> float:
    is_full = state.report.load.kv_usage >= FULL_KV_USAGE and state.report.load.num_waiting > 0
    return FULL_KV_SHARE if is_full else 1.0


def _priority_share(priority: int) -> float:
    if priority == 0:
        return 1.0
    return LOW_PRIORITY_SHARE if priority > 0 else HIGH_PRIORITY_SHARE


def _retry_after_s(own: OwnQueue, limit: float) -> float:
    """Return how long a request waits now, by Little's law: those that go first ÷ those that begin per second.

    Those that were told to come back sooner go first, too. Before any has begun, a whole queue is taken to need as long
    as it has needed already.
    """
    if own.num_waiting == 0:
        return MIN_RETRY_S
    if own.begun_per_s == 0.0:
        retry_s = max(START_RETRY_S, own.watched_s)
        each_s = retry_s / max(1.0, limit)
    else:
        each_s = 1.0 / own.begun_per_s
        retry_s = own.num_waiting * each_s
    for back_s, count in own.promised:
        if math.floor(back_s) > math.ceil(retry_s):  # clients are told whole seconds, and kept by them
            break
        retry_s += count * each_s
    return min(MAX_RETRY_S, max(MIN_RETRY_S, retry_s))


class Turnover:
    """A gateway's own queue: its requests from when they are sent to their first token or their end."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: set[int] = set()
        self._tickets = itertools.count()
        self._promised: Counter[int] = Counter()  # by the second in which they come back
        self._num_begun = 0.0  # fading, and
        self._watched_s = 0.0  # fading, too: time without a queue says nothing of how fast one moves
        self._faded_s = clock()

    @contextlib.contextmanager
    def entered(self) -> Iterator[int]:
        """Count a request as waiting, at most until it ends; gives the ticket that `begin` takes."""
        ticket = next(self._tickets)
        self._fade()
        self._waiting.add(ticket)
        try:
            yield ticket
        finally:
            self._fade()
            self._waiting.discard(ticket)

    def begin(self, ticket: int) -> None:
        """Count a request's first token; later ones change nothing."""
        if ticket in self._waiting:
            self._fade()
            self._waiting.remove(ticket)
            self._num_begun += 1.0

    def promise(self, retry_after_s: float) -> None:
        """Count a request as one that comes back after so long."""
        self._promised[math.ceil(self._clock() + retry_after_s)] += 1

    def queue(self) -> OwnQueue:
        self._fade()
        for second in [second for second in self._promised if second <= self._faded_s]:
            del self._promised[second]
        rate = self._num_begun / self._watched_s if self._watched_s > 0.0 else 0.0
        promised = tuple((second - self._faded_s, count) for second, count in sorted(self._promised.items()))
        return OwnQueue(num_waiting=len(self._waiting), begun_per_s=rate, watched_s=self._watched_s, promised=promised)

    def _fade(self) -> None:
        """Bring the rate up to now; called before the queue changes."""
        now_s = self._clock()
        passed_s = now_s - self._faded_s
        self._faded_s = now_s
        if self._waiting:
            kept = math.exp(-passed_s / RATE_MEMORY_S)
            self._num_begun *= kept
            self._watched_s = self._watched_s * kept + RATE_MEMORY_S * (1.0 - kept)
