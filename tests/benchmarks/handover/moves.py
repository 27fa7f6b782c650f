"""`make study NAME=moves`: a verifier joins one where requests wait; running ones move to it, or stay.

Each arm is the manifest that we ship on a cluster of three raylets, with the embedded pair and few places in a batch.
All requests come at once, to the one verifier that there is; the autoscaler adds a second one. They decode without
drafts, unless asked otherwise, for a drafter would want the core of the second verifier. Arms differ in the router's
`move_after_s` alone. Greedy tokens must be the same in all.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import click
import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.handover.apart import show
from benchmarks.weights.served_model import Told, in_float32
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import markdown_table
from outrider.cluster.config.known_models import EMBEDDED
from outrider.drafter_service.embedded import draft_path, held_out_prompts
from outrider.lab.bench.pairs import describe_machine
from outrider.lab.same_tokens import Pair, compare, num_identical, require_same
from services.live_service import Streamed
from services.raylets import QUICK, Deployed, deployed_service

NEVER_S = 1e9
ARMS = {"requests stay": NEVER_S, "requests move": 1.0, "requests stay, again": NEVER_S}
PER_VERIFIER = 4  # requests at a time, and from how many on the autoscaler wants another one
POLL_S = 0.2
HEADINGS = ("arm", "second verifier (s)", "moved", "mean end (s)", "last end (s)", "longest pause (s)", "same tokens")


@dataclass(frozen=True, slots=True)
class Figures:
    """One arm: when its second verifier was up and its requests ended, in seconds after the first request."""

    joined_s: float
    num_moved: int
    ends_s: Sequence[float]
    longest_pause_s: float  # between two chunks of a stream
    answers: Sequence[Told]

    def row(self, name: str, first: Figures) -> list[str]:
        num_same = num_identical(*([told.token_ids for told in one.answers] for one in (self, first)))
        return [
            name,
            f"{self.joined_s:.1f}",
            str(self.num_moved),
            f"{statistics.mean(self.ends_s):.1f}",
            f"{np.max(self.ends_s):.1f}",
            f"{self.longest_pause_s:.2f}",
            f"{num_same} of {len(self.answers)}",
        ]

    def pairs(self, name: str, first: Figures) -> list[Pair]:
        """Return every answer beside the first arm's."""
        both = enumerate(zip(self.answers, first.answers, strict=True))
        return [told.beside(other, f"{name}, request {place}", {"temperature": 0}) for place, (told, other) in both]


def moved_of(metrics: str) -> int:
    """Return how many requests have moved, by what a gateway's `/metrics` says."""
    samples = itertools.chain.from_iterable(family.samples for family in text_string_to_metric_families(metrics))
    moved = (
        sample.value
        for sample in samples
        if sample.name == "outrider_handovers_total" and sample.labels["outcome"] == "moved"
    )
    return int(sum(moved))


def measure(deployed: Deployed, prompts: Sequence[str], *, num_requests: int, max_tokens: int, drafts: bool) -> Figures:
    """Send all requests at once, and wait for their ends."""
    body = {"max_tokens": max_tokens, "ignore_eos": True, "disable_spec_decode": not drafts, "return_token_ids": True}
    begin_s = time.monotonic()
    joined: list[float] = []
    is_over = threading.Event()

    def watch() -> None:
        while not joined and not is_over.wait(POLL_S):
            if deployed.sizes["Verifier"] > 1:
                joined.append(time.monotonic() - begin_s)

    def one(place: int) -> tuple[Streamed, float]:
        prompt = f"# {place}\n{prompts[place % len(prompts)]}"
        streamed = deployed.service.stream(prompt, timeout_s=600.0, **body)
        return streamed, time.monotonic() - begin_s

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(num_requests) as pool:
        found = list(pool.map(one, range(num_requests)))
    is_over.set()
    watcher.join()
    return Figures(
        joined_s=joined[0] if joined else float("nan"),
        num_moved=moved_of(httpx.get(f"{deployed.service.base_url}/metrics", timeout=30.0).text),
        ends_s=[end_s for _, end_s in found],
        longest_pause_s=max(streamed.longest_pause_s for streamed, _ in found),
        answers=[Told(prompt=streamed.prompt_token_ids, token_ids=streamed.token_ids) for streamed, _ in found],
    )


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--num-requests", type=click.IntRange(min=1), default=24, show_default=True)
@click.option("--max-tokens", type=click.IntRange(min=2), default=700, show_default=True, help="Of each.")
@click.option("--drafts", is_flag=True, help="Of up to four tokens, by one drafter.")
@click.option("--markdown", "markdown_file", type=click.Path(dir_okay=False, writable=True, path_type=Path))
def moves(num_requests: int, max_tokens: int, drafts: bool, markdown_file: Path | None) -> None:
    """Measure what it brings that running requests move to a verifier that joins; fails where a token differs."""
    drafter = {"method": "draft_model", "model": str(draft_path()), "num_speculative_tokens": 4}
    found: dict[str, Figures] = {}
    for name, move_after_s in ARMS.items():
        with deployed_service(
            policy={"requests_per_verifier": float(PER_VERIFIER)},
            router={"mode": "always", "max_draft_length": 4, "move_after_s": move_after_s},
            verifiers={"min_replicas": 1, "max_replicas": 2, **QUICK},
            drafters={"min_replicas": 1, "max_replicas": 1, **QUICK},
            max_num_seqs=PER_VERIFIER,
            threads_per_rank=1,
            kv_cache_memory_bytes=64 << 20,
            speculative_config=drafter,
        ) as deployed:
            prompts = held_out_prompts()
            found[name] = measure(deployed, prompts, num_requests=num_requests, max_tokens=max_tokens, drafts=drafts)
    first = next(iter(found.values()))
    title = (
        f"{describe_machine()}; the embedded target, float32, {'drafts of four' if drafts else 'no drafts'}, a thread "
        f"for each rank, {PER_VERIFIER} requests at a time at a verifier, {num_requests} requests of {max_tokens} "
        "tokens at once."
    )
    rows = [figures.row(name, first) for name, figures in found.items()]
    show(title, markdown_table(HEADINGS, rows, num_left=1), markdown_file)
    pairs = [pair for name, figures in found.items() if figures is not first for pair in figures.pairs(name, first)]
    require_same(compare(pairs, in_float32(EMBEDDED)))
