"""`make study NAME=experts`: what steps read of a mixture, predicted and counted; experts in host memory.

A CPU has no memory of its own beside the host's. So the device's cache is played by a second place in memory, and the
link by a thread that takes as long for a copy as a link of this speed would.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING

import click

from outrider.cluster.common.server_options import CONTEXT_SETTINGS

if TYPE_CHECKING:
    from outrider.verifier_service.experts.cache import Pair, Wait
    from outrider.verifier_service.messages.expert_shape import ExpertShape
    from outrider.verifier_service.model.decoder import OffloadedExperts
    from outrider.verifier_service.model.runner import ModelRunner

COUNTS = range(1, 17)  # tokens in a step
LEARNT, FORETOLD = range(1, 6), range(8, 17)  # step times that the price has seen, and that it is asked for
NUM_TIMED = 9  # runs of a step, in turn with the others; the median counts
SKEWS = (6.0, 3.0, 1.0, 0.5)  # of the drawn mixture's layers
DRAWN = {
    "hidden_size": 512,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 4,
}
LINKS = {"memory": None, "1 GB/s": 1e9}
HELD, STEPS = (8, 16), (1, 5)


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--folder", type=click.Path(path_type=Path), help="Of the trained mixture. Default: trained anew.")
@click.option("--train-s", type=click.FloatRange(1), default=150.0, show_default=True)
@click.option("--part", type=click.Choice(["train", "price", "offload", "all"]), default="all", show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
def experts(folder: Path | None, train_s: float, part: str, repeats: int) -> None:
    """Count the experts that steps read beside what the price expects; time experts that are fetched."""
    from benchmarks.experts.mixture import train

    folder = folder or Path(tempfile.mkdtemp(prefix="mixture-"))
    if not (folder / "config.json").is_file():
        train(folder, train_s, click.echo)
    if part in ("price", "all"):
        click.echo(price_table(folder))
    if part in ("offload", "all"):
        click.echo(offload_table(folder, repeats))


# --- the price ---


def price_table(folder: Path) -> str:
    """Return both mixtures' errors: experts, and step times."""
    import torch

    from benchmarks.experts.mixture import load, texts
    from tiny.mixtures import skewed_mixture

    torch.set_num_threads(2)
    rng = random.Random(3)
    lines = [
        "| mixture | experts, by routing | experts, uniform | step time, by routing | uniform | no term |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    lines.append(_price_row("trained, 4 of 32", load(folder), texts(12, seed=1)))
    with tempfile.TemporaryDirectory() as drawn:
        skewed_mixture(skews=SKEWS, **DRAWN).save_pretrained(drawn)
        sequences = [[rng.randrange(3, 256) for _ in range(256)] for _ in range(12)]
        lines.append(_price_row("drawn, 4 of 64", load(Path(drawn)), sequences))
    return "\n".join(lines)


def _price_row(name: str, runner: ModelRunner, sequences: list[list[int]]) -> str:
    shape = runner.experts
    assert shape is not None
    shares = _learnt_shares(runner, sequences[:6])
    counted = _counted(runner, sequences[6:])
    errors = [
        mean(abs(shape.num_experts * share(count) - counted[count]) for count in COUNTS)
        for share in (lambda count: shares[count], shape.uniform_share)
    ]
    cells = [f"{error:.2f}" for error in errors]
    return f"| {name} | " + " | ".join(cells + [f"{100 * e:.1f} %" for e in _time_errors(runner, shape, shares)]) + " |"


def _learnt_shares(runner: ModelRunner, sequences: list[list[int]]) -> list[float]:
    from benchmarks.experts.mixture import walk

    routing = runner.model.record_routing()  # type: ignore[union-attr]
    assert routing is not None
    for sequence in sequences:
        for batch in walk(sequence, 16):
            runner.execute(batch)
            routing.count(range(batch.num_tokens), batch.num_tokens)
    return routing.shares().tolist()


def _counted(runner: ModelRunner, sequences: list[list[int]]) -> dict[int, float]:
    from benchmarks.experts.mixture import walk

    routing = runner.model.record_routing()  # type: ignore[union-attr]
    assert routing is not None
    taken: dict[int, list[int]] = {count: [] for count in COUNTS}
    for sequence in sequences:
        for batch in walk(sequence, 16):
            runner.execute(batch)
            for count in COUNTS:
                taken[count] += [len(layer[:count].unique()) for layer in routing.chosen]
    return {count: mean(numbers) for count, numbers in taken.items()}


def _time_errors(runner: ModelRunner, shape: ExpertShape, shares: list[float]) -> list[float]:
    """Return the mean relative error of longer steps' times, foretold from short ones, for three models of them."""
    from outrider.verifier_service.engine.step_profile import measure_step_profile
    from outrider.verifier_service.pricing.cost_model import CostModel, StepShape, StepTimeModel

    profile = measure_step_profile(runner, 64)
    timed = _step_times(runner)
    errors = []
    for experts in (shape, shape, None):
        cost = CostModel(StepTimeModel.from_points(profile.step_times), experts, profile.context)
        if not errors and cost.experts is not None:
            cost.experts.shares = shares
        for count, step_s in [(count, s) for turn in range(NUM_TIMED) for count, s in _turn(timed, turn, LEARNT)]:
            cost.observe(StepShape(count, 64 + count), step_s)
        pairs = [(cost.seconds(StepShape(count, 64 + count)), median(timed[count])) for count in FORETOLD]
        errors.append(mean(abs(told / true - 1.0) for told, true in pairs))
    return errors


def _turn(timed: dict[int, list[float]], turn: int, counts: Sequence[int]) -> list[tuple[int, float]]:
    return [(count, timed[count][turn]) for count in counts]


def _step_times(runner: ModelRunner) -> dict[int, list[float]]:
    """Time a step of each number of tokens after 64 others, in turn; each turn has a text of its own."""
    from benchmarks.experts.mixture import step_of, texts

    timed: dict[int, list[float]] = {count: [] for count in COUNTS}
    for sequence in texts(NUM_TIMED + 1, seed=5):
        runner.execute(step_of(sequence, 0, 64))
        for count, seconds in timed.items():
            batch = step_of(sequence, 64, 64 + count)
            begin_s = time.perf_counter()
            runner.execute(batch)
            seconds.append(time.perf_counter() - begin_s)
    return {count: seconds[1:] for count, seconds in timed.items()}  # the first turn warms up


# --- experts in host memory ---


class PlayedLink:
    """Copies in a thread, one after another, at a link's speed."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._thread = bytes_per_s, ThreadPoolExecutor(1)

    def copy(self, pairs: Sequence[Pair]) -> Wait:
        return self._thread.submit(self._copy, pairs).result

    def _copy(self, pairs: Sequence[Pair]) -> None:
        due_s = time.perf_counter() + sum(source.nbytes for _, source in pairs) / self._bytes_per_s
        for target, source in pairs:
            target.copy_(source)
        time.sleep(max(0.0, due_s - time.perf_counter()))


@dataclass(frozen=True, slots=True)
class Walked:
    """What an arm's steps took."""

    seconds: tuple[float, ...]
    hit_rate: float  # of the experts that layers took
    num_fetched: float  # a layer and step


def offload_table(folder: Path, repeats: int) -> str:
    """Return hit rates and times: all resident, on demand, ahead. Arms run in turn; each step's least time counts."""
    lines = [
        "| held of 32 | tokens a step | link | hits on demand | ahead | fetched on demand | ahead "
        "| ms resident | on demand | ahead | on demand / ahead |",
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for held in HELD:
        for num_tokens in STEPS:
            for link, bytes_per_s in LINKS.items():
                turns = [_turn_of(folder, held, num_tokens, bytes_per_s) for _ in range(repeats)]
                arms = [*zip(*turns, strict=True)]
                step_s = [mean(map(min, zip(*(walked.seconds for walked in arm), strict=True))) for arm in arms]
                cells = [f"{100 * arm[0].hit_rate:.0f} %" for arm in arms[1:]]
                cells += [f"{arm[0].num_fetched:.1f}" for arm in arms[1:]]
                cells += [f"{1e3 * seconds:.2f}" for seconds in step_s] + [f"{step_s[1] / step_s[2]:.2f}"]
                lines.append(f"| {held} | {num_tokens} | {link} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _turn_of(folder: Path, held: int, num_tokens: int, bytes_per_s: float | None) -> tuple[Walked, Walked, Walked]:
    """One thread computes, so that a core is left for the link."""
    from benchmarks.experts.mixture import load

    return (
        _walked(load(folder, num_threads=1), num_tokens, lambda mixtures: None),
        _walked(on_demand(load(folder, held, num_threads=1)), num_tokens, _linked(bytes_per_s)),
        _walked(load(folder, held, num_threads=1), num_tokens, _linked(bytes_per_s)),
    )


def on_demand(runner: ModelRunner) -> ModelRunner:
    """Let nothing be fetched ahead."""
    for mixture in _mixtures(runner):
        mixture.following = None
    return runner


def _mixtures(runner: ModelRunner) -> list[OffloadedExperts]:
    from outrider.verifier_service.model.decoder import OffloadedExperts

    return [layer.mlp for layer in runner.model.layers if isinstance(layer.mlp, OffloadedExperts)]  # type: ignore[union-attr]


def _linked(bytes_per_s: float | None) -> Callable[[list[OffloadedExperts]], None]:
    def link(mixtures: list[OffloadedExperts]) -> None:
        if bytes_per_s is not None:
            played = PlayedLink(bytes_per_s)
            for mixture in mixtures:
                mixture.cache._copier = played

    return link


def _walked(runner: ModelRunner, num_tokens: int, prepare: Callable[[list[OffloadedExperts]], None]) -> Walked:
    """Take a text's steps; what its prompt does, which fills the caches, does not count."""
    from benchmarks.experts.mixture import texts, walk
    from outrider.verifier_service.messages.fetch_counts import FetchCounts

    mixtures = _mixtures(runner)
    prepare(mixtures)
    seconds: list[float] = []
    prompt, *steps = walk(texts(1, seed=7)[0], num_tokens)
    runner.execute(prompt)
    counts = FetchCounts()
    for mixture in mixtures:
        mixture.cache.counts = counts
    for batch in steps:
        begin_s = time.perf_counter()
        runner.execute(batch)
        seconds.append(time.perf_counter() - begin_s)
    hit_rate, num_steps = counts.num_hits / max(1, counts.num_taken), max(1, len(mixtures)) * len(seconds)
    return Walked(tuple(seconds), hit_rate, counts.num_fetched / num_steps)
