"""Tell whoever waits for a start what each of its processes is doing.

Phases are datagrams to a Unix socket that the environment names, so that a process needs no connection to say one and
nobody waits for a listener. On other machines, and where nobody waits, there is none.
"""

from __future__ import annotations

import contextlib
import os
import socket

PHASES_VARIABLE = "OUTRIDER_PHASES"  # where the socket is
MAX_PHASE_BYTES = 1024

_process = "engine"


def begin_phases(process: str, phase: str) -> None:
    """Name this process, once, for what it tells from now on, and tell its first phase."""
    global _process
    _process = process
    tell_phase(phase)


def tell_phase(phase: str) -> None:
    """Say what begins now; nothing where nobody listens."""
    address = os.environ.get(PHASES_VARIABLE)
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(f"{_process}: {phase}".encode()[:MAX_PHASE_BYTES], address)
