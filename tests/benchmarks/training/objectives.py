"""`make study NAME=objectives`: what drafters trained with each `--objective` are served at, by draft position.

Each cell is a drafter of the embedded target, trained as `outrider train-drafter` does on the standard library: the
objectives of one method and seed begin with the same weights and see the same windows and roots. Then our engine
serves it, in the verifier's process: the same parts of held-out files, greedily and at temperature 1 (rejection).

    S_j                      drafts of which the first j tokens were accepted / drafts
    tokens per verification  committed tokens / verifications, the bonus token among them

A difference from `ce` is taken seed by seed. It is beyond noise where the 95 % interval of its mean (Student's t,
paired) leaves out 0. Cells go to RESULTS one by one, and those that are there are not run again, so that a study can be
run in parts; without any left, only the page is written.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from scipy import stats

from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import console_of, markdown_table
from outrider.cluster.offline.llm import LLM
from outrider.cluster.offline.sampling_params import SamplingParams
from outrider.drafter_service.embedded import draft_path, drafter_paths, target_path
from outrider.drafter_service.service.speculative_config import Method as ServedMethod
from outrider.drafter_service.training.distil import DistilOptions, Method, distil_from
from outrider.drafter_service.training.objectives import Objective
from outrider.drafter_service.training.teacher import Teacher
from outrider.drafter_service.training.trainer import Budget
from outrider.lab.bench.pairs import describe_machine
from outrider.lab.embedded.heads import library_corpus, log_step, options_for
from outrider.lab.head.acceptance import rounds_of
from outrider.verifier_service.messages.request import SpeculationMetrics
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.tokenizer import load_tokenizer

PLAIN_WIDTH = 180
SAMPLINGS = {"greedy": 0.0, "temperature 1": 1.0}
PROMPT_TOKENS = 64
ROWS, WINDOW = 2, 256  # of a training step
RATE_SCALE = 0.3  # of a drafter that exists: runs are short, so that it learns faster than it would in hours
KV_BYTES = 1 << 28
CONFIDENCE = 0.95
# a shipped drafter, that steps of minutes can be about more than its first guess; None: a new one
STARTS: dict[Method, Path | None] = {
    "parallel-draft": draft_path(),
    "eagle3": drafter_paths()[ServedMethod.EAGLE3],
    "medusa": None,
    "dflash": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What one trained drafter was served at, with one kind of sampling."""

    method: str
    objective: str
    seed: int
    sampling: str
    num_drafts: int
    num_rounds: int
    num_committed: int
    accepted: tuple[int, ...]  # drafts of which at least so many tokens were accepted, from one on

    @property
    def tokens_per_verification(self) -> float:
        return self.num_committed / self.num_rounds

    def survival(self, num_positions: int) -> list[float]:
        """Return S_1 .. S_k."""
        padded = itertools.chain(self.accepted, itertools.repeat(0))
        return [number / self.num_drafts for number in itertools.islice(padded, num_positions)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How long each cell trains, and what it is served."""

    num_steps: int
    num_positions: int
    num_prompts: int
    max_tokens: int


def mean_and_spread(values: Sequence[float]) -> str:
    """Write a mean, and the standard deviation over seeds where there are several."""
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def half_width(differences: Sequence[float]) -> float:
    """Return how far the mean of two or more paired differences is uncertain."""
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(differences) - 1))
    return quantile * statistics.stdev(differences) / len(differences) ** 0.5


def to_rows(found: Sequence[Served], num_positions: int) -> list[str]:
    """Write a table: a row for each method, sampling and objective."""
    headings = ["drafter", "sampling", "objective", "tokens per verification", "beside ce", ""]
    rows = []
    groups: dict[tuple[str, str], dict[str, dict[int, Served]]] = {}
    for each in found:
        by_objective = groups.setdefault((each.method, each.sampling), {})
        by_objective.setdefault(each.objective, {})[each.seed] = each
    for (method, sampling), by_objective in groups.items():
        for objective, seeds in by_objective.items():
            tokens = {seed: each.tokens_per_verification for seed, each in seeds.items()}
            survivals = zip(*(each.survival(num_positions) for each in seeds.values()), strict=True)
            rows.append(
                [method, sampling, objective, mean_and_spread([*tokens.values()])]
                + _beside(tokens, by_objective.get(Objective.CE, {}))
                + [f"{statistics.mean(each):.3f}" for each in survivals]
            )
    return markdown_table([*headings, *(f"S_{j + 1}" for j in range(num_positions))], rows, num_left=3)


def _beside(tokens: Mapping[int, float], plain: Mapping[int, Served]) -> list[str]:
    """Write the difference from `ce`, seed by seed, and what is to be thought of it."""
    pairs = [value - plain[seed].tokens_per_verification for seed, value in tokens.items() if seed in plain]
    if not pairs or not any(pairs):
        return ["", ""]
    if len(pairs) == 1:
        return [f"{pairs[0]:+.3f}", "one seed"]
    mean, width = statistics.mean(pairs), half_width(pairs)
    return [f"{mean:+.3f} ± {width:.3f}", "beyond noise" if abs(mean) > width else "noise"]


class Bench:
    """Trains and serves cells; the target and the text are loaded once."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._tokenizer: Any = load_tokenizer(ModelConfig(path=str(target_path())))
        self._corpus = library_corpus(self._tokenizer)
        self._teacher = Teacher.load(target_path(), torch.device("cpu"))
        text = self._corpus.held_out.token_ids
        begins = range(0, len(text) - PROMPT_TOKENS, (len(text) - PROMPT_TOKENS) // sizes.num_prompts)
        self._prompts = [text[begin : begin + PROMPT_TOKENS].tolist() for begin in begins[: sizes.num_prompts]]

    def run(self, method: Method, objective: Objective, seed: int) -> list[Served]:
        """Train one drafter and serve it with every kind of sampling."""
        with tempfile.TemporaryDirectory() as folder:
            options = self._options(method, objective, seed, Path(folder))
            distil_from(options, self._teacher, self._tokenizer, self._corpus, log_step)
            return [
                _served(method, objective, seed, sampling, metrics)
                for sampling, metrics in self._serve(method, options.output).items()
            ]

    def _options(self, method: Method, objective: Objective, seed: int, folder: Path) -> DistilOptions:
        return replace(
            options_for(method, folder, minutes=1.0, resume=False),
            budget=Budget(num_steps=self._sizes.num_steps),
            objective=objective,
            seed=seed,
            init_from=STARTS[method],
            rate_scale=RATE_SCALE if STARTS[method] else None,
            rows=ROWS,
            window=WINDOW,
            num_positions=self._sizes.num_positions,
            eval_windows=ROWS,
        )

    def _serve(self, method: Method, folder: Path) -> dict[str, SpeculationMetrics]:
        config = {
            "method": method.replace("-", "_"),
            "model": str(folder),
            "location": "verifier",
            "num_speculative_tokens": self._sizes.num_positions,
        }
        llm = LLM(
            target_path(), speculative_config=config, speculation="always", seed=0, kv_cache_memory_bytes=KV_BYTES
        )
        with contextlib.closing(llm):
            asked = [{"prompt_token_ids": prompt} for prompt in self._prompts]
            return {
                name: _sum(
                    output.metrics
                    for output in llm.generate(
                        asked,
                        SamplingParams(temperature=temperature, max_tokens=self._sizes.max_tokens, ignore_eos=True),
                    )
                )
                for name, temperature in SAMPLINGS.items()
            }


def _sum(parts: Iterable[SpeculationMetrics]) -> SpeculationMetrics:
    total = SpeculationMetrics()
    for each in parts:
        total = total.plus(each)
    return total


def _served(method: str, objective: str, seed: int, sampling: str, metrics: SpeculationMetrics) -> Served:
    rounds = rounds_of(metrics)
    return Served(
        method=method,
        objective=objective,
        seed=seed,
        sampling=sampling,
        num_drafts=metrics.num_drafts,
        num_rounds=rounds.num_rounds,
        num_committed=rounds.num_committed,
        accepted=tuple(metrics.num_accepted_per_position),
    )


def read_results(file: Path) -> list[Served]:
    """Return the cells that were run."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [Served(**(fields | {"accepted": tuple(fields["accepted"])})) for fields in map(json.loads, lines)]


def _integers(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError as error:
        raise click.BadParameter("expected integers with commas between them") from error


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option(
    "--method",
    "methods",
    type=click.Choice(tuple(STARTS)),
    multiple=True,
    default=("parallel-draft", "eagle3"),
    show_default=True,
)
@click.option("--seeds", default="0,1,2", show_default=True, callback=_integers)
@click.option("--steps", "num_steps", type=click.IntRange(1), default=100, show_default=True)
@click.option("--num-speculative-tokens", "num_positions", type=click.IntRange(2), default=4, show_default=True)
@click.option("--num-prompts", type=click.IntRange(1), default=32, show_default=True)
@click.option("--max-tokens", type=click.IntRange(2), default=96, show_default=True)
@click.option("--num-cells", type=click.IntRange(0), help="Run so many cells more. Default: all.")
@click.option(
    "--results", type=click.Path(dir_okay=False, path_type=Path), default="build/objectives.jsonl", show_default=True
)
@click.option("--markdown", "markdown_file", type=click.Path(dir_okay=False, writable=True, path_type=Path))
def objectives(
    methods: tuple[Method, ...],
    seeds: tuple[int, ...],
    num_cells: int | None,
    results: Path,
    markdown_file: Path | None,
    **options: Any,
) -> None:
    """Train drafters of the embedded target with each objective, and count what they are served at by position."""
    sizes = Sizes(**options)
    known = {(each.method, each.objective, each.seed) for each in read_results(results)}
    cells = itertools.product(seeds, methods, Objective)  # a seed after the other: all arms after the first part
    missing = [(method, objective, seed) for seed, method, objective in cells if (method, objective, seed) not in known]
    if missing[:num_cells]:
        bench = Bench(sizes)
        results.parent.mkdir(parents=True, exist_ok=True)
        for method, objective, seed in missing[:num_cells]:
            with results.open("a") as file:
                file.writelines(f"{json.dumps(asdict(each))}\n" for each in bench.run(method, objective, seed))
    sizes_told = f"{sizes.num_steps} steps; {sizes.num_prompts} prompts x {sizes.max_tokens} tokens"
    page = "\n".join([f"{describe_machine()}; {sizes_told}", "", *to_rows(read_results(results), sizes.num_positions)])
    console_of(PLAIN_WIDTH).print(page, highlight=False)
    if markdown_file is not None:
        markdown_file.write_text(f"{page}\n")
