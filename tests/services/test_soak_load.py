"""256 streams at once, then 50,000 short requests, against one live service; the tables are docs/results/load.md.

That page is written after every stage, so that a run which was cut short says how far it came.
"""

from __future__ import annotations

import itertools
import os
import platform
import time
from dataclasses import dataclass

import pytest

from outrider.drafter_service.embedded import held_out_prompts
from services.live_service import LiveService, SharedRay
from services.load_tools import (
    LoadResult,
    Process,
    ask_many,
    asks_of,
    expected_texts,
    require_flat,
    settled_processes,
    short_asks,
    stream_all,
)
from soak_length import SoakLength

NUM_STREAMS = 256
STREAM_TOKENS = 64
CONCURRENCY = 64
STAGES = (2_000, 10_000, 38_000)  # short requests of a full soak; the first warms up

pytestmark = [pytest.mark.soak, pytest.mark.timeout(4 * 3600)]


@dataclass(frozen=True)
class Stage:
    """So many short requests, and what the processes hold when the service is idle again."""

    result: LoadResult
    held: dict[str, Process]


@pytest.fixture(scope="module")
def service(shared_ray: SharedRay) -> LiveService:
    return shared_ray.service(check_integrity=True, kv_cache_memory_bytes=256 << 20)


def test_memory_and_descriptors_stay(service: LiveService, soak_length: SoakLength):
    prompts = held_out_prompts()[:6]
    streams = streams_report(service, prompts)
    expected = expected_texts(service, short_asks(prompts))
    sizes = [soak_length.of(size, at_least=STAGES[0]) for size in STAGES]
    stages: list[Stage] = []
    for num_requests in sizes:
        result = ask_many(service, expected, num_requests=num_requests, concurrency=CONCURRENCY)
        service.wait_until_idle()
        stages.append(Stage(result, settled_processes(service)))
        (soak_length.pages / "load.md").write_text(report(streams, stages), encoding="utf-8")
    for stage, num_requests in zip(stages, sizes, strict=True):
        assert len(stage.result.latencies_s) == num_requests
        assert (stage.result.num_wrong, stage.result.errors) == (0, ())
    require_flat(stages[0].held, stages[-1].held)


def streams_report(service: LiveService, prompts: list[str]) -> str:
    """Run all streams at once; describe them in Markdown."""
    asks = asks_of(prompts, STREAM_TOKENS)
    expected = expected_texts(service, asks)
    crowd = list(itertools.islice(itertools.cycle(asks), NUM_STREAMS))
    begin_s = time.monotonic()
    texts = stream_all(service, crowd)
    seconds = time.monotonic() - begin_s
    service.wait_until_idle()
    num_wrong = sum(text != expected[ask] for text, ask in zip(texts, crowd, strict=True))
    assert num_wrong == 0
    return (
        f"{NUM_STREAMS} streams at once (half over HTTP, half over gRPC; greedy and seeded) of {STREAM_TOKENS} tokens "
        f"each: all complete after {seconds:.0f} s, {num_wrong} with another text than alone without speculation."
    )


def report(streams: str, stages: list[Stage]) -> str:
    """Describe everything so far in Markdown."""
    num_requests = sum(len(stage.result.latencies_s) + len(stage.result.errors) for stage in stages)
    num_failed = sum(len(stage.result.errors) for stage in stages)
    num_wrong = sum(stage.result.num_wrong for stage in stages)
    return (
        "# Load: many streams, many short requests\n\n"
        f"Of {num_requests:,} short requests in a row {num_failed} failed and {num_wrong} had a wrong text. The "
        "service held nothing after them, and the last table says how memory and descriptors grew.\n\n"
        f"Written by `make soak` on {os.cpu_count()} cores ({platform.machine()}), shared by the service, its clients "
        "and whatever else ran. One verifier, one drafter, one gateway, the embedded pair, speculation always on; both "
        "engines check their books (`check_integrity`) after every step.\n\n"
        f"{streams}\n\n"
        f"**{num_requests:,} requests of 1, 2 or 6 tokens** (the last are drafted for), {CONCURRENCY} clients (half "
        "HTTP with kept-alive connections, half gRPC), each text compared with the one alone. After each stage the "
        "service held no request, no draft session and no KV block.\n\n"
        f"{_latency_table(stages)}\n\n"
        "Resident memory of each process when idle again (MiB), and its open descriptors:\n\n"
        f"{_process_table(stages)}\n"
    )


def _latency_table(stages: list[Stage]) -> str:
    rows = [
        f"| {len(result.latencies_s):,} | {len(result.errors)} | {result.num_wrong} | {result.requests_per_s:.0f} | "
        + " | ".join(f"{result.latency_ms(share):.0f}" for share in (0.5, 0.95, 0.99, 1.0))
        + " |"
        for result in (stage.result for stage in stages)
    ]
    head = "| answered | failed | wrong text | requests/s | p50 (ms) | p95 (ms) | p99 (ms) | longest (ms) |"
    return "\n".join([head, "|" + "---|" * 8, *rows])


def _process_table(stages: list[Stage]) -> str:
    totals = list(itertools.accumulate(len(stage.result.latencies_s) for stage in stages))
    head = "| process | " + " | ".join(f"after {total:,}" for total in totals) + " | growth | descriptors |"
    rows = [
        f"| {name} | "
        + " | ".join(f"{stage.held[name].rss_bytes / 2**20:.1f}" for stage in stages)
        + f" | {stages[-1].held[name].rss_bytes / first.rss_bytes - 1:+.1%} "
        + f"| {', '.join(str(stage.held[name].num_fds) for stage in stages)} |"
        for name, first in stages[0].held.items()
    ]
    return "\n".join([head, "|" + "---|" * (len(stages) + 3), *rows])
