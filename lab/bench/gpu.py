"""`outrider bench gpu`: what one accelerator gives, with models of random weights that cost what real ones cost.

    off          the target alone: share of the memory roofline, five rows beside one, host work, tokens per second
    in turn      the same without asynchronous scheduling: no step is launched before the last one is read
    co-located   drafts from a model in the same process, as long as they pay
    own process  the same drafter in another process, on the same device
    head         an EAGLE-3 head of the target's size, whose forward is timed alone: nothing accepts random drafts

The draft model is the target's own first layers, and the layers after them are drawn to weigh little. So its drafts
are accepted at a rate that was made: speed-ups speak of the machinery, not of any real pair. Nothing heavy is
imported before the verb runs.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import NOTHING, console_of, markdown_table, show_progress
from outrider.lab.bench.gpu_models import FULL, TINY, BenchShape, models

if TYPE_CHECKING:
    import torch

    from outrider.cluster.config.service_config import ServiceConfig
    from outrider.cluster.offline.engine import OfflineEngine
    from outrider.verifier_service.messages.request import GenerationRequest, RequestOutput
    from outrider.verifier_service.model.runner import ParallelRunner
    from outrider.verifier_service.model.step_graphs import GraphBackend

# Bytes per second of SXM cards, by what the driver calls them: NVIDIA's data sheets of the H100 and the H200, as
# published on its pages of these products. Other devices, and CPUs, are measured by a copy.
PEAK_BANDWIDTHS = {"NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA H200": 4.8e12}
OFF, IN_TURN, CO_LOCATED, OWN_PROCESS = "off", "in turn", "co-located", "own process"
DRAFT_LENGTH = 4
NUM_ROWS = DRAFT_LENGTH + 1  # of a verification
WARM_STEPS = 8
NUM_FORWARDS = 20
PLAIN_WIDTH = 140


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Decoding with so many streams."""

    streams: int
    tokens_per_s: float
    step_s: float  # the median
    acceptance: float | None  # of draft tokens; None: none was verified


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
    head_s: float | None = None  # of an EAGLE-3 head's draft of `DRAFT_LENGTH`; None: not with several ranks
    graphs: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, list[Rate]] = field(default_factory=dict)  # by who drafts
    num_exact: int = 0  # of the prompts: drafted and plain tokens are the same
    num_prompts: int = 0
    acceptance: float | None = None  # of the drafts of these prompts, which were verified whatever they cost

    @property
    def roofline_share(self) -> float:
        """Share of the memory's time in a step of one stream: all that is not it is lost."""
        return self.step_bytes / self.bandwidth / self.rates[OFF][0].step_s

    @property
    def host_s(self) -> float:
        """What a step of one stream takes beyond its forward, where nothing of it is hidden."""
        return self.rates.get(IN_TURN, self.rates[OFF])[0].step_s - self.one_row_s


# --- measuring ---


def configured(shape: BenchShape, target: Path, draft: Path | None, **options: Any) -> ServiceConfig:
    """Return the configuration of the target with this drafter; None: nobody drafts."""
    from outrider.cluster.offline.llm import offline_config

    config = offline_config(
        {
            "model": str(target),
            "draft_model": None if draft is None else str(draft),
            "num_speculative_tokens": DRAFT_LENGTH,
            "max_model_len": shape.max_model_len,
            "max_num_seqs": max(*shape.streams, shape.num_prompts),
            "kv_cache_memory_bytes": shape.kv_bytes,
            "enable_prefix_caching": False,  # forwards are timed over blocks that nobody may look at again
            "threads_per_rank": 1,
            "seed": 0,
            **options,
        }
    )
    return replace(config, num_speculative_tokens=0) if draft is None else config


def decode(offline: OfflineEngine, shape: BenchShape, streams: int, clock: Callable[[], float]) -> Rate:
    """Time steps in which so many requests decode."""
    requests = [_request(offline, shape, index, shape.max_model_len) for index in range(streams)]
    for request in requests:
        if (refusal := offline.engine.add(request)) is not None:
            raise click.ClickException(str(refusal.error))
    while not all(request.is_decoding for request in offline.engine.requests.values()):
        offline.step()
    steps_s: list[float] = []
    outputs = []
    begin_s = last_s = clock()
    num_warm = 0
    while len(steps_s) < shape.num_steps:
        if len(offline.engine.requests) < streams:
            raise click.ClickException(f"of {streams} requests, some ended before {shape.num_steps} steps were timed")
        committed = offline.step()
        now_s = clock()
        if committed and num_warm < WARM_STEPS:
            num_warm += 1
            begin_s = last_s = now_s
        elif committed:
            steps_s.append(now_s - last_s)
            outputs += committed
            last_s = now_s
    for request in requests:
        offline.cancel(request.request_id)
    return Rate(
        streams=streams,
        tokens_per_s=sum(len(output.token_ids) for output in outputs) / (last_s - begin_s),
        step_s=statistics.median(steps_s),
        acceptance=_acceptance(outputs),
    )


def tokens_of(offline: OfflineEngine, shape: BenchShape) -> tuple[list[list[int]], float | None]:
    """Return the greedy tokens of every prompt, run together and drafted whatever it costs; and what was accepted."""
    requests = [
        _request(offline, shape, index, shape.num_tokens, is_pinned=offline.config.num_speculative_tokens > 0)
        for index in range(shape.num_prompts)
    ]
    token_ids: dict[str, list[int]] = {request.request_id: [] for request in requests}
    outputs = list(offline.generate(requests))
    for output in outputs:
        token_ids[output.request_id] += output.token_ids
    return list(token_ids.values()), _acceptance(outputs)


def _acceptance(outputs: Sequence[RequestOutput]) -> float | None:
    """Return the share of the verified draft tokens that was accepted; None: there were none."""
    num_drafted = sum(output.num_draft_tokens for output in outputs)
    return sum(output.num_accepted_tokens for output in outputs) / num_drafted if num_drafted else None


def _request(
    offline: OfflineEngine, shape: BenchShape, index: int, num_tokens: int, *, is_pinned: bool = False
) -> GenerationRequest:
    from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan

    vocab_size = shape.target["vocab_size"]
    max_tokens = min(num_tokens, offline.max_model_len - shape.prompt_length)
    return GenerationRequest(
        request_id=f"gpu-{index}",
        prompt_token_ids=tuple((index * 7919 + place * 31) % vocab_size for place in range(shape.prompt_length)),
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        plan=SpeculationPlan(draft_length=offline.config.num_speculative_tokens, is_pinned=is_pinned),
    )


def forward_s(runner: ParallelRunner, num_rows: int, context_length: int, clock: Callable[[], float]) -> float:
    """Time forwards of one sequence's last rows, one after another; the host waits for none but the last."""
    from outrider.verifier_service.messages.batch import ScheduledBatch, slots_of

    table = list(range(-(-context_length // runner.block_size)))
    places = range(context_length - num_rows, context_length)
    batch = ScheduledBatch(
        token_ids=[1 + place for place in range(num_rows)],
        positions=list(places),
        slot_mapping=slots_of(table, places, runner.block_size),
        query_lengths=[num_rows],
        context_lengths=[context_length],
        block_tables=[table],
        logits_indices=list(range(num_rows)),
    )
    return _mean_s(lambda: runner.execute(batch), runner.device, clock)


def head_draft_s(
    shape: BenchShape,
    device: torch.device,
    dtype: torch.dtype,
    clock: Callable[[], float],
    backend: GraphBackend | None = None,
) -> float:
    """Time an EAGLE-3 head of the target's size while it drafts one chain: as many forwards as it has tokens.

    `backend` is how its steps are captured.
    """
    import torch
    from transformers import LlamaConfig

    from outrider.drafter_service.head_drafters.head_runner import HeadRunner
    from outrider.drafter_service.heads.eagle3 import Eagle3Config, Eagle3Head
    from outrider.drafter_service.heads.head_layer import make_lean
    from outrider.drafter_service.heads.switched import SwitchedHeads
    from outrider.verifier_service.messages.batch import ScheduledBatch

    config = Eagle3Config(
        layer=LlamaConfig(**{name: value for name, value in shape.config_of(1).items() if name != "model_type"}),
        taps=(0, 1, 2),
        draft_vocab_size=shape.target["vocab_size"] // 4,
        target_hidden_size=shape.target["hidden_size"],
    )
    with torch.device(device):
        head = Eagle3Head(config).to(dtype).eval().requires_grad_(False)
    make_lean(head)
    runner = HeadRunner(SwitchedHeads([head]), num_blocks=8, block_size=16, max_model_len=128, backend=backend)
    batch = ScheduledBatch(
        token_ids=[1],
        positions=[64],
        slot_mapping=[64],
        query_lengths=[1],
        context_lengths=[65],
        block_tables=[list(range(5))],
        logits_indices=[0],
    )
    hidden = torch.zeros(1, shape.target["hidden_size"], device=device, dtype=dtype)
    return DRAFT_LENGTH * _mean_s(lambda: runner.execute(batch, hidden), device, clock)


def bandwidth_of(device: torch.device, num_bytes: int, clock: Callable[[], float]) -> tuple[float, bool]:
    """Return the memory's bytes per second, and whether that is the published figure rather than a copy's."""
    import torch

    if device.type == "cuda" and (published := PEAK_BANDWIDTHS.get(torch.cuda.get_device_name(device))) is not None:
        return published, True
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _mean_s(lambda: target.copy_(source), device, clock), False


def _mean_s(action: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    def wait() -> None:
        if device.type == "cuda":
            import torch

            torch.cuda.synchronize(device)

    action()
    wait()
    begin_s = clock()
    for _ in range(NUM_FORWARDS):
        action()
    wait()
    return (clock() - begin_s) / NUM_FORWARDS


def run(
    shape: BenchShape,
    *,
    tensor_parallel_size: int,
    drafter_process: bool,
    on_run: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
    **options: Any,
) -> GpuResult:
    """Measure everything; an engine is loaded for each way of drafting."""
    from outrider.cluster.offline.engine import OfflineEngine
    from outrider.lab.bench.pairs import describe_machine, streamed_weight_bytes
    from outrider.verifier_service.model.runner import graph_backend

    options["tensor_parallel_size"] = tensor_parallel_size
    with models(shape) as (target, draft):
        on_run(OFF)
        config = configured(shape, target, None, **options)
        with OfflineEngine(config) as offline:
            device = offline.runner.device
            bandwidth, is_published = bandwidth_of(device, shape.copy_bytes, clock)
            result = GpuResult(
                device=_name_of(device) or describe_machine().cpu,
                tensor_parallel_size=tensor_parallel_size,
                bandwidth=bandwidth,
                is_bandwidth_published=is_published,
                step_bytes=streamed_weight_bytes(config.verifier_spec.model) // tensor_parallel_size,
                one_row_s=forward_s(offline.runner, 1, shape.prompt_length, clock),
                five_rows_s=forward_s(offline.runner, NUM_ROWS, shape.prompt_length, clock),
                num_prompts=shape.num_prompts,
            )
            dtype = offline.runner.model.dtype
            plain, _ = tokens_of(offline, shape)
            result.rates[OFF] = [decode(offline, shape, count, clock) for count in shape.streams]
            if offline.engine.runs_apart:
                offline.engine.async_scheduling = False
                result.rates[IN_TURN] = [decode(offline, shape, count, clock) for count in shape.streams]
            result.graphs = asdict(offline.runner.graph_counts)
        if tensor_parallel_size == 1:
            backend = graph_backend(config.verifier_spec.model, device)
            result.head_s = head_draft_s(shape, device, dtype, clock, backend)
        for name, is_apart in {CO_LOCATED: False, OWN_PROCESS: True}.items():
            if is_apart and not drafter_process:
                continue
            on_run(name)
            config = configured(shape, target, draft, **options)
            with OfflineEngine(config, drafter_process=is_apart, prices_drafts=True) as offline:
                if not is_apart:
                    drafted, result.acceptance = tokens_of(offline, shape)
                    result.num_exact = sum(own == other for own, other in zip(plain, drafted, strict=True))
                result.rates[name] = [decode(offline, shape, count, clock) for count in shape.streams]
    return result


def _name_of(device: torch.device) -> str | None:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


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
        ("drafted tokens are the plain ones", f"{result.num_exact} of {result.num_prompts} prompts"),
        ("accepted of their drafts, as it was made", _share(result.acceptance)),
    ]
    headings = ["streams", *(f"{name}, tokens/s" for name in result.rates)]
    headings += [f"{name} / off" for name in result.rates if name != OFF] + ["accepted, co-located"]
    lines = markdown_table(("figure", "value"), facts, num_left=2)
    return "\n".join([*lines, "", *markdown_table(headings, _rate_rows(result))])


def _rate_rows(result: GpuResult) -> Iterator[list[str]]:
    for rates in zip(*result.rates.values(), strict=True):
        off, *others = rates
        yield [
            str(off.streams),
            *(f"{rate.tokens_per_s:.0f}" for rate in rates),
            *(f"{rate.tokens_per_s / off.tokens_per_s:.2f}" for rate in others),
            _share(dict(zip(result.rates, rates, strict=True))[CO_LOCATED].acceptance),
        ]


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0%}"


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--tiny", is_flag=True, help="Small models and few steps, which a CPU runs in seconds.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--tensor-parallel-size", "-tp", type=click.IntRange(1), default=1, show_default=True)
@click.option("--enforce-eager", is_flag=True, help="Capture no steps as CUDA graphs.")
@click.option("--drafter-process/--no-drafter-process", default=True, show_default=True, help="Measure that, too.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, writable=True, path_type=Path))
@click.option("--markdown", "markdown_file", type=click.Path(dir_okay=False, writable=True, path_type=Path))
def gpu(tiny: bool, drafter_process: bool, json_file: Path | None, markdown_file: Path | None, **options: Any) -> None:
    """Measure what one accelerator gives: models of random weights, of 8 B and 1 B cost; no download."""
    with show_progress(2 + drafter_process) as on_run:
        result = run(TINY if tiny else FULL, drafter_process=drafter_process, on_run=on_run, **options)
    table = to_markdown(result)
    console_of(PLAIN_WIDTH).print(table, highlight=False, markup=False)
    if json_file is not None:
        figures = {"roofline_share": result.roofline_share, "host_s": result.host_s}
        json_file.write_text(json.dumps({**asdict(result), **figures}, indent=2) + "\n")
    if markdown_file is not None:
        markdown_file.write_text(table + "\n")
