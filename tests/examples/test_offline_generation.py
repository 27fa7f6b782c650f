"""The example runs as it says, and shows drafts that were right."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from outrider.cluster import LLM, SamplingParams

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "offline_generation.py"


def test_it_shows_every_prompt_with_the_targets_own_text():
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = re.findall(r"^--- (\d+) of (\d+) draft tokens were right$", done.stdout, re.MULTILINE)
    assert len(counts) == 3
    assert all(0 < int(accepted) <= int(drafted) for accepted, drafted in counts)
    prompt = "def read_lines(path):\n"
    with LLM(speculation="off") as llm:
        (plain,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=32))
    assert prompt + plain.outputs[0].text in done.stdout


def test_it_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 30
