"""Whether a gateway admits a new request: a pure function of its last snapshot and of its own counts.

The limit: `max_queued_requests` waiting requests per live verifier. The default, 1024, is four times the requests that
a verifier runs by default: the last one in the queue waits for about four generations, and costs its prompt in memory.
A verifier with a full KV cache has a quarter of the limit: its next request waits for a generation to end, not for a
step. Requests of priority 0 may fill the queue to the limit, above 0 to half of it, below 0 to a quarter more.

The number of waiting requests is the larger of two: as verifiers report it, plus this gateway's own that no report
includes; and this gateway's own requests without a first token. Reports are up to a second old, and a burst is faster.

Two gateways may both see the last place. So each request says how many may wait at its verifier, which knows, and
refuses it if there are more: then it goes to another one (`Search`).

A refused client is told when to retry: after the waiting requests, and after the clients that were refused before. If
a whole burst retried at once, all but a queue's length would be refused again, and clients give up after a few times.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from outrider.cluster.common.errors import Overloaded, Unavailable
from outrider.cluster.router.fleet import FleetSnapshot, RouterPolicy, VerifierState

FULL_KV_USAGE = 0.95
FULL_KV_SHARE = 0.25
LOW_PRIORITY_SHARE = 0.5
HIGH_PRIORITY_SHARE = 1.25
MIN_RETRY_S, MAX_RETRY_S = 1.0, 30.0
START_RETRY_S = 2.0  # before a first token has shown how fast the queue moves
RATE_MEMORY_S = 10.0  # time constant of the smoothed rate of begun requests


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnQueue:
    """A gateway's own requests, known without a snapshot."""

    num_waiting: int = 0  # sent, without a first token
    begun_per_s: float = 0.0  # first tokens per second, while any request waits
    watched_s: float = 0.0  # recent time in which any request waited: the rate was measured in it
    promised: tuple[tuple[float, int], ...] = ()  # refused clients: (seconds until they retry, how many), soonest first


def refusal(
    snapshot: FleetSnapshot,
    own: OwnQueue,
    *,
    priority: int,
    max_queued_requests: int,
    now_s: float,
    policy: RouterPolicy,
) -> Overloaded | Unavailable | None:
    """Return why a new request is refused; None: it is admitted, or there is no verifier, as `route` will find.

    `now_s` is of the snapshot's clock.
    """
    if snapshot.is_stopping:
        return Unavailable("the service is stopping")
    live = [state for state in snapshot.verifiers if not state.report.draining]
    if not live:
        return None
    limit = _priority_share(priority) * sum(max_queued_requests * _kv_share(state) for state in live)
    # loads in a stale snapshot are outdated
    is_stale = now_s - snapshot.decided_at_s > policy.stale_snapshot_s
    num_reported = 0 if is_stale else sum(_num_waiting(state) for state in live)
    num_waiting = max(num_reported, own.num_waiting)
    if num_waiting < limit:
        return None
    return overload(f"{num_waiting} requests wait for {len(live)} verifiers, {limit:.0f} may", own, limit)


def queue_limit(state: VerifierState, *, priority: int, max_queued_requests: int) -> int:
    """Return how many requests may wait at one verifier for it to take one of a priority."""
    return math.ceil(_priority_share(priority) * max_queued_requests * _kv_share(state))


def overload(reason: str, own: OwnQueue, limit: float) -> Overloaded:
    """Return a refusal that says when to retry, where `limit` requests may wait."""
    return Overloaded(reason, retry_after_s=_retry_after_s(own, limit))


def _num_waiting(state: VerifierState) -> int:
    return state.report.load.num_waiting + state.report.num_pending + state.num_assigned


def _kv_share(state: VerifierState) -> float:
    is_full = state.report.load.kv_usage >= FULL_KV_USAGE and state.report.load.num_waiting > 0
    return FULL_KV_SHARE if is_full else 1.0


def _priority_share(priority: int) -> float:
    if priority == 0:
        return 1.0
    return LOW_PRIORITY_SHARE if priority > 0 else HIGH_PRIORITY_SHARE


def _retry_after_s(own: OwnQueue, limit: float) -> float:
    """Return a new request's waiting time by Little's law: requests ahead of it ÷ first tokens per second.

    Refused clients that retry earlier are ahead of it too. Before a first token, a whole queue is assumed to take as
    long as the requests have waited already.
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
        if math.floor(back_s) > math.ceil(retry_s):  # Retry-After is in whole seconds, rounded up
            break
        retry_s += count * each_s
    return min(MAX_RETRY_S, max(MIN_RETRY_S, retry_s))


class Turnover:
    """A gateway's own queue: requests that were sent and have neither a first token nor ended."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: set[int] = set()
        self._tickets = itertools.count()
        self._promised: Counter[int] = Counter()  # refused clients, by the second in which they retry
        self._num_begun = 0.0  # faded
        self._watched_s = 0.0  # faded; time without a queue does not count
        self._faded_s = clock()  # when both were last faded

    @contextlib.contextmanager
    def entered(self) -> Iterator[int]:
        """Count a request as waiting until its first token or its end; yields the ticket for `begin`."""
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
        """Count a refused client, which was told to retry after this time."""
        self._promised[math.ceil(self._clock() + retry_after_s)] += 1

    def update(self) -> OwnQueue:
        """Bring rate and promises up to now; return the queue."""
        self._fade()
        for second in [second for second in self._promised if second <= self._faded_s]:
            del self._promised[second]
        rate = self._num_begun / self._watched_s if self._watched_s > 0.0 else 0.0
        promised = tuple((second - self._faded_s, count) for second, count in sorted(self._promised.items()))
        return OwnQueue(num_waiting=len(self._waiting), begun_per_s=rate, watched_s=self._watched_s, promised=promised)

    def _fade(self) -> None:
        """Bring the rate up to now; to be called before the queue changes."""
        now_s = self._clock()
        passed_s = now_s - self._faded_s
        self._faded_s = now_s
        if self._waiting:
            kept = math.exp(-passed_s / RATE_MEMORY_S)
            self._num_begun *= kept
            self._watched_s = self._watched_s * kept + RATE_MEMORY_S * (1.0 - kept)
