"""The end of a service on this machine: no new requests, then the streams run out, then everything goes.

A signal to the whole process group, or to the whole cgroup as systemd sends it, reaches Ray's processes too, and would
end them under the streams. So they are started with SIGTERM blocked, as Ray itself starts them with SIGINT.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ray import serve
from ray.exceptions import RayError

from outrider.cluster.common.reports import REPORT_INTERVAL_S
from outrider.cluster.config.service_config import APP_NAME
from outrider.cluster.router.fleet import FleetSnapshot

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
POLL_S = 0.2
HEARD_S = 4 * REPORT_INTERVAL_S  # until every gateway refuses, and verifiers have reported what came until then
CALL_TIMEOUT_S = 5.0


class Streams(Protocol):
    """The streams of a running service."""

    def stop_taking(self) -> None:
        """Refuse new requests from now on."""

    def count(self) -> int:
        """Return how many are left."""


class RoutedStreams:
    """The streams that the router of our application knows of."""

    @functools.cached_property
    def _router(self) -> Any:
        return serve.get_deployment_handle("Router", APP_NAME)

    def stop_taking(self) -> None:
        """Refuse new requests from now on; raises what Ray and Serve raise where there is no router."""
        self._router.stop_taking.remote().result(timeout_s=CALL_TIMEOUT_S)

    def count(self) -> int:
        """Return how many are left."""
        snapshot: FleetSnapshot = self._router.snapshot.remote().result(timeout_s=CALL_TIMEOUT_S)
        return snapshot.num_streams


def drain(
    streams: Streams,
    timeout_s: float,
    say: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Let the streams run out, for `timeout_s` at most, and say how many are left. KeyboardInterrupt cuts them off."""
    try:
        streams.stop_taking()
        begin_s, told = clock(), -1
        while True:
            sleep(POLL_S)
            passed_s, num_left = clock() - begin_s, streams.count()
            if num_left == 0 and passed_s >= HEARD_S:
                return
            if passed_s >= max(timeout_s, HEARD_S):
                say(f"stopping: {_streams(num_left)} cut off after {timeout_s:g} s")
                return
            if num_left not in (0, told):
                say(f"stopping: {_streams(num_left)} left, {timeout_s - passed_s:.0f} s for them; again: cut them off")
                told = num_left
    except KeyboardInterrupt:
        say("stopping: what is left is cut off")
    except (RayError, RuntimeError, TimeoutError) as error:  # the service is gone already
        logger.warning("the service does not say what it still serves: %s", error)


def _streams(count: int) -> str:
    return f"{count} stream{'' if count == 1 else 's'}"


@contextlib.contextmanager
def sigterm_blocked() -> Iterator[None]:
    """Block SIGTERM here and in every process that is started meanwhile; it comes when the context is left."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def interrupt_at_signals() -> None:
    """Raise KeyboardInterrupt at the next signal that ends a process, and ignore those after it.

    A handler that set an event would wait for the event's lock for ever where it interrupts the wait for that event.
    """
    for number in SIGNALS:
        signal.signal(number, _interrupt_once)


def ignore_signals() -> None:
    """Let nothing cut the stopping short from here on."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _interrupt_once(*_: object) -> None:
    ignore_signals()
    raise KeyboardInterrupt
