"""What processes tell of their start is heard while somebody listens, and lost without harm before and after."""

from __future__ import annotations

import os
import queue
import subprocess
import sys

from outrider.cluster.replicas.phase_listener import phases_heard
from outrider.verifier_service.start_phases import MAX_PHASE_BYTES, PHASES_VARIABLE, tell_phase

TELLING = """
from outrider.verifier_service.start_phases import begin_phases, tell_phase
begin_phases("verifier", "loading weights")
"""


def test_a_child_process_is_heard_under_its_name():
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    with phases_heard(heard.put):
        subprocess.run([sys.executable, "-c", TELLING], check=True)
        assert heard.get(timeout=10) == "verifier: loading weights"


def test_nobody_is_told_when_nobody_listens():
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    with phases_heard(heard.put):
        address = os.environ[PHASES_VARIABLE]
        tell_phase("x" * 2 * MAX_PHASE_BYTES)
        assert len(heard.get(timeout=10)) == MAX_PHASE_BYTES
    assert PHASES_VARIABLE not in os.environ
    tell_phase("to nobody")
    os.environ[PHASES_VARIABLE] = address  # as processes have it that were started before
    try:
        tell_phase("to a socket that is gone")
    finally:
        del os.environ[PHASES_VARIABLE]
    assert heard.empty()
