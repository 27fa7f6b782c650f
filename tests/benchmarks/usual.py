"""`make study NAME=usual`: which drafter a small machine should have where nobody says.

Each candidate drafts in the verifier's process of a real chat model, as the price of each step has it. In a round of so
many requests the same prompts run four times:

    off           plain decoding
    new           the candidate, which has never seen them
    again         the candidate once more: it has seen the answers
    off again     plain decoding, a placebo
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.adaptive import PLAIN_WIDTH, drafted, pinned, priced, speed
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import markdown_table, numbers, show_progress
from outrider.lab.report import describe_machine, files, show_page

if TYPE_CHECKING:
    from outrider.lab.bench.arms import OutriderArm
    from outrider.lab.bench.figures import RunTrace, Workload

CANDIDATES: dict[str, dict[str, Any]] = {
    "look-ups": {"method": "suffix"},
    "head": {"method": "eagle3"},
    "look-ups and head": {"method": "hybrid", "methods": ["suffix", "eagle3"]},
}
OFF, NEW, AGAIN, OFF_AGAIN = "off", "new", "again", "off again"
ORDERS = ((OFF, NEW, AGAIN, OFF_AGAIN), (NEW, OFF, OFF_AGAIN, AGAIN), (NEW, AGAIN, OFF_AGAIN, OFF))  # in turn
MAX_LENGTH = 4
HEADINGS = ("drafts by", "requests", "off, tokens/s", "new / off", "again / off", "off again / off")
HEADINGS += ("drafted", "drafted again")


def rounds(num_prompts: int, concurrencies: Sequence[int], repeats: int) -> Iterator[tuple[int, int, slice]]:
    """Yield (number, requests, which prompts) of every round; no prompt is in two of them while there are more."""
    start = 0
    for repeat in range(repeats):
        for concurrency in concurrencies:
            if start + concurrency > num_prompts:
                raise click.UsageError(f"{num_prompts} prompts are too few: a candidate would know the later ones")
            yield repeat, concurrency, slice(start, start + concurrency)
            start += concurrency


def measure(
    arm: OutriderArm,
    workload: Workload,
    concurrencies: Sequence[int],
    repeats: int,
    on_run: Callable[[str], None],
) -> dict[int, dict[str, list[RunTrace]]]:
    """Return the traces of a candidate, by the number of requests and by what was run."""
    plans = {OFF: pinned(0), NEW: priced(MAX_LENGTH), AGAIN: priced(MAX_LENGTH), OFF_AGAIN: pinned(0)}
    found: dict[int, dict[str, list[RunTrace]]] = {count: {name: [] for name in plans} for count in concurrencies}
    for repeat, concurrency, place in rounds(len(workload.prompts), concurrencies, repeats):
        own = replace(workload, prompts=workload.prompts[place])
        arm.run(replace(own, max_tokens=1), concurrency, plans[OFF])  # from here on their prompts are read
        for name in ORDERS[repeat % len(ORDERS)]:
            on_run(f"{arm.name}, {concurrency} requests, {name}")
            found[concurrency][name].append(arm.run(own, concurrency, plans[name]))
    return found


def rows(name: str, found: dict[int, dict[str, list[RunTrace]]]) -> Iterator[list[str]]:
    """Yield a candidate's rows; a speed is a mean over the rounds."""
    for concurrency, traces in found.items():
        speeds = {arm: statistics.mean(map(speed, traces[arm])) for arm in traces}
        ratios = [f"{speeds[arm] / speeds[OFF]:.3f}" for arm in (NEW, AGAIN, OFF_AGAIN)]
        lengths = [f"{statistics.mean(map(drafted, traces[arm])):.2f}" for arm in (NEW, AGAIN)]
        yield [name, str(concurrency), f"{speeds[OFF]:.1f}", *ratios, *lengths]


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--model", default="smollm2", show_default=True, help="That chats and has a shipped head.")
@click.option("--candidate", "names", type=click.Choice([*CANDIDATES]), multiple=True, help="May be repeated.")
@click.option("--concurrency", "concurrencies", default="1,4,16", show_default=True, callback=numbers)
@click.option("--max-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True)
@files("markdown")
def usual(
    model: str,
    names: tuple[str, ...],
    concurrencies: tuple[int, ...],
    max_tokens: int,
    repeats: int,
    markdown_file: Path | None,
) -> None:
    """Measure what a drafter in the verifier's process brings on new chat, and on answers that it has seen before."""
    from outrider.cluster.config.machine import usable_cores
    from outrider.cluster.config.service_config import ServiceConfig
    from outrider.lab.bench.arms import OutriderArm
    from outrider.lab.bench.figures import Workload
    from outrider.lab.chat_prompts import encoded_prompts

    names = names or (*CANDIDATES,)
    machine, found = describe_machine(), []
    num_runs = len(names) * repeats * len(concurrencies) * len(ORDERS[0])
    with show_progress(num_runs) as on_run:
        for name in names:
            config = ServiceConfig(
                model=model,
                speculative_config={**CANDIDATES[name], "location": "verifier"},
                num_speculative_tokens=MAX_LENGTH,
                max_num_seqs=max(concurrencies),
                threads_per_rank=usable_cores(),
                seed=0,
            )
            prompts = tuple(encoded_prompts(config.verifier_spec.model))
            workload = Workload(prompts=prompts, max_tokens=max_tokens, num_speculative_tokens=MAX_LENGTH)
            with ExitStack() as opening:
                arm = OutriderArm.open(name, config, opening, time.perf_counter, prices_drafts=True)
                found += rows(name, measure(arm, workload, concurrencies, repeats, on_run))
    title = f"{model}; {max_tokens} tokens a request, temperature 0, {repeats} rounds; {machine}."
    page = "\n".join([title, "", *markdown_table(HEADINGS, found)])
    show_page(page, PLAIN_WIDTH, markdown_file)
