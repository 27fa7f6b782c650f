"""What `outrider bench gpu` times: decoding, forwards, a head's draft, the memory's bandwidth."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.lab.bench.gpu_models import BenchShape

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
DRAFT_LENGTH = 4
NUM_ROWS = DRAFT_LENGTH + 1  # of a verification
WARM_STEPS = 8
NUM_FORWARDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Decoding with so many streams."""

    streams: int
    tokens_per_s: float
    step_s: float  # the median
    acceptance: float | None  # of draft tokens; None: none was verified


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
    return config.with_options(num_speculative_tokens=0) if draft is None else config


def decode(
    offline: OfflineEngine,
    shape: BenchShape,
    streams: int,
    clock: Callable[[], float],
    num_skipped: int = WARM_STEPS,
) -> Rate:
    """Time steps in which so many requests decode, after the first `num_skipped`."""
    requests = [_request(offline, shape, index, shape.max_model_len) for index in range(streams)]
    for request in requests:
        if (refusal := offline.engine.add(request)) is not None:
            raise click.ClickException(str(refusal.error))
    while not all(request.is_decoding for request in offline.engine.requests.values()):
        offline.step()
    steps_s: list[float] = []
    outputs = []
    begin_s = last_s = clock()
    num_seen = 0
    while len(steps_s) < shape.num_steps:
        if len(offline.engine.requests) < streams:
            raise click.ClickException(f"of {streams} requests, some ended before {shape.num_steps} steps were timed")
        committed = offline.step()
        now_s = clock()
        if committed and num_seen < num_skipped:
            num_seen += 1
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
        _request(offline, shape, index, shape.num_tokens, is_pinned=offline.config.max_draft_length > 0)
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


def prompt_of(shape: BenchShape, index: int) -> tuple[int, ...]:
    """Return the tokens of a prompt; each is another's from the first token on."""
    vocab_size = shape.target["vocab_size"]
    return tuple((index * 7919 + place * 31) % vocab_size for place in range(shape.prompt_length))


def _request(
    offline: OfflineEngine, shape: BenchShape, index: int, num_tokens: int, *, is_pinned: bool = False
) -> GenerationRequest:
    from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan

    max_tokens = min(num_tokens, offline.max_model_len - shape.prompt_length)
    return GenerationRequest(
        request_id=f"gpu-{index}",
        prompt_token_ids=prompt_of(shape, index),
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        plan=SpeculationPlan(draft_length=offline.config.max_draft_length, is_pinned=is_pinned),
    )


def forward_s(runner: ParallelRunner, num_rows: int, context_length: int, clock: Callable[[], float]) -> float:
    """Time forwards of one sequence's last rows, one after another; the host waits for none but the last."""
    from outrider.verifier_service.messages.batch import ScheduledBatch, slots_of

    table = list(range(-(-context_length // runner.block_size)))
    places = range(context_length - num_rows, context_length)
    batch = ScheduledBatch(
        token_ids=[1 + place for place in range(num_rows)],
        positions=list(places),
        slot_mapping=[*slots_of(table, places, runner.block_size)],
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
        head = Eagle3Head(config)
    head = head.to(device, dtype).eval().requires_grad_(False)  # rotary frequencies are made on the host, wherever
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


def name_of(device: torch.device) -> str | None:
    """Return what the driver calls a GPU; None: it is none."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else None
