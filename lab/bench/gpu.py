"""`outrider bench gpu`: what one accelerator gives, with models of random weights that cost what real ones cost.

    off                the target alone: share of the memory roofline, five rows beside one, host work, speed
    in turn            the same without asynchronous scheduling: no step is launched before the last one is read
    co-located, cold   drafts from a model in the same process, as long as they pay, from a start that knows nothing
    co-located, known  the same once every load has been met
    own process, cold  the same drafter in another process, on the same device
    head               an EAGLE-3 head of the target's size, whose forward is timed alone: nothing accepts random drafts
    float32            a quarter of the depth: drafted and plain tokens are the same
    vLLM               the target in vLLM, where that can be imported (`--beside vllm`)

The draft model is the target's own first layers, and the layers after them are drawn to weigh little. So its drafts
are accepted at a rate that was made: speed-ups speak of the machinery, not of any real pair. Each figure is printed as
it comes. Nothing heavy is imported before the verb runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import NOTHING, markdown_table
from outrider.lab.bench.gpu_beside import vllm_rates
from outrider.lab.bench.gpu_measure import (
    NUM_ROWS,
    Rate,
    bandwidth_of,
    configured,
    decode,
    forward_s,
    head_draft_s,
    name_of,
    prompt_of,
    tokens_of,
)
from outrider.lab.bench.gpu_models import FULL, TINY, BenchShape, models
from outrider.lab.report import describe_machine, files, show_page, write
from outrider.lab.same_tokens import Pair, Tally, compare, plain_decoding, require_same

if TYPE_CHECKING:
    from outrider.cluster.config.service_config import ServiceConfig

OFF, IN_TURN, VLLM = "off", "in turn", "vLLM"
COLD, KNOWN, OWN_PROCESS = "co-located, cold", "co-located, known", "own process, cold"
LEARNING_STEPS = 64  # of a cold start, that do not count: by then drafts that pay should be drafted
PLAIN_WIDTH = 200
Say = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class GpuResult:
    """Everything that is shown."""

    device: str
    tensor_parallel_size: int
    bandwidth: float  # bytes per second
    is_bandwidth_published: bool
    step_bytes: int = 0  # weights that a forward reads, on each rank
    one_row_s: float = 0.0  # of a forward, one after another without a read in between
    five_rows_s: float = 0.0
    head_s: float | None = None  # of an EAGLE-3 head's draft of four; None: not with several ranks
    graphs: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, list[Rate]] = field(default_factory=dict)  # by who drafts
    tallies: dict[str, Tally] = field(default_factory=dict)  # by dtype: drafted answers beside plain ones
    acceptance: float | None = None  # of the drafts of these prompts, which were verified whatever they cost

    @property
    def roofline_share(self) -> float:
        """Share of the memory's time in a step of one stream: all that is not it is lost."""
        return self.step_bytes / self.bandwidth / self.rates[OFF][0].step_s

    @property
    def host_s(self) -> float:
        """What a step of one stream takes beyond its forward, where nothing of it is hidden."""
        return self.rates.get(IN_TURN, self.rates[OFF])[0].step_s - self.one_row_s


class GpuBench:
    """The parts, one after another; an engine is loaded for each way of drafting."""

    def __init__(
        self, shape: BenchShape, *, say: Say, clock: Callable[[], float], tensor_parallel_size: int, **options: Any
    ) -> None:
        """`options` are the configuration's."""
        self._shape, self._say, self._clock = shape, say, clock
        self._options = {**options, "tensor_parallel_size": tensor_parallel_size}
        self.result = GpuResult(
            device="", tensor_parallel_size=tensor_parallel_size, bandwidth=0.0, is_bandwidth_published=False
        )

    def off(self, target: Path) -> list[list[int]]:
        """Measure the target alone; return the tokens of every prompt."""
        from outrider.cluster.offline.engine import OfflineEngine
        from outrider.lab.bench.pairs import streamed_weight_bytes
        from outrider.verifier_service.engine.pipelined import PipelinedEngine
        from outrider.verifier_service.model.runner import graph_backend

        shape, clock, result = self._shape, self._clock, self.result
        config = configured(shape, target, None, **self._options)
        with OfflineEngine(config) as offline:
            device, dtype = offline.runner.device, offline.runner.model.dtype
            result.device = name_of(device) or describe_machine().cpu
            result.bandwidth, result.is_bandwidth_published = bandwidth_of(device, shape.copy_bytes, clock)
            model = config.verifier_spec.model
            result.step_bytes = streamed_weight_bytes(model) // result.tensor_parallel_size
            result.one_row_s = forward_s(offline.runner, 1, shape.prompt_length, clock)
            result.five_rows_s = forward_s(offline.runner, NUM_ROWS, shape.prompt_length, clock)
            self._say(f"forward of one row {1e3 * result.one_row_s:.2f} ms, of five {1e3 * result.five_rows_s:.2f} ms")
            plain, _ = tokens_of(offline, shape)
            self._decode(OFF, offline)
            if isinstance(offline.engine, PipelinedEngine):
                offline.engine.launches_early = False
                self._decode(IN_TURN, offline)
            result.graphs = asdict(offline.runner.graph_counts)
        if result.tensor_parallel_size == 1:
            result.head_s = head_draft_s(shape, device, dtype, clock, graph_backend(model, device))
            self._say(f"EAGLE-3 head, a draft of four: {1e3 * result.head_s:.2f} ms")
        return plain

    def drafted(self, target: Path, draft: Path, plain: list[list[int]], *, is_apart: bool) -> None:
        """Measure the target with a drafter beside it, or in a process of its own."""
        from outrider.cluster.offline.engine import OfflineEngine

        config = configured(self._shape, target, draft, **self._options)
        with OfflineEngine(config, drafter_process=is_apart, prices_drafts=True) as offline:
            self._decode(OWN_PROCESS if is_apart else COLD, offline, num_skipped=LEARNING_STEPS)
            if is_apart:
                return
            drafted, self.result.acceptance = tokens_of(offline, self._shape)
            self._decode(KNOWN, offline)
        self._note_exact("as it is served", config, plain, drafted)

    def exact(self, shape: BenchShape) -> None:
        """Compare drafted and plain tokens in float32, in a model of the same width."""
        from outrider.cluster.offline.engine import OfflineEngine

        with models(shape) as (target, draft):
            found: list[list[list[int]]] = []
            for drafter in (None, draft):
                config = configured(shape, target, drafter, **self._options)
                with OfflineEngine(config) as offline:
                    found.append(tokens_of(offline, shape)[0])
            self._note_exact("float32, at reduced depth", config, *found)

    def beside_vllm(self, target: Path) -> None:
        """Measure vLLM with the same model."""
        self.result.rates[VLLM] = vllm_rates(self._shape, target, self._tell_rate(VLLM))

    def _decode(self, name: str, offline: Any, **options: int) -> None:
        tell, rates = self._tell_rate(name), self.result.rates.setdefault(name, [])
        for streams in self._shape.streams:
            rates.append(decode(offline, self._shape, streams, self._clock, **options))
            tell(rates[-1])

    def _tell_rate(self, name: str) -> Callable[[Rate], None]:
        def tell(rate: Rate) -> None:
            accepted = f", {_share(rate.acceptance)} of the drafts accepted" if rate.acceptance is not None else ""
            step = f"{1e3 * rate.step_s:.2f} ms a step"
            self._say(f"{name}: {rate.streams} streams, {rate.tokens_per_s:.0f} tokens/s, {step}{accepted}")

        return tell

    def _note_exact(self, name: str, config: ServiceConfig, plain: list[list[int]], drafted: list[list[int]]) -> None:
        """Compare while the model's folder is there and no engine holds its memory."""
        pairs = [
            Pair(
                what=f"{name}, prompt {index + 1}", prompt=prompt_of(self._shape, index), expected=expected, given=given
            )
            for index, (expected, given) in enumerate(zip(plain, drafted, strict=True))
        ]
        tally = self.result.tallies[name] = compare(pairs, plain_decoding(config.verifier_spec.model))
        self._say(f"drafted tokens beside plain ones, {name}: {tally}")


def run(
    shape: BenchShape,
    *,
    drafter_process: bool,
    say: Say,
    beside: str | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **options: Any,
) -> GpuResult:
    """Measure everything, telling each figure as it comes."""
    bench = GpuBench(shape, say=say, clock=clock, **options)
    with models(shape) as (target, draft):
        plain = bench.off(target)
        for is_apart in (False, True) if drafter_process else (False,):
            bench.drafted(target, draft, plain, is_apart=is_apart)
        if beside == "vllm":
            bench.beside_vllm(target)
    bench.exact(shape.in_float32())
    return bench.result


# --- showing ---


def to_markdown(result: GpuResult) -> str:
    """Write the figures of the target alone, then a row for each number of streams."""
    source = "published" if result.is_bandwidth_published else "of a copy, measured"
    graphs = result.graphs
    num_eager = sum(graphs["eager"].values())
    facts = [
        ("device", f"{result.device}, {result.tensor_parallel_size} rank(s)"),
        ("memory bandwidth", f"{result.bandwidth / 1e9:.0f} GB/s, {source}"),
        ("share of the memory roofline, 1 stream", f"{result.roofline_share:.0%}"),
        ("forward of 1 row, of 5", f"{1e3 * result.one_row_s:.2f} ms, {result.five_rows_s / result.one_row_s:.2f} x"),
        ("host work of a step, 1 stream", f"{1e3 * result.host_s:.2f} ms"),
        ("EAGLE-3 head, a draft of 4", NOTHING if result.head_s is None else f"{1e3 * result.head_s:.2f} ms"),
        ("steps replayed, eager", f"{graphs['num_replayed']}, {num_eager}" if graphs["num_graphs"] else "no graphs"),
        ("graphs", f"{graphs['num_graphs']}, captured in {graphs['capture_s']:.1f} s"),
        *(
            (f"drafted tokens are the plain ones, {name}", f"{tally.num_identical} of {tally.num_answers} prompts")
            for name, tally in result.tallies.items()
        ),
        ("accepted of their drafts, as it was made", _share(result.acceptance)),
    ]
    headings = ["streams", *(f"{name}, tokens/s" for name in result.rates)]
    headings += [f"{name} / off" for name in result.rates if name != OFF] + [f"accepted, {COLD}"]
    lines = markdown_table(("figure", "value"), facts, num_left=2)
    return "\n".join([*lines, "", *markdown_table(headings, _rate_rows(result))])


def _rate_rows(result: GpuResult) -> Iterator[list[str]]:
    for rates in zip(*result.rates.values(), strict=True):
        off, *others = rates
        yield [
            str(off.streams),
            *(f"{rate.tokens_per_s:.0f}" for rate in rates),
            *(f"{rate.tokens_per_s / off.tokens_per_s:.2f}" for rate in others),
            _share(dict(zip(result.rates, rates, strict=True))[COLD].acceptance),
        ]


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0%}"


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--tiny", is_flag=True, help="Small models and few steps, which a CPU runs in seconds.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--tensor-parallel-size", "-tp", type=click.IntRange(1), default=1, show_default=True)
@click.option("--enforce-eager", is_flag=True, help="Capture no steps as CUDA graphs.")
@click.option("--drafter-process/--no-drafter-process", default=True, show_default=True, help="Measure that, too.")
@click.option("--beside", type=click.Choice(["vllm"]), help="Measure this engine with the same model, too.")
@files("json", "markdown")
def gpu(tiny: bool, drafter_process: bool, json_file: Path | None, markdown_file: Path | None, **options: Any) -> None:
    """Measure what one accelerator gives: models of random weights, of 8 B and 1 B cost; no download."""
    begin_s = time.perf_counter()

    def say(figure: str) -> None:
        click.echo(f"[{time.perf_counter() - begin_s:6.1f} s] {figure}", err=True)

    result = run(TINY if tiny else FULL, drafter_process=drafter_process, say=say, **options)
    table = to_markdown(result)
    show_page(table, PLAIN_WIDTH, markdown_file)
    figures = {"roofline_share": result.roofline_share, "host_s": result.host_s}
    write(json_file, lambda: {**asdict(result), **figures})
    require_same(*result.tallies.values())
