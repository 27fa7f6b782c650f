"""The coverage-guided part of `make fuzz`, which alone collects this file: it needs atheris and a minute."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from hypothesis import find

from fuzz.budget import SECONDS_GUIDED
from fuzz.frames import MESSAGE_TYPES, values_of
from fuzz.tally import GUIDED, TALLY
from outrider.verifier_service.messages.wire import encode

FOLDER = Path(__file__).parent


def test_frames_guided_by_coverage(tmp_path: Path) -> None:
    for message_type in MESSAGE_TYPES:
        smallest = find(values_of(message_type), lambda _: True)
        (tmp_path / message_type.__name__).write_bytes(encode(smallest))
    command = [sys.executable, str(FOLDER / "guided_frames.py"), str(tmp_path)]
    limits = [f"-max_total_time={SECONDS_GUIDED}", "-max_len=4096", "-rss_limit_mb=2048", "-timeout=10"]
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent)}
    done = subprocess.run([*command, *limits], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    finished = re.search(r"Done (\d+) runs", done.stderr)
    assert finished is not None, done.stderr[-5000:]
    TALLY.count(GUIDED, "decoded or refused", int(finished[1]))
