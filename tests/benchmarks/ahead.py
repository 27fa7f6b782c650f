"""`make study NAME=ahead`: what running ahead brings, offline, one request at a time, a core for each model.

    co-located                 verifier and drafter take turns on all cores
    a core each                the drafter in a process of its own; the verifier waits for every draft
    a core each, N outcomes    the drafter drafts for the N likeliest outcomes while the verifier verifies

All arms are open at once and take turns, in another order in every repeat; figures are medians over the repeats, and
defined in `ahead_figures`. Nothing heavy is imported before the verb runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from benchmarks import ahead_figures
from benchmarks.ahead_figures import AheadModel, AheadRun, fit, median
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import console_of, markdown_table, numbers, show_progress

if TYPE_CHECKING:
    from rich.table import Table

    from outrider.cluster.config.service_config import ServiceConfig
    from outrider.lab.bench.arms import OutriderArm
    from outrider.lab.bench.figures import Machine
    from outrider.lab.bench.pairs import BenchOptions

OFF, SHARED, APART = "off", "co-located", "a core each"
EMBEDDED_INFLATE_TO = 100e6
NOTHING = "-"
PLAIN_WIDTH = 140  # columns of text where the output is no terminal
REPORT_PATIENCE_S = 0.5  # a drafter tells its counters every 0.2 s
LINKS_S = (0.0, 0.001, 0.005, 0.02)
HEADINGS = (
    "arm",
    "time per token",
    "off / arm",
    "tokens per round",
    "accepted",
    "hit rate",
    "verifier idle",
    "step",
    "ahead tokens",
)


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--outcomes", default="1,2,4,8", show_default=True, callback=numbers, help="Prepared for, by arm.")
@click.option(
    "--method",
    type=click.Choice(["draft_model", "eagle3"]),
    default="draft_model",
    show_default=True,
    help="Of the embedded drafters, which one.",
)
@click.option("--num-speculative-tokens", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option("--max-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Of every prompt.")
@click.option("--num-prompts", type=click.IntRange(min=1), default=4, show_default=True, help="The first of them.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True)
@click.option(
    "--inflate",
    "inflate_to",
    type=click.FloatRange(min=0),
    default=EMBEDDED_INFLATE_TO,
    show_default=True,
    help="Parameters of the target, of equal outputs; 0: as it is.",
)
@click.option("--markdown", "markdown_file", type=click.Path(dir_okay=False, writable=True, path_type=Path))
def ahead(
    outcomes: tuple[int, ...],
    method: str,
    num_speculative_tokens: int,
    temperature: float,
    max_tokens: int,
    num_prompts: int,
    repeats: int,
    inflate_to: float,
    markdown_file: Path | None,
) -> None:
    """Draft for the likely outcomes of a verification while it runs: hit rate and time per token by their number."""
    from outrider.cluster.config.service_config import ServiceConfig
    from outrider.lab.bench.figures import Workload
    from outrider.lab.bench.pairs import BenchOptions, describe_machine, pairs, read_prompts

    config = ServiceConfig(num_speculative_tokens=num_speculative_tokens, speculative_config={"method": method}, seed=0)
    workload = Workload(
        prompts=read_prompts(config, None)[:num_prompts],
        max_tokens=max_tokens,
        temperature=temperature,
        num_speculative_tokens=num_speculative_tokens,
    )
    try:
        options = BenchOptions(
            config=config, workload=workload, concurrencies=(1,), repeats=repeats, inflate_to=int(inflate_to)
        )
        machine = describe_machine()
        with pairs(options) as named, show_progress(options.repeats * (3 + len(outcomes))) as on_run:
            runs = run_arms(options, named[-1][1], outcomes, on_run)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    console = console_of(PLAIN_WIDTH)
    console.print(to_table(runs))
    console.print("\n".join(verdict(runs)))
    if markdown_file is not None:
        markdown_file.write_text(to_markdown(runs, machine, options))


# --- measuring ---


def ahead_arm(num_outcomes: int) -> str:
    return f"{APART}, {num_outcomes} outcome{'s' if num_outcomes > 1 else ''}"


class CountedArm:
    """An arm of the benchmark and what its engines counted during a run."""

    def __init__(self, arm: OutriderArm) -> None:
        self.arm = arm

    def run(self, options: BenchOptions) -> AheadRun:
        """Generate everything once, after a warm-up that does not count."""
        from outrider.lab.bench.arms import placed

        workload = options.workload
        stats = self.arm.offline.engine.stats
        with placed(self.arm.cores, self.arm.num_threads):
            self.arm.run(dataclasses.replace(workload, prompts=workload.prompts[:1], max_tokens=8), 1)
            before, busy_s = self._counters(), stats.busy_s
            trace = self.arm.run(workload, 1)
            after = self._counters()
        return AheadRun(
            elapsed_s=trace.elapsed_s,
            busy_s=stats.busy_s - busy_s,
            num_tokens=sum(len(request.token_ids) for request in trace.requests),
            num_steps=trace.num_target_steps,
            num_drafts=trace.drafts.num_drafts,
            num_draft_tokens=trace.drafts.num_draft_tokens,
            num_accepted_tokens=trace.drafts.num_accepted_tokens,
            num_hits=after[0] - before[0],
            num_misses=after[1] - before[1],
            num_ahead_tokens=after[2] - before[2],
        )

    def _counters(self) -> tuple[int, int, int]:
        """Return hits, misses and ahead tokens as the drafter tells them once it has nothing more to do."""
        from outrider.cluster.offline.engine import PipeDraftClient

        client = self.arm.offline.drafts
        if not isinstance(client, PipeDraftClient):
            return 0, 0, 0
        time.sleep(REPORT_PATIENCE_S)
        client.poll()  # between runs: nothing that it says belongs to a request
        assert client.load is not None, "the drafter has told nothing of its load"
        counters = client.load.counters
        return counters.num_cache_hits, counters.num_cache_misses, counters.num_ahead_tokens


def run_arms(
    options: BenchOptions, config: ServiceConfig, outcomes: Sequence[int], on_run: Callable[[str], None]
) -> dict[str, list[AheadRun]]:
    """Run every arm as often as asked, in turn; by arm, one run per repeat. `on_run` hears which comes next."""
    from outrider.lab.bench.pairs import plan_runs

    with contextlib.ExitStack() as opening:
        arms = dict(_open_arms(opening, config, outcomes))
        runs: dict[str, list[AheadRun]] = {name: [] for name in arms}
        for _, _, name in plan_runs(list(arms), (1,), options.repeats):
            on_run(name)
            runs[name].append(arms[name].run(options))
    return runs


def _open_arms(
    opening: contextlib.ExitStack, config: ServiceConfig, outcomes: Sequence[int]
) -> Iterator[tuple[str, CountedArm]]:
    import os

    from outrider.lab.bench.arms import OutriderArm

    for name, way in arm_configs(config, outcomes, num_cores=len(os.sched_getaffinity(0))).items():
        arm = OutriderArm.open(name, way, opening, time.perf_counter, drafter_process=name != SHARED)
        yield name, CountedArm(arm)


def arm_configs(config: ServiceConfig, outcomes: Sequence[int], *, num_cores: int) -> dict[str, ServiceConfig]:
    """Return what each arm is: `OFF` and `SHARED` on all cores, the others with one for each model."""
    shared = config.with_options(threads_per_rank=num_cores)
    ways = {OFF: shared.with_options(num_drafters=0), SHARED: shared}
    for number in (0, *outcomes):
        name = ahead_arm(number) if number else APART
        speculative_config = {**config.drafting.speculative_config, "ahead_branches": number}
        ways[name] = config.with_options(threads_per_rank=1, speculative_config=speculative_config)
    return ways


# --- the report ---


def cells(name: str, runs: Sequence[AheadRun], baseline: Sequence[AheadRun]) -> list[str]:
    """Write one row under `HEADINGS`."""

    def number(value: float | None, form: str) -> str:
        return NOTHING if value is None else form.format(value)

    ratios = [plain.token_s / run.token_s for plain, run in zip(baseline, runs, strict=True)]
    is_apart = name.startswith(APART)
    return [
        name,
        number(median(runs, lambda run: run.token_s * 1e3), "{:.2f} ms"),
        f"{sorted(ratios)[len(ratios) // 2]:.2f}",
        number(median(runs, lambda run: run.tokens_per_round), "{:.2f}"),
        number(median(runs, lambda run: run.acceptance_rate), "{:.0%}"),
        number(median(runs, lambda run: run.hit_rate), "{:.0%}"),
        number(median(runs, lambda run: run.idle_share) if is_apart else None, "{:.0%}"),
        number(median(runs, lambda run: run.step_s * 1e3), "{:.1f} ms"),
        number(median(runs, lambda run: run.ahead_per_token) if is_apart else None, "{:.1f}"),
    ]


def rows(runs: Mapping[str, Sequence[AheadRun]]) -> list[list[str]]:
    return [cells(name, found, runs[OFF]) for name, found in runs.items()]


def to_table(runs: Mapping[str, Sequence[AheadRun]]) -> Table:
    """Draw the figures for a terminal."""
    from rich.table import Table

    table = Table()
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == HEADINGS[0] else "right")
    for row in rows(runs):
        table.add_row(*row)
    return table


def best_ahead(runs: Mapping[str, Sequence[AheadRun]]) -> str:
    """Name the arm that runs ahead with the least time per token."""
    names = [name for name in runs if name.startswith(f"{APART},")]
    return min(names, key=lambda name: median(runs[name], lambda run: run.token_s) or 0.0)


def verdict(runs: Mapping[str, Sequence[AheadRun]]) -> list[str]:
    """Say who wins here, and from where on running ahead does."""
    best = best_ahead(runs)
    times = {name: (median(runs[name], lambda run: run.token_s) or 0.0) * 1e3 for name in (SHARED, APART, best)}
    model = fit(runs[APART], runs[best], runs[SHARED])
    winner = min(times, key=times.__getitem__)
    shares = ", ".join(f"{name} {time_ms:.2f} ms" for name, time_ms in times.items())
    lines = [
        f"Here the least time per token has: {winner} ({shares}).",
        f"Measured for the model: verification on one core {model.verify_s * 1e3:.1f} ms, on both "
        f"{model.verify_shared_s * 1e3:.1f} ms; a draft of {model.num_forwards:.1f} forwards, each "
        f"{model.cost:.1%} of a verification; a miss waits for {model.num_miss_forwards:.1f}; "
        f"hit rate {model.hit_rate:.0%}. The model holds up to {model.max_cost:.0%} of a verification.",
    ]
    return lines + [f"- {line}" for line in _thresholds(model)]


def _thresholds(model: AheadModel) -> Iterator[str]:
    alone = dataclasses.replace(model, verify_shared_s=model.verify_s)
    for link_s in LINKS_S:
        where = "no link to speak of" if link_s == 0.0 else f"a link of {link_s * 1e3:g} ms there and back"
        yield (
            f"{where}: running ahead beats co-located drafting on both cores {_from(model, link_s)}, and "
            f"co-located drafting on the verifier's core {_from(alone, link_s)}"
        )


def _from(model: AheadModel, link_s: float) -> str:
    cost = model.least_cost(link_s)
    if cost is None or cost > model.max_cost:
        return f"nowhere up to {model.max_cost:.0%}"
    return f"where a draft forward costs more than {cost:.1%} of a verification" if cost else "always"


def to_markdown(runs: Mapping[str, Sequence[AheadRun]], machine: Machine, options: BenchOptions) -> str:
    """Write a page: the machine, the table, who wins, and what the names mean."""
    workload = options.workload
    target = f"inflated to {options.inflate_to / 1e6:.4g} M parameters" if options.inflate_to else "as shipped"
    lines = [
        "# Running ahead",
        "",
        f"`make study NAME=ahead`: {machine}; {time.strftime('%Y-%m-%d')}. The embedded target, {target}, "
        f"drafter {options.config.speculative.method}; "
        f"{len(workload.prompts)} prompts of {workload.max_tokens} tokens one after another, temperature "
        f"{workload.temperature:g}, drafts of {workload.num_speculative_tokens} tokens; {options.repeats} repeats, "
        "arms in turn, medians; off / arm is the median of each repeat's own ratio.",
        "",
        *markdown_table(HEADINGS, rows(runs), num_left=1),
        "",
        *verdict(runs),
        "",
        "```",
        inspect.getdoc(ahead_figures) or "",
        "```",
    ]
    return "\n".join(lines) + "\n"
