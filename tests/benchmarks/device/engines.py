"""Engines over a played accelerator: drafts made beside the target, or in a process of their own."""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.device.played import (
    BLOCK_SIZE,
    H100_1B,
    H100_8B,
    Awaited,
    Clock,
    ForwardTimes,
    PlayedDevice,
    PlayedDraftModel,
    PlayedTarget,
    WallClock,
)
from outrider.cluster.offline.engine import NoDrafters, PipeDraftClient, RankProcesses, start_drafter
from outrider.drafter_service.engine.drafter import DraftEngineConfig
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.engine.messages import DrafterReady
from outrider.drafter_service.engine.warm_up import warm_up as warm_up_drafter
from outrider.drafter_service.service.local_client import LocalDraftClient
from outrider.drafter_service.service.rank_main import DraftLoop
from outrider.lab.bench.method_arms import DRAFTING, MESSAGES, WAITING, TimedClient
from outrider.lab.bench.profile import PhaseClock
from outrider.verifier_service.drafting.asking import CoordinatorConfig
from outrider.verifier_service.drafting.coordinator import DraftCoordinator
from outrider.verifier_service.engine.pipelined import PipelinedEngine
from outrider.verifier_service.engine.step_profile import measure_step_profile
from outrider.verifier_service.engine.warm_up import MadeUpDrafts, patience_s, warm_up
from outrider.verifier_service.messages.draft import DraftClient
from outrider.verifier_service.messages.engine import EngineUpdate, Published
from outrider.verifier_service.messages.request import GenerationRequest, RequestOutput, SamplingParams, SpeculationPlan
from outrider.verifier_service.messages.wire import encode
from outrider.verifier_service.model.ranks import RankSpec, connect, keep_loaded
from outrider.verifier_service.pricing.draft_pricing import DraftPricing
from outrider.verifier_service.scheduling.kv_cache import BlockPool
from outrider.verifier_service.scheduling.scheduler import Scheduler, SchedulerConfig
from tiny.drafters import model_drafter

DRAFT_LENGTH = 4
PROMPT_LENGTH = 64
MAX_PROFILED_TOKENS = 512
PATIENCE_S = patience_s(torch.device("cuda"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A target and its draft model, as they are played."""

    target: ForwardTimes = H100_8B
    draft: ForwardTimes = H100_1B
    share_right: float = 0.945  # of a drafted token after right ones: of four, 0.87 are accepted
    cold_s: float = 0.0  # what a first call takes besides
    num_ahead_branches: int = 0
    is_warm: bool = True  # drafter and verifier have run what they will be asked for …
    max_requests: int = 256  # … by so many requests at most


def draft_engine(pair: Pair, device: PlayedDevice) -> DraftEngine:
    """Return the engine of the pair's draft model."""
    model = PlayedDraftModel(device, pair.draft, share_right=pair.share_right)
    num_branches = pair.num_ahead_branches
    drafter = model_drafter(model, torch.Generator(), num_ahead_branches=num_branches, read_back=model.read_back)
    limits = {"max_sessions": pair.max_requests, "max_num_batched_tokens": 2048}
    config = DraftEngineConfig(max_draft_length=DRAFT_LENGTH, **limits)
    if pair.is_warm:
        cold = DraftEngine(drafter, clock=device.clock.now_s, config=config)
        warm_up_drafter(cold, state_width=0, patience_s=PATIENCE_S, clock=device.clock.now_s)
    ahead = drafter if num_branches else None
    return DraftEngine(drafter, clock=device.clock.now_s, config=config, ahead=ahead)


@dataclass(frozen=True, slots=True)
class Played:
    """A verifier over a played device."""

    engine: PipelinedEngine
    device: PlayedDevice
    client: DraftClient
    phases: PhaseClock  # of what was run since the last outputs

    def step(self, outputs: tuple[RequestOutput, ...] = ()) -> list[RequestOutput]:
        """Run a step and encode what the one before brought, as the engine's loop does; or wait for drafts."""
        if outputs:
            self.phases.begin()
        found = self.engine.step(lambda: encode(EngineUpdate(outputs=tuple(map(Published.of, outputs)))) and None)
        if found is None and isinstance(self.client, PipeDraftClient):
            self.client.wait(self.engine.idle_s() or 0.0)
            self.phases.end(WAITING)
        return found or []

    def parts_ms(self, num_steps: int) -> dict[str, float]:
        """Return the mean milliseconds of each part of the last so many steps."""
        total: Counter[str] = Counter()
        for step in self.phases.steps[-num_steps - 1 : -1]:  # the last has begun
            total.update(step)
        return {name: 1e3 * seconds / num_steps for name, seconds in total.items()}


def played_engine(
    pair: Pair,
    clock: Clock,
    client: DraftClient | None = None,
    *,
    device: PlayedDevice | None = None,
    async_scheduling: bool = True,
) -> Played:
    """Put an engine around the pair's target; `device` is what it shares with a drafter beside it."""
    device = device or PlayedDevice(clock, cold_s=pair.cold_s)
    target = PlayedTarget(device, pair.target)
    if pair.is_warm:
        cold = _engine_of(target, DraftPricing(), MadeUpDrafts())
        warm_up(cold, max_requests=pair.max_requests, patience_s=PATIENCE_S, clock=clock.now_s)
    pricing = DraftPricing()
    client = client or NoDrafters()
    phases = PhaseClock(clock.now_s)
    phases.begin()
    part = MESSAGES if isinstance(client, PipeDraftClient) else DRAFTING
    engine = _engine_of(target, pricing, TimedClient(client, phases.end, part))
    engine.on_phase = phases.end
    profile = measure_step_profile(Awaited(target), MAX_PROFILED_TOKENS, clock.now_s)
    pricing.use_profile(profile.step_times, None, profile.context)
    engine.launches_early = async_scheduling
    keep_loaded()
    return Played(engine, device, client, phases)


def _engine_of(target: PlayedTarget, pricing: DraftPricing, client: DraftClient) -> PipelinedEngine:
    limits = {"max_model_len": target.max_model_len, "vocab_size": target.vocab_size}
    return PipelinedEngine(
        target,
        Scheduler(
            SchedulerConfig(max_num_batched_tokens=2048, **limits), BlockPool(target.num_blocks, BLOCK_SIZE), pricing
        ),
        DraftCoordinator(client, CoordinatorConfig(**limits), pricing=pricing),
        clock=target.device.clock.now_s,
        generator=torch.Generator(),
        pricing=pricing,
        verify=target.verify,
    )


def beside(pair: Pair, clock: Clock, *, reads_first: bool = False) -> Played:
    """Return a verifier with its drafter in the same process, on the same device.

    `reads_first`: no draft is verified before the host has read it.
    """
    device = PlayedDevice(clock, cold_s=pair.cold_s)
    client = LocalDraftClient(draft_engine(pair, device))
    played = played_engine(pair, clock, client, device=device)
    played.engine.drafts_here = None if reads_first else client
    return played


@contextlib.contextmanager
def apart(pair: Pair) -> Iterator[Played]:
    """Return a verifier with its drafter in a process of its own, on a device of its own."""
    with contextlib.ExitStack() as opening:
        pipe, ready = start_drafter(opening, RankProcesses(_run_drafter, pair, 1, first_rank=0))
        client = PipeDraftClient(pipe, "process", ready)
        opening.callback(client.close)
        yield played_engine(pair, WallClock(), client)


def _run_drafter(pair: Pair, rank: RankSpec) -> None:
    """Be the drafter's process."""
    torch.set_num_threads(1)
    clock = WallClock()
    engine = draft_engine(pair, PlayedDevice(clock, cold_s=pair.cold_s))
    shell = connect(rank.shell_address)
    ready = DrafterReady(
        vocab_size=engine.vocab_size,
        max_model_len=engine.max_model_len,
        max_draft_length=engine.config.max_draft_length,
        vocab_fingerprint="",
        needs=engine.needs,
    )
    shell.send_bytes(encode(ready))
    keep_loaded()
    DraftLoop(engine, shell, clock=clock.now_s).run()


# --- decoding ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """What so many steps brought."""

    tokens_per_s: float
    step_s: float  # the median
    drafted: float  # tokens per request and step
    accepted: float | None  # of drafted ones; None: nothing was drafted
    price: float | None


def decode_steps(
    played: Played,
    streams: int,
    *,
    num_skipped: int = 64,
    num_steps: int = 128,
    draft_length: int = DRAFT_LENGTH,
    is_pinned: bool = False,
) -> Decoded:
    """Decode with so many requests; what the first steps bring does not count. `is_pinned`: whatever drafts cost."""
    engine, clock = played.engine, played.device.clock
    for index in range(streams):
        request = GenerationRequest(
            request_id=f"{streams}-{index}",
            prompt_token_ids=tuple((index * 7 + place) % 500 for place in range(PROMPT_LENGTH)),
            sampling=SamplingParams(temperature=0.0, max_tokens=3500, ignore_eos=True),
            plan=SpeculationPlan(draft_length=draft_length, is_pinned=is_pinned),
            cache_salt=str(index),
        )
        assert engine.add(request) is None
    outputs: list[RequestOutput] = []
    times_s: list[float] = []
    begin_s = last_s = clock.now_s()
    num_tokens = num_drafted = num_accepted = num_rounds = num_seen = 0
    while len(times_s) < num_steps:
        outputs = played.step(tuple(outputs))
        if not outputs:
            continue
        now_s = clock.now_s()
        num_seen += 1
        if num_seen <= num_skipped:
            begin_s = last_s = now_s
            continue
        times_s.append(now_s - last_s)
        last_s = now_s
        num_rounds += len(outputs)
        num_tokens += sum(len(output.token_ids) for output in outputs)
        num_drafted += sum(output.num_draft_tokens for output in outputs)
        num_accepted += sum(output.num_accepted_tokens for output in outputs)
    price = engine.pricing.price
    for request_id in list(engine.requests):
        engine.cancel(request_id)
    return Decoded(
        tokens_per_s=num_tokens / (last_s - begin_s),
        step_s=statistics.median(times_s),
        drafted=num_drafted / num_rounds,
        accepted=num_accepted / num_drafted if num_drafted else None,
        price=price,
    )
