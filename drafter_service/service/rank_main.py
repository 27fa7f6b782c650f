"""Run a draft engine in its own process: verifiers' frames in, drafts out, over one pipe."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait

import torch

from outrider.drafter_service.engine.drafter import DraftEngineConfig, Drafter
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.engine.forward_cost import ForwardCost, MeteredRunner
from outrider.drafter_service.engine.learning_messages import SetLearning, TakeTexts
from outrider.drafter_service.engine.messages import TO_DRAFT_ENGINE, DrafterReady, DrafterUpdate
from outrider.drafter_service.engine.paged_drafter import PagedDrafter
from outrider.drafter_service.engine.payloads import handle_payload
from outrider.drafter_service.engine.state_transport import StateTransport
from outrider.drafter_service.engine.warm_up import warm_up
from outrider.drafter_service.observing.engine_learning import EngineLearning, LearningReport
from outrider.drafter_service.observing.shadow import MAX_WAITING_ROUNDS
from outrider.drafter_service.service.drafter_spec import DrafterSpec
from outrider.drafter_service.service.drafters import build_drafter, drafter_rng
from outrider.drafter_service.service.hybrid_drafter import HybridDrafter
from outrider.drafter_service.service.methods import METHODS, Method
from outrider.drafter_service.service.own_weights import DrafterControl, OwnWeights
from outrider.drafter_service.target.target_view import TargetView
from outrider.verifier_service.engine.control import change_beside
from outrider.verifier_service.engine.factory import load_rank
from outrider.verifier_service.engine.runners import Runner
from outrider.verifier_service.engine.warm_up import patience_s
from outrider.verifier_service.links.tensor_channel import TensorStore
from outrider.verifier_service.messages.counts import GraphCounts
from outrider.verifier_service.messages.draft import DrafterMessage
from outrider.verifier_service.messages.engine import (
    Control,
    ControlResult,
    PeerState,
    Relay,
    WeightChange,
)
from outrider.verifier_service.messages.seeds import derive_seed
from outrider.verifier_service.messages.wire import decode, encode
from outrider.verifier_service.model.architectures import read_description, resolve_description
from outrider.verifier_service.model.ranks import RankSpec, arrived, connect, keep_loaded
from outrider.verifier_service.model.runner import ModelRunner, ParallelRunner, follow
from outrider.verifier_service.model.settled import resolve_device
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from outrider.verifier_service.model.tokenizer import fingerprint_of
from outrider.verifier_service.refit.rank_weights import RankWeights
from outrider.verifier_service.start_phases import tell_phase

LOAD_INTERVAL_S = 0.2
SHADOW_TURNS = 4  # of so many turns of spare time, the shadow has one where there is more to run ahead for
SHADOW_KV_TOKENS = 8192  # that a drafter in the shadow has KV for; longer texts are not drafted twice


def build_draft_engine(
    spec: DrafterSpec,
    *,
    runner: Runner | None = None,
    view: TargetView | None = None,
    cost: ForwardCost | None = None,
    weights: OwnWeights | None = None,
) -> DraftEngine:
    """Build a drafter and its engine; the arguments are those of `build_drafter` and `DraftEngine`."""
    speculative = spec.speculative
    config = _engine_config(spec)
    tell_phase("warming up the drafter")
    rng = drafter_rng(spec)
    drafter = build_drafter(spec, runner=runner, view=view, rng=rng, weights=weights)
    before = rng.get_state()
    for cold in _cold(spec, drafter):
        _warm_up(spec, cold, config)
    rng.set_state(before)  # what is drawn follows from the seed, however much was warmed up
    paged = drafter if isinstance(drafter, PagedDrafter) else None
    ahead = paged if paged is not None and paged.runs_ahead else None
    has_weights = bool(speculative.weighted_methods)
    engine = DraftEngine(drafter, clock=time.monotonic, config=config, ahead=ahead, cost=cost, has_weights=has_weights)
    engine.needs = replace(engine.needs, num_top=spec.learn_num_top, learns=spec.learns)
    if paged is not None and paged.graph_counts is not None:
        engine.counters.graphs = paged.graph_counts
    return engine


def build_shadow(spec: DrafterSpec, folder: str) -> Drafter:
    """Build the drafter of `spec` once more, from a folder ("": from the spec's own), with little KV and warmed up.

    It runs on this rank alone, and does not run ahead. Raises whatever is wrong with the folder.
    """
    speculative = spec.speculative
    if (refusal := speculative.update_refusal) is not None:
        raise ValueError(refusal)
    if speculative.methods:
        raise ValueError("a hybrid has no shadow: its lookups would have to remember every text twice")
    model = spec.model or spec.target  # an MTP layer is read from among its target's tensors
    longest = None if model.max_model_len is None else min(model.max_model_len, SHADOW_KV_TOKENS)
    model = replace(
        model,
        path=folder or model.path,
        max_model_len=longest,
        num_kv_blocks=-(-SHADOW_KV_TOKENS // model.block_size),
        tensor_parallel_size=1,
        check_logits=False,  # of the serving drafter's kind, which was checked
    )
    spec = replace(spec, target=model) if spec.model is None else replace(spec, model=model)
    spec = replace(spec, speculative=replace(speculative, ahead_branches=0))
    runner: ParallelRunner | None = None
    if spec.loads_model:
        share = ModelRunner(model, TensorParallelGroup.single())
        if share.graphs is not None:
            share.graphs.capture(has_trees=spec.has_trees)
        runner = ParallelRunner(share)
    rng = torch.Generator().manual_seed(derive_seed(spec.sampling_seed, "shadow"))
    drafter = build_drafter(spec, runner=runner, rng=rng)
    _warm_up(spec, drafter, replace(_engine_config(spec), max_sessions=MAX_WAITING_ROUNDS))
    return drafter


def _engine_config(spec: DrafterSpec) -> DraftEngineConfig:
    speculative = spec.speculative
    return DraftEngineConfig(
        max_num_batched_tokens=spec.max_num_batched_tokens,
        max_draft_length=speculative.num_speculative_tokens,
        max_tree_nodes=speculative.num_tree_nodes,
        max_sessions=spec.max_sessions,
        drafts_greedily=speculative.draft_sample_method == "greedy",
    )


def _cold(spec: DrafterSpec, drafter: Drafter) -> Sequence[Drafter]:
    """Return the parts of a drafter to warm up: its models or heads.

    Lookups would remember the warm-up, drafters on the target's layers have no target yet, and plug-ins are unknown.
    """
    models: Mapping[str, Drafter]
    models = drafter.models if isinstance(drafter, HybridDrafter) else {spec.speculative.method: drafter}
    return [model for name, model in models.items() if METHODS[Method(name)].has_weights]


def _warm_up(spec: DrafterSpec, drafter: Drafter, config: DraftEngineConfig) -> None:
    """Draft once, without a session of a verifier."""
    state_width = 0
    if taps := drafter.needs.taps:
        state_width = len(taps) * read_description(resolve_description(spec.target), spec.target).hidden_size
    device = resolve_device((spec.model or spec.target).device)
    engine = DraftEngine(drafter, clock=time.monotonic, config=config)
    warm_up(engine, state_width=state_width, patience_s=patience_s(device), clock=time.monotonic)


def run_drafter_rank(spec: DrafterSpec, rank: RankSpec) -> None:
    """Run one rank of a drafter until its shell, or rank 0, is gone."""
    runner: MeteredRunner | None = None
    cost: ForwardCost | None = None
    graphs: GraphCounts | None = None
    change_model: Callable[[WeightChange], int] | None = None
    if spec.loads_model:
        assert spec.model is not None
        share, pipes = load_rank(spec.model, rank, has_trees=spec.has_trees)
        if rank.rank > 0:
            keep_loaded()
            follow(pipes[0], share, RankWeights(share).follower_calls())
            return
        change_model = RankWeights(share, pipes).change
        parallel = ParallelRunner(share, pipes)
        runner, graphs = MeteredRunner(parallel), parallel.graph_counts
        if spec.speculative.num_ahead_branches:  # only running ahead needs the cost of a forward
            cost = ForwardCost(time.monotonic, runner)
    shell = connect(rank.shell_address)
    weights = OwnWeights(spec.speculative, change_model)
    engine = build_draft_engine(spec, runner=runner, cost=cost, weights=weights)
    learning = EngineLearning(engine, partial(build_shadow, spec))
    if graphs is not None:
        engine.counters.graphs = graphs
    keep_loaded()
    store = TensorStore(spec.tensor_host) if spec.tensor_host and engine.needs.taps else None
    ready = DrafterReady(
        vocab_size=engine.vocab_size,
        max_model_len=engine.max_model_len,
        max_draft_length=engine.config.max_draft_length,
        vocab_fingerprint=fingerprint_of(spec.vocabulary),
        needs=engine.needs,
        tensor_store="" if store is None else store.address,
    )
    shell.send_bytes(encode(ready))
    tell_phase("ready")
    DraftLoop(
        *(engine, shell),
        clock=time.monotonic,
        check_integrity=spec.check_integrity,
        store=store,
        control=DrafterControl(engine, weights, learning) if spec.takes_orders else None,
        learning=learning,
    ).run()


class DraftLoop:
    """Pass messages between the pipe and the draft engine, step by step."""

    def __init__(
        self,
        engine: DraftEngine,
        pipe: Connection,
        *,
        clock: Callable[[], float],
        check_integrity: bool = False,
        store: TensorStore | None = None,
        control: DrafterControl | None = None,
        learning: EngineLearning | None = None,
    ) -> None:
        """`check_integrity`: check after every step; an error ends the loop.

        `store`: rendezvous of the channels for hidden states, if the drafter has them. Without `control`, weights
        cannot change; `learning` is what `control` sets, and says nothing before that.
        """
        self._engine = engine
        self._states = StateTransport(engine, store)
        self._pipe = pipe
        self._clock = clock
        self._checks_integrity = check_integrity
        self._control = control or DrafterControl(engine)
        self._learning = learning
        self._answers: list[Relay] = []
        self._results: list[ControlResult] = []
        self._next_load_s = 0.0
        self._num_turns = 0  # of spare time, while a round waited for the shadow

    def run(self) -> None:
        """Step until the shell closes the pipe."""
        with contextlib.closing(self._states), contextlib.suppress(EOFError, ConnectionError):  # the shell is gone
            while True:
                is_busy = self._engine.has_work() or self._engine.has_spare_work() or self._has_shadow_work()
                self._receive(patience_s=0.0 if is_busy else LOAD_INTERVAL_S)
                if ready := self._engine.flush():  # answers without a forward are sent before it
                    self._publish(ready)
                self._publish(self._engine.step())
                self._spend_spare_time()
                if self._checks_integrity:
                    self._engine.check_integrity()

    def _has_shadow_work(self) -> bool:
        return self._learning is not None and self._learning.has_work()

    def _spend_spare_time(self) -> None:
        """Run one forward ahead, or a step of the shadow: while nothing is asked for, as far as is known."""
        if self._learning is None or not self._has_shadow_work() or self._pipe.poll():
            self._engine.run_ahead()
            return
        self._num_turns += 1
        if self._engine.has_spare_work() and self._num_turns % SHADOW_TURNS:
            self._engine.run_ahead()
        else:
            self._learning.draft_in_shadow()

    def _receive(self, patience_s: float) -> None:
        """Process all arrived messages; wait up to `patience_s` for the first."""
        wait([self._pipe, self._states.fileno()], patience_s)
        for frame in arrived(self._pipe):
            self._dispatch(decode(frame, TO_DRAFT_ENGINE))
        self._states.collect()

    def _dispatch(self, message: Relay | PeerState | Control | SetLearning | TakeTexts) -> None:
        match message:
            case Relay():
                answers = handle_payload(self._engine, message.peer, message.payload, self._states.handle)
                self._answers.extend(self._relay(message.peer, answer) for answer in answers)
            case PeerState():
                if message.tensors is not None:
                    self._states.open(message.peer, message.tensors)
                if not message.is_up:
                    self._states.close_peer(message.peer)
                    self._engine.forget_peer(message.peer)
            case _:
                result = change_beside(self._control.handle, message, lambda: self._publish([]), LOAD_INTERVAL_S)
                self._results.append(result)

    def _relay(self, peer: str, payload: bytes) -> Relay:
        return Relay(peer=peer, payload=payload, received_s=self._clock())

    def _publish(self, messages: Sequence[tuple[str, DrafterMessage]]) -> None:
        relays = self._answers + [self._relay(peer, encode(message)) for peer, message in messages]
        self._answers = []
        now_s = self._clock()
        is_due = now_s >= self._next_load_s
        if is_due:
            self._next_load_s = now_s + LOAD_INTERVAL_S
        results, self._results = tuple(self._results), []
        is_due = is_due or bool(results)  # the version is told with the answer
        samples, num_dropped = ([], 0) if self._learning is None else self._learning.take_samples()
        if relays or is_due:
            load = self._engine.load() if is_due else None
            report = LearningReport() if self._learning is None or not is_due else self._learning.report()
            self._send(DrafterUpdate(relays=tuple(relays), load=load, results=results, **report._asdict()))
        if num_dropped:
            self._send(DrafterUpdate(num_dropped_samples=num_dropped))
        for sample in samples:  # each may fill half a frame
            self._send(DrafterUpdate(samples=(sample,)))

    def _send(self, update: DrafterUpdate) -> None:
        self._pipe.send_bytes(encode(update))
