"""Stop a service on this machine: refuse new requests, wait until the streams have ended, stop all processes.

A signal to the process group, or to the cgroup as systemd sends it, also reaches Ray's processes, and would kill them
while there are streams. So they are started with SIGTERM blocked, as Ray itself starts them with SIGINT blocked.
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
HEARD_S = 4 * REPORT_INTERVAL_S  # until every gateway refuses requests, and verifiers have reported the last ones
CALL_TIMEOUT_S = 5.0


class Streams(Protocol):
    """The streams of a running service."""

    def stop_taking(self) -> None:
        """Refuse new requests from now on."""

    def count(self) -> int:
        """Return the number of streams left."""


class RoutedStreams:
    """The streams in the router's snapshot."""

    @functools.cached_property
    def _router(self) -> Any:
        return serve.get_deployment_handle("Router", APP_NAME)

    def stop_taking(self) -> None:
        """Refuse new requests from now on; raises Ray's and Serve's errors if there is no router."""
        self._router.stop_taking.remote().result(timeout_s=CALL_TIMEOUT_S)

    def count(self) -> int:
        """Return the number of streams left."""
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
    """Wait for the streams, `timeout_s` at most, and print how many are left. KeyboardInterrupt ends the wait."""
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
    except (RayError, RuntimeError, TimeoutError) as error:  # the service is already gone
        logger.warning("the service does not say what it still serves: %s", error)


def _streams(count: int) -> str:
    return f"{count} stream{'' if count == 1 else 's'}"


@contextlib.contextmanager
def sigterm_blocked() -> Iterator[None]:
    """Block SIGTERM here and in every process started within the context; a pending one is delivered on exit."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def interrupt_at_signals() -> None:
    """Raise KeyboardInterrupt at the next SIGINT or SIGTERM, and ignore later ones.

    (A handler that sets an event would deadlock on its lock if it interrupted the wait for that event.)
    """
    for number in SIGNALS:
        signal.signal(number, _interrupt_once)


def ignore_signals() -> None:
    """Ignore further signals: the stop must complete."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _interrupt_once(*_: object) -> None:
    ignore_signals()
    raise KeyboardInterrupt
