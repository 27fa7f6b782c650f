"""A day of a service whose pools follow the price: a real one on three raylets, recorded as its policy saw it.

    PYTHONPATH=tests python -m services.scaling_day --record tests/cluster/scaling/recorded_day.jsonl.gz

The table goes into docs/results/scaling.md. The target is inflated so that drafts pay for one stream and not for many;
targets per replica are out of reach, so that nothing but the price moves the pools. Every stream is compared with plain
decoding.
`test_days.py` decides the record again.
"""

from __future__ import annotations

import gzip
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import click
import httpx

from outrider.drafter_service.embedded import draft_path, held_out_prompts, target_path
from outrider.lab.bench.inflate import inflate
from services.raylets import QUICK, Deployed, deployed_service

POLICY = {"requests_per_verifier": 1000.0, "sessions_per_drafter": 1000.0, "queue_per_drafter": 1000.0}
DRAFTER = {"method": "draft_model", "model": str(draft_path()), "num_speculative_tokens": 4}
MAX_TOKENS = 48
INTERVAL_S = 1.0


@dataclass(frozen=True)
class Phase:
    name: str
    seconds: float
    num_streams: int


DAY = (
    Phase("night", 15.0, 0),
    Phase("morning", 45.0, 1),
    Phase("noon", 75.0, 48),
    Phase("evening", 75.0, 1),
    Phase("night", 30.0, 0),
)


@dataclass(frozen=True)
class Sample:
    """What ran at a moment."""

    at_s: float
    phase: Phase
    sizes: dict[str, int]
    price: float | None
    num_finished: int  # requests, and their drafts, until then
    num_drafts: int


class Streams:
    """As many greedy streams at once as are wanted, one after the other in each place."""

    def __init__(self, deployed: Deployed, prompts: list[str]) -> None:
        self._deployed = deployed
        self._expected = [(prompt, self._plain_text(prompt)) for prompt in prompts]
        self._change = threading.Condition()
        self._num_wanted = 0
        self._is_over = False
        self.num_finished = self.num_changed = self.num_drafts = 0

    def _plain_text(self, prompt: str) -> str:
        return self._deployed.stream(prompt, max_tokens=MAX_TOKENS, disable_spec_decode=True).text

    def want(self, num_streams: int, *, is_over: bool = False) -> None:
        with self._change:
            self._num_wanted, self._is_over = num_streams, is_over
            self._change.notify_all()

    def counts(self) -> tuple[int, int]:
        """Return how many requests have ended, and how many drafts they had."""
        with self._change:
            return self.num_finished, self.num_drafts

    def run(self, place: int) -> None:
        """Stream in one place until the day is over; raises what a client would see."""
        prompt, expected = self._expected[place % len(self._expected)]
        while True:
            with self._change:
                self._change.wait_for(lambda: self._is_over or place < self._num_wanted)
                if self._is_over:
                    return
            streamed = self._deployed.stream(prompt, max_tokens=MAX_TOKENS)
            with self._change:
                self.num_finished += 1
                self.num_changed += streamed.text != expected
                self.num_drafts += streamed.speculation["num_drafts"]


def live(deployed: Deployed, streams: Streams) -> list[Sample]:
    """Let the day pass; return what ran, every second."""
    url = f"{deployed.service.base_url}/load"
    begin_s = end_s = time.monotonic()
    samples: list[Sample] = []
    for phase in DAY:
        end_s += phase.seconds
        streams.want(phase.num_streams)
        while time.monotonic() < end_s:
            verifiers = httpx.get(url).json()["verifiers"]
            prices = [verifier["price"] for verifier in verifiers if verifier["price"] is not None]
            price = sum(prices) / len(prices) if prices else None
            samples.append(Sample(time.monotonic() - begin_s, phase, deployed.sizes, price, *streams.counts()))
            time.sleep(INTERVAL_S)
    streams.want(0, is_over=True)
    return samples


def to_markdown(samples: list[Sample], streams: Streams) -> str:
    """Draw the changes of sizes, and every tenth sample."""
    lines = [
        "| second | phase | streams | verifiers | drafters | price | requests | drafts |",
        "|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    before: dict[str, int] = {}
    for place, sample in enumerate(samples):
        if sample.sizes != before or place % 10 == 0:
            price = "" if sample.price is None else f"{sample.price:.2f}"
            phase = f"{sample.phase.name} | {sample.phase.num_streams}"
            sizes = f"{sample.sizes['Verifier']} | {sample.sizes['Drafter']}"
            counts = f"{sample.num_finished} | {sample.num_drafts}"
            lines.append(f"| {sample.at_s:.0f} | {phase} | {sizes} | {price} | {counts} |")
        before = sample.sizes
    counts = f"{streams.num_finished} requests, {streams.num_changed} with another text than plain decoding gives"
    return "\n".join([*lines, "", f"{counts}, {streams.num_drafts} drafts.", ""])


@click.command()
@click.option("--num-params", default=100_000_000, show_default=True, help="that the target is inflated to")
@click.option("--record", type=click.Path(dir_okay=False, path_type=Path), required=True)
def main(num_params: int, record: Path) -> None:
    """Live through the day once."""
    with tempfile.TemporaryDirectory() as folder:
        inflate(target_path(), Path(folder), num_params)
        plain_record = Path(folder, "day.jsonl")
        with deployed_service(
            policy={**POLICY, "recorded_to": str(plain_record)},
            router={"mode": "auto", "max_draft_length": 4},
            verifiers={"min_replicas": 1, "max_replicas": 2, **QUICK},
            drafters={"min_replicas": 0, "initial_replicas": 1, "max_replicas": 2, **QUICK},
            model=folder,
            speculative_config=DRAFTER,
            max_num_batched_tokens=64,
        ) as deployed:
            num_places = max(phase.num_streams for phase in DAY)
            streams = Streams(deployed, held_out_prompts())
            with ThreadPoolExecutor(num_places) as threads:
                places = [threads.submit(streams.run, place) for place in range(num_places)]
                try:
                    samples = live(deployed, streams)
                finally:
                    streams.want(0, is_over=True)
                for place in places:
                    place.result()
        click.echo(to_markdown(samples, streams))
        record.write_bytes(gzip.compress(plain_record.read_bytes(), mtime=0))


if __name__ == "__main__":
    main()
