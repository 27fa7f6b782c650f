"""`outrider serve` as a process: what it says, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from outrider.verifier_service.ranks import free_port


def test_interrupted_server_leaves_no_process_behind():
    """`outrider serve` in a process group of its own: after SIGINT nothing of it is left."""
    arguments = ["serve", "--port", str(free_port()), "--grpc-port", str(free_port())]
    command = [str(Path(sys.executable).with_name("outrider")), *arguments]
    environment = {**os.environ, "OUTRIDER_TEST_MARK": str(time.time_ns())}
    mark = f"OUTRIDER_TEST_MARK={environment['OUTRIDER_TEST_MARK']}".encode()
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    assert server.stdout is not None
    assert "serving" in server.stdout.readline()
    assert len(marked_processes(mark)) > 5, "Ray, replicas and ranks carry the mark of the process that started them"
    server.send_signal(signal.SIGINT)
    assert server.wait(timeout=60) == 0
    deadline_s = time.monotonic() + 20
    while left := marked_processes(mark):
        assert time.monotonic() < deadline_s, f"still running: {left}"
        time.sleep(0.2)


def marked_processes(mark: bytes) -> list[int]:
    """Return the processes whose environment carries a mark (children inherit it, whoever their parent is now)."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
    return found


def test_unsupported_model_is_refused_by_name_before_anything_starts(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "gptj", "vocab_size": 64, "n_layer": 1}')
    command = [str(Path(sys.executable).with_name("outrider")), "serve", str(tmp_path)]
    server = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert server.returncode == 2
    assert "gptj" in server.stderr
    assert "Traceback" not in server.stderr
