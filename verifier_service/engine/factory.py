"""Assemble a verifier engine from its parts, the same way in every process that hosts one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from outrider.verifier_service.drafting.asking import CoordinatorConfig
from outrider.verifier_service.drafting.coordinator import DraftCoordinator
from outrider.verifier_service.engine.control import ChangeDraft
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.engine.loop import EngineLoop
from outrider.verifier_service.engine.pipelined import PipelinedEngine
from outrider.verifier_service.engine.runners import Runner
from outrider.verifier_service.engine.step_profile import StepProfile, measure_step_profile
from outrider.verifier_service.engine.verifier_spec import VerifierSpec
from outrider.verifier_service.engine.warm_up import MadeUpDrafts, patience_s, warm_up
from outrider.verifier_service.handover.giver import Giver
from outrider.verifier_service.handover.handovers import KVHandovers
from outrider.verifier_service.handover.kv_bytes import EngineKV, KVBytes, follower_calls
from outrider.verifier_service.handover.taker import Taker
from outrider.verifier_service.links.relay_client import RelayDraftClient
from outrider.verifier_service.links.tensor_channel import TensorStore
from outrider.verifier_service.messages.draft import DraftClient
from outrider.verifier_service.messages.engine import EngineReady, StepTime
from outrider.verifier_service.messages.seeds import derive_seed
from outrider.verifier_service.messages.wire import encode
from outrider.verifier_service.model.batch_invariance import batch_dependent
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.packed_linear import bound_shape_caches
from outrider.verifier_service.model.ranks import RankSpec, connect, gather, keep_freed_memory, keep_loaded
from outrider.verifier_service.model.runner import ModelRunner, ParallelRunner, follow
from outrider.verifier_service.model.settled import resolve_device
from outrider.verifier_service.model.tokenizer import fingerprint_of
from outrider.verifier_service.pricing.draft_pricing import DraftPricing
from outrider.verifier_service.refit.rank_weights import RankWeights
from outrider.verifier_service.sampling.coupled_sampler import gumbel_noise
from outrider.verifier_service.sampling.grammar import GrammarCompiler
from outrider.verifier_service.sampling.verification import Verification, begin
from outrider.verifier_service.scheduling.kv_cache import BlockPool
from outrider.verifier_service.scheduling.scheduler import Scheduler, SchedulerConfig
from outrider.verifier_service.start_phases import tell_phase

COLLECTIVE_TIMEOUT_S = 60.0  # a rank this late is dead: the group fails and its replica is replaced
MAX_PROFILED_TOKENS = 512  # larger steps are extrapolated by the slope, which is refitted while serving


def build_engine(
    runner: Runner,
    spec: VerifierSpec,
    drafts: DraftClient,
    *,
    has_grammars: bool = True,
    verify: Callable[..., Verification] = begin,
    clock: Callable[[], float] = time.monotonic,
) -> VerifierEngine:
    """Build scheduler, KV pool and drafting around a loaded model; without grammars, structured output is refused."""
    pool = BlockPool(runner.num_blocks, runner.block_size, spec.enable_prefix_caching)
    config = SchedulerConfig(
        max_num_batched_tokens=spec.max_num_batched_tokens,
        max_num_seqs=spec.max_num_seqs,
        max_model_len=runner.max_model_len,
        vocab_size=runner.vocab_size,
        enable_prefix_caching=spec.enable_prefix_caching,
    )
    speculation = CoordinatorConfig(
        vocab_size=runner.vocab_size,
        max_model_len=runner.max_model_len,
        first_deadline_s=spec.max_draft_deadline_s,
        min_deadline_s=spec.min_draft_deadline_s,
        max_deadline_s=spec.max_draft_deadline_s,
        max_tree_nodes=spec.max_tree_nodes,
        rollouts=spec.rollouts,
        tells_texts=True,
    )
    pricing = DraftPricing()
    grammars: GrammarCompiler | None = None
    if has_grammars:
        grammars = GrammarCompiler.of_model(
            spec.model, vocab_size=runner.vocab_size, eos_token_ids=runner.eos_token_ids
        )
    runs_async = resolve_device(spec.model.device).type == "cuda"
    kind = PipelinedEngine if runs_async and spec.async_scheduling else partial(VerifierEngine, runs_async=runs_async)
    return kind(
        runner,
        Scheduler(config, pool, pricing),
        DraftCoordinator(drafts, speculation, runner.states, pricing),
        clock=clock,
        generator=torch.Generator().manual_seed(derive_seed(spec.sampling_seed, "verifier")),
        grammars=grammars,
        pricing=pricing,
        verify=verify,
    )


def connect_handovers(engine: VerifierEngine, kv: KVBytes, spec: VerifierSpec) -> KVHandovers:
    """Let an engine's requests come from and go to other verifiers with their KV."""
    store = TensorStore(spec.tensor_host) if spec.tensor_transport else None
    giver = Giver(
        kv,
        engine.requests,
        is_current=engine.scheduler.is_current,
        weight_version=lambda: engine.weight_version,
        clock=time.monotonic,
    )
    taker = Taker(
        kv,
        weight_version=lambda: engine.weight_version,
        clock=time.monotonic,
        store=store,
        transport=spec.tensor_transport,
    )
    engine.handovers = handovers = KVHandovers(giver, taker)
    return handovers


def profile_engine(engine: VerifierEngine, runner: ParallelRunner, spec: VerifierSpec) -> tuple[StepTime, ...]:
    """Warm up, measure step times, and give them to the engine's pricing, unless the spec switches pricing off."""
    tell_phase("warming up, measuring steps")
    warm_up(
        build_engine(runner, spec, MadeUpDrafts(), has_grammars=False),
        max_requests=spec.max_num_seqs,
        patience_s=patience_s(runner.device),
        clock=time.monotonic,
    )
    profile = _profile_of(runner, min(MAX_PROFILED_TOKENS, spec.max_num_batched_tokens))
    if spec.prices_drafts:
        engine.pricing.use_profile(profile.step_times, runner.experts, profile.context)
        engine.routing = runner.routing
    return profile.step_times


def _profile_of(runner: ParallelRunner, max_tokens: int) -> StepProfile:
    """Return the step times of an earlier start, or measure them; pricing refits either while serving."""
    name = f"profile of {max_tokens} tokens"
    if (known := runner.memory.recall(name)) is not None:
        return StepProfile.from_json(known)
    profile = measure_step_profile(runner, max_tokens)
    runner.memory.remember(name, profile.to_json())
    return profile


def load_rank(
    model: ModelConfig,
    rank: RankSpec,
    *,
    has_trees: bool = False,
    are_followers_alive: Callable[[], bool] = lambda: True,
) -> tuple[ModelRunner, list[Connection]]:
    """Join the tensor-parallel group, load this rank's share of the model and capture its steps.

    `has_trees`: drafts may be trees. Rank 0 gets a pipe to each follower, a follower one pipe to rank 0.
    """
    bound_shape_caches()
    keep_freed_memory()
    backend = "nccl" if resolve_device(model.device).type == "cuda" else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(rank.rank % torch.cuda.device_count())  # under Ray each rank sees its own device only
    group, pipes = gather(rank, backend, COLLECTIVE_TIMEOUT_S, are_followers_alive=are_followers_alive)
    runner = ModelRunner(replace(model, tensor_parallel_size=rank.size), group)
    if runner.graphs is not None:
        runner.graphs.capture(has_trees=has_trees)
    # builds the table of logarithms for coupled sampling, 0.3 s once, before the first request
    gumbel_noise(0, 0, torch.zeros(1, dtype=torch.int64, device=runner.device), 1, runner.device)
    return runner, pipes


class AddedDrafter(NamedTuple):
    """A drafter in the verifier's process."""

    client: DraftClient  # of this one and of those behind links
    attach: Callable[[VerifierEngine], None]  # to be called with the engine, once built
    change_weights: ChangeDraft


MakeDrafts = Callable[[ParallelRunner, DraftClient], AddedDrafter]


def run_verifier_rank(spec: VerifierSpec, rank: RankSpec, make_drafts: MakeDrafts | None = None) -> None:
    """Run as one rank of a verifier until its shell, or rank 0, goes away.

    `make_drafts` adds a drafter in this process to those behind links. It gets the loaded model and the links' client.
    """
    share, pipes = load_rank(spec.model, rank, has_trees=spec.has_trees)
    keep_loaded()
    if rank.rank > 0:
        follow(pipes[0], share, {**RankWeights(share).follower_calls(), **follower_calls(share)})
        return
    runner = ParallelRunner(share, pipes)
    shell = connect(rank.shell_address)
    links = RelayDraftClient()
    added = None if make_drafts is None else make_drafts(runner, links)
    engine = build_engine(runner, spec, links if added is None else added.client)
    if added is not None:
        added.attach(engine)
    engine.stats.graphs, engine.stats.fetches = runner.graph_counts, runner.fetches
    handovers = connect_handovers(engine, EngineKV(share, pipes), spec)
    ready = EngineReady(
        vocab_size=runner.vocab_size,
        max_model_len=runner.max_model_len,
        eos_token_ids=runner.eos_token_ids,
        num_kv_blocks=runner.num_blocks,
        step_times=profile_engine(engine, runner, spec),
        vocab_fingerprint=fingerprint_of(spec.model),
        dtype=str(share.dtype).removeprefix("torch."),
        batch_dependent=batch_dependent(share.model, share.group.size),
    )
    if ready.batch_dependent:
        tell_phase(f"tokens may depend on what else is in a step, by {', '.join(ready.batch_dependent)}")
    shell.send_bytes(encode(ready))
    tell_phase("ready")
    with contextlib.closing(links), contextlib.closing(handovers):
        EngineLoop(
            *(engine, links, shell),
            clock=time.monotonic,
            check_integrity=spec.check_integrity,
            weights=RankWeights(share, pipes),
            change_draft=None if added is None else added.change_weights,
            takes_orders=spec.rollouts,
        ).run()
