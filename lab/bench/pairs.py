"""`outrider bench`: the same prompts through transformers and Outrider, in one run, without a server.

    for each pair:                       as shipped, then with the target inflated
        open every arm once
        for each repeat:                 the machine's read speed is measured anew
            for each concurrency:
                for each arm:            in another order in each repeat; warmed up first

so that whatever else the machine does hits all arms alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.cluster.config.pool_options import checkpoint_of
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.offline.prompts import PromptError, parse_prompt, read_prompt_lines
from outrider.drafter_service import embedded
from outrider.lab.bench.arms import Arm, Clock, open_arms, placed
from outrider.lab.bench.figures import (
    APART,
    LIBRARY,
    LIBRARY_ASSISTED,
    OFF,
    SHARED,
    BenchResult,
    Measurement,
    Row,
    Workload,
    answer_pairs,
    rows_of,
)
from outrider.lab.bench.inflate import inflate
from outrider.lab.report import describe_machine
from outrider.lab.same_tokens import Tally, compare, plain_decoding
from outrider.verifier_service.model.architectures import load_model_description, resolve_folder
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.empty_model import build_empty_model
from outrider.verifier_service.model.settled import resolve_device, resolve_dtype, resolve_max_model_len
from outrider.verifier_service.model.tokenizer import load_tokenizer

PROMPT_FIELDS = {"prompt", "prompt_token_ids"}
WARM_UP_TOKENS = 8
READ_BYTES = 256 << 20  # far more than any cache holds
NUM_READS = 3

OnRun = Callable[[str], None]
ReadSpeed = Callable[[Clock], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to measure. Raises `ValueError` naming the field that is out of range."""

    config: ServiceConfig
    workload: Workload
    concurrencies: tuple[int, ...] = (1, 4, 16)
    repeats: int = 3
    with_peers: bool = True
    inflate_to: int = 0  # parameters of the target in a second pair; 0: no such pair

    def __post_init__(self) -> None:
        if not self.concurrencies or min(self.concurrencies) < 1:
            raise ValueError("concurrency must be at least 1")
        if self.repeats < 1:
            raise ValueError("repeats must be at least 1")
        if self.inflate_to < 0:
            raise ValueError("inflate must be at least 0")
        if not self.workload.prompts:
            raise ValueError("prompts: there are none")
        if self.workload.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")

    @property
    def arm_names(self) -> tuple[str, ...]:
        peers = (LIBRARY, LIBRARY_ASSISTED) if self.with_peers else ()
        names = (*peers, OFF, SHARED, APART)
        drafting = self.config.drafter_spec is not None and self.workload.num_speculative_tokens > 0
        return names if drafting else tuple(name for name in names if name in (LIBRARY, OFF))

    @property
    def num_runs(self) -> int:
        """Return how many measured runs there will be."""
        return (1 + bool(self.inflate_to)) * self.repeats * len(self.concurrencies) * len(self.arm_names)

    @property
    def baseline(self) -> str:
        """Name the arm that the others are compared with."""
        return LIBRARY if self.with_peers else OFF


def read_prompts(config: ServiceConfig, path: Path | None) -> tuple[tuple[int, ...], ...]:
    """Read prompts as token ids of the target; raises `PromptError` where a line brings more than a prompt."""
    path = path or embedded.HERE / "prompts.jsonl"
    tokenizer = load_tokenizer(config.verifier_spec.model)
    prompts = []
    for number, line in enumerate(read_prompt_lines(path), start=1):
        if extra := line.keys() - PROMPT_FIELDS:
            raise PromptError(f"{path}: prompt {number}: every prompt is run alike, {sorted(extra)[0]!r} has no place")
        prompt = parse_prompt(line, f"{path}: prompt {number}")
        token_ids = tokenizer(prompt.text)["input_ids"] if prompt.token_ids is None else prompt.token_ids
        prompts.append(tuple(token_ids))
    return tuple(prompts)


def run_bench(
    options: BenchOptions, named_pairs: Sequence[tuple[str, ServiceConfig]], *, clock: Clock, on_run: OnRun
) -> BenchResult:
    """Measure all arms on all pairs; `on_run` hears what is run next."""
    machine = describe_machine()
    rows: list[Row] = []
    tallies: list[Tally] = []
    measurements: list[Measurement] = []
    is_greedy = options.workload.temperature == 0.0
    for pair, config in named_pairs:
        weight_bytes = streamed_weight_bytes(config.verifier_spec.model)
        found = _measure_pair(config, options, clock=clock, on_run=_of_pair(pair, on_run))
        gc.collect()  # the next pair's models need the room
        measurements += found
        rows += rows_of(pair, found, weight_bytes, baseline=options.baseline, compare=is_greedy)
        if is_greedy:
            answers = answer_pairs(pair, found, options.workload.prompts)
            tallies.append(compare(answers, plain_decoding(config.verifier_spec.model)))
    return BenchResult(
        machine=machine,
        target=options.config.model.target_path,
        draft=checkpoint_of(options.config.speculative, options.config.model.model),
        baseline=options.baseline,
        workload=options.workload,
        repeats=options.repeats,
        read_bytes_per_s=_median_reads(measurements),
        rows=tuple(rows),
        tallies=tuple(tallies),
    )


def _of_pair(pair: str, on_run: OnRun) -> OnRun:
    return lambda run: on_run(f"{pair}: {run}")


def _measure_pair(config: ServiceConfig, options: BenchOptions, *, clock: Clock, on_run: OnRun) -> list[Measurement]:
    with contextlib.ExitStack() as opening:
        arms = open_arms(opening, config, options.arm_names, clock)
        return measure(arms, options, clock=clock, on_run=on_run)


def _median_reads(measurements: Sequence[Measurement]) -> dict[int, float]:
    reads: dict[int, list[float]] = {}
    for measurement in measurements:
        reads.setdefault(measurement.num_threads, []).append(measurement.read_bytes_per_s)
    return {num_threads: statistics.median(values) for num_threads, values in sorted(reads.items())}


# --- pairs ---


@contextlib.contextmanager
def pairs(options: BenchOptions) -> Iterator[list[tuple[str, ServiceConfig]]]:
    """Name the pairs to measure; an inflated checkpoint is removed at the end.

    Raises `ValueError` where prompts are too long or the target cannot be inflated: before anything is measured.
    """
    _check_lengths(options)
    # repeats of one prompt must not find it in a cache that the library has not
    config = options.config.with_options(enable_prefix_caching=False)
    named = [("as given" if config.model.model else "as shipped", config)]
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        if options.inflate_to:
            inflate(resolve_folder(config.verifier_spec.model), Path(folder), options.inflate_to)
            draft = checkpoint_of(config.speculative, config.model.model)
            inflated = config.with_options(model=folder, draft_model=draft)
            named.append((f"target inflated to {options.inflate_to / 1e6:.4g} M", inflated))
        yield named


def _check_lengths(options: BenchOptions) -> None:
    model, workload = options.config.verifier_spec.model, options.workload
    limit = resolve_max_model_len(model, load_model_description(resolve_folder(model), model))
    longest = max(len(prompt) for prompt in workload.prompts)
    if longest + workload.max_tokens > limit:
        raise ValueError(f"max_tokens must be at most {limit - longest}: the longest prompt has {longest} tokens")


# --- measuring ---


def plan_runs(names: Sequence[str], concurrencies: Sequence[int], repeats: int) -> Iterator[tuple[int, int, str]]:
    """Yield (repeat, concurrency, arm) so that all arms meet the same moments of the machine.

    After as many repeats as there are arms (twice as many of an odd number), each has run in each place equally often,
    and right after each other one, whose traces a machine may still bear (Williams, "Experimental Designs Balanced for
    the Estimation of Residual Effects of Treatments", 1949).
    """
    for repeat in range(repeats):
        order = _williams_order(len(names), repeat)
        for concurrency in concurrencies:
            for place in order:
                yield repeat, concurrency, names[place]


def _williams_order(num_arms: int, repeat: int) -> list[int]:
    zigzag = [((place + 1) // 2 if place % 2 else -place // 2) % num_arms for place in range(num_arms)]
    arm_of = {step: arm for arm, step in enumerate(zigzag)}  # so that the first repeat has the arms in their own order
    order = [arm_of[(step + repeat) % num_arms] for step in zigzag]
    return order[::-1] if num_arms % 2 and repeat % 2 else order


def measure(
    arms: Sequence[Arm],
    options: BenchOptions,
    *,
    clock: Clock,
    on_run: OnRun,
    read_speed: ReadSpeed | None = None,
) -> list[Measurement]:
    """Run every arm at every concurrency as often as asked, each after a warm-up that does not count."""
    by_name = {arm.name: arm for arm in arms}
    speeds: dict[tuple[int, int], float] = {}
    measurements: list[Measurement] = []
    for repeat, concurrency, name in plan_runs(list(by_name), options.concurrencies, options.repeats):
        on_run(f"{name}, concurrency {concurrency}")
        arm = by_name[name]
        with placed(arm.cores, arm.num_threads):
            if (repeat, arm.num_threads) not in speeds:
                speeds[repeat, arm.num_threads] = (read_speed or measure_read_speed)(clock)
            arm.run(warm_up(options.workload, concurrency), concurrency)
            trace = arm.run(options.workload, concurrency)
        measurements.append(
            Measurement(
                arm=name,
                num_threads=arm.num_threads,
                concurrency=concurrency,
                repeat=repeat,
                trace=trace,
                read_bytes_per_s=speeds[repeat, arm.num_threads],
            )
        )
    return measurements


def warm_up(workload: Workload, concurrency: int) -> Workload:
    """Return the first prompts and tokens of a workload, which do not count."""
    max_tokens = min(WARM_UP_TOKENS, workload.max_tokens)
    return dataclasses.replace(workload, prompts=workload.prompts[:concurrency], max_tokens=max_tokens)


# --- the machine and the model ---


def measure_read_speed(clock: Clock) -> float:
    """Return bytes/s of summing a large tensor with torch's present number of threads; the best of a few."""
    tensor = torch.ones(READ_BYTES // torch.float32.itemsize)
    times_s = []
    for _ in range(NUM_READS):
        begin_s = clock()
        tensor.sum()
        times_s.append(clock() - begin_s)
    return READ_BYTES / min(times_s)


def streamed_weight_bytes(model: ModelConfig) -> int:
    """Return how many bytes of weights one forward of the target reads; all experts of an MoE are counted.

    An input embedding that is not the output head as well is left out: a forward reads a few rows of it.
    """
    description = load_model_description(resolve_folder(model), model)
    # first: building a model writes its own dtype into the description
    dtype = resolve_dtype(model.dtype, description, resolve_device(model.device))
    skeleton = build_empty_model(description, dtype=torch.float32, device=torch.device("cpu"))
    embedding = skeleton.get_input_embeddings().weight
    weights = {id(weight): weight.numel() for weight in skeleton.parameters()}
    head = skeleton.get_output_embeddings()
    weights.pop(id(embedding))
    if head is not None:
        weights[id(head.weight)] = head.weight.numel()
    return sum(weights.values()) * dtype.itemsize
