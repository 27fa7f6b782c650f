"""How a service ends its streams: played, in a time of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from ray.exceptions import RayActorError

from outrider.cluster.replicas.stopping import HEARD_S, drain, sigterm_blocked


class PlayedStreams:
    """Streams of which one ends every `each_s`, in a time that only sleeping moves on."""

    def __init__(self, num_streams, each_s, fails=None):
        self.num_streams, self.each_s, self.fails = num_streams, each_s, fails
        self.now_s, self.is_taking, self.said = 0.0, True, []

    def stop_taking(self):
        self.is_taking = False

    def count(self):
        if self.fails is not None:
            raise self.fails
        return max(0, self.num_streams - int(self.now_s / self.each_s))

    def sleep(self, seconds):
        self.now_s += seconds

    def drain(self, timeout_s):
        drain(self, timeout_s, self.said.append, clock=lambda: self.now_s, sleep=self.sleep)


def test_streams_run_out():
    played = PlayedStreams(3, each_s=2.0)
    played.drain(30.0)
    assert not played.is_taking
    assert 6.0 <= played.now_s < 6.5
    assert [line.split(" left")[0] for line in played.said] == [
        "stopping: 3 streams",
        "stopping: 2 streams",
        "stopping: 1 stream",
    ]


def test_what_is_left_after_the_time_is_cut_off():
    played = PlayedStreams(8, each_s=100.0)
    played.drain(5.0)
    assert 5.0 <= played.now_s < 5.5
    assert played.said[-1] == "stopping: 8 streams cut off after 5 s"


def test_without_streams_it_waits_until_everybody_has_heard_and_no_longer():
    played = PlayedStreams(0, each_s=1.0)
    played.drain(30.0)
    assert HEARD_S <= played.now_s < HEARD_S + 0.5
    assert played.said == []


def test_a_second_signal_cuts_them_off():
    played = PlayedStreams(8, each_s=100.0, fails=KeyboardInterrupt())
    played.drain(30.0)
    assert played.said == ["stopping: what is left is cut off"]


@pytest.mark.parametrize("error", [RayActorError(), RuntimeError("no application"), TimeoutError()])
def test_a_service_that_is_gone_holds_nothing_up(error):
    played = PlayedStreams(8, each_s=100.0, fails=error)
    played.drain(30.0)
    assert played.now_s < 1.0


def test_processes_that_are_started_blocked_outlast_a_signal_to_their_group():
    child = "import signal, sys; sys.exit(signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    with sigterm_blocked():
        inside = subprocess.run([sys.executable, "-c", child], check=False)
    outside = subprocess.run([sys.executable, "-c", child], check=False)
    assert (inside.returncode, outside.returncode) == (0, 1)


def test_a_signal_that_came_meanwhile_is_not_lost():
    source = (
        "import os, signal\n"
        "from outrider.cluster.replicas.stopping import interrupt_at_signals, sigterm_blocked\n"
        "interrupt_at_signals()\n"
        "try:\n"
        "    with sigterm_blocked():\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        print('inside')\n"
        "except KeyboardInterrupt:\n"
        "    print('after')\n"
    )
    told = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=os.environ, check=True)
    assert told.stdout.split() == ["inside", "after"]
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
