"""A peer's process: what it says is read line by line, and what becomes of it is told."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from outrider.lab.peers.process import Peer, PeerError, PeerProcess

ECHO = """
from worker import serve

def load(options):
    print("noise of a library")
    if options.get("fails"):
        raise RuntimeError("no such model")
    def generate(prompts, max_tokens):
        print("more noise")
        if prompts[0][0] == 0:
            raise RuntimeError("prompts of zeros are not liked")
        return [[prompt[-1]] * (max_tokens - options.get("short", 0)) for prompt in prompts]
    return "1.2", generate

serve(load)
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Start a worker script that lies beside `worker.py`, as the real ones do."""
    worker = Path(__file__).resolve().parents[3] / "lab" / "peers" / "worker.py"
    (tmp_path / "worker.py").write_text(worker.read_text())
    (tmp_path / "echo.py").write_text(ECHO)
    monkeypatch.setattr("outrider.lab.peers.process.FOLDER", tmp_path)
    started: list[PeerProcess] = []

    def start(**options) -> PeerProcess:
        peer = Peer(name="echo", script="echo.py", interpreter=None, options=options)
        process = PeerProcess(peer, num_threads=1, log=tmp_path / "log", clock=time.perf_counter)
        started.append(process)
        return process

    yield start
    for process in started:
        process.close()


def test_it_answers_in_order_whatever_else_it_prints(start):
    process = start()
    assert process.version == "1.2"
    assert 0 < process.ready_s < 60
    assert process.run([[1, 2], [3]], 2).token_ids == [[2, 2], [3, 3]]
    assert process.run([(7,)], 1).token_ids == [[7]]
    assert process.peak_memory_bytes() > 1 << 20


def test_one_that_does_not_start_is_told_with_its_last_words(start):
    with pytest.raises(PeerError, match=r"echo stopped: RuntimeError: no such model \(all of it in .*log\)"):
        start(fails=True)


def test_fewer_tokens_than_asked_for_are_no_result(start):
    with pytest.raises(PeerError, match="echo did not make 3 tokens of every prompt"):
        start(short=1).run([[5]], 3)
