"""Failures driven again and again against one live service; the table they leave is committed as tests/SOAK.md."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from live_service import LiveService, Streamed, live_service
from outrider.drafter_service.embedded import held_out_prompts

NUM_RUNS = 20
MAX_TOKENS = 200
MAX_PAUSE_S = 2.0  # the round deadline of 1 s, and as much again for a busy machine
TABLE = Path(__file__).resolve().parents[1] / "SOAK.md"
SAMPLINGS: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.8, "seed": 11})

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


@dataclass(frozen=True)
class Run:
    sampling: str
    streamed: Streamed
    is_identical: bool
    seconds_until_drafting: float


@pytest.fixture(scope="module")
def service() -> Iterator[LiveService]:
    with live_service() as service:
        yield service


def test_drafter_killed_mid_stream(service: LiveService):
    prompts = held_out_prompts()
    runs = [kill_once(service, prompts[i % len(prompts)], SAMPLINGS[i % len(SAMPLINGS)], i) for i in range(NUM_RUNS)]
    service.wait_until_idle()
    TABLE.write_text(table(runs), encoding="utf-8")
    assert all(run.is_identical for run in runs)
    assert all(run.streamed.finish_reason == "length" for run in runs)
    assert all(run.streamed.speculation["num_drafts"] > 0 for run in runs)
    assert max(run.streamed.longest_pause_s for run in runs) < MAX_PAUSE_S


def kill_once(service: LiveService, prompt: str, sampling: dict[str, Any], index: int) -> Run:
    """Kill the drafter after a few chunks of a stream; compare its text with plain decoding's."""
    body = {"max_tokens": MAX_TOKENS, "ignore_eos": True, **sampling}
    expected = service.stream(prompt, disable_spec_decode=True, **body)
    kill_at = 2 + index % 10

    def kill(num_chunks: int) -> None:
        if num_chunks == kill_at:
            service.kill("Drafter")

    streamed = service.stream(prompt, on_chunk=kill, **body)
    begin_s = time.monotonic()
    service.wait_for_drafts()
    return Run(
        sampling="seeded" if "seed" in sampling else "greedy",
        streamed=streamed,
        is_identical=streamed.text == expected.text,
        seconds_until_drafting=time.monotonic() - begin_s,
    )


def table(runs: list[Run]) -> str:
    """Describe the runs in Markdown."""
    rows = "\n".join(
        f"| {index} | {run.sampling} | {'yes' if run.is_identical else 'NO'} | {run.streamed.finish_reason} "
        f"| {run.streamed.longest_pause_s * 1e3:.0f} | {run.seconds_until_drafting:.1f} |"
        for index, run in enumerate(runs, start=1)
    )
    num_hung = sum(run.streamed.finish_reason != "length" for run in runs)
    num_changed = sum(not run.is_identical for run in runs)
    longest_ms = max(run.streamed.longest_pause_s for run in runs) * 1e3
    return (
        "# Soak: a drafter killed mid-stream\n\n"
        f"Written by `make soak` on {os.cpu_count()} cores ({platform.machine()}). Each run streams {MAX_TOKENS} "
        "tokens of the embedded pair through a live service, kills the drafter's rank with SIGKILL after a few "
        "chunks, and "
        "compares the text with the same request decoded without speculation.\n\n"
        f"**{len(runs)} runs: {num_hung} hung, {num_changed} with lost, doubled or changed tokens, "
        f"longest pause {longest_ms:.0f} ms.**\n\n"
        "| run | sampling | text identical | finish | longest pause (ms) | drafting again after (s) |\n"
        "|---|---|---|---|---|---|\n"
        f"{rows}\n"
    )
