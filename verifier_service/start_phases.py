"""Report the phases of a service's start to the process that waits for it.

A phase is a datagram to a Unix socket named in the environment: the sender needs no connection and never waits.
Without the socket, or on another machine, phases are not reported.
"""

from __future__ import annotations

import contextlib
import os
import socket

PHASES_VARIABLE = "OUTRIDER_PHASES"  # the socket's path
MAX_PHASE_BYTES = 1024

_process = "engine"


def begin_phases(process: str, phase: str) -> None:
    """Set this process's name for all phases, and report its first."""
    global _process
    _process = process
    tell_phase(phase)


def tell_phase(phase: str) -> None:
    """Report a phase that begins; do nothing without a listener."""
    address = os.environ.get(PHASES_VARIABLE)
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(f"{_process}: {phase}".encode()[:MAX_PHASE_BYTES], address)
