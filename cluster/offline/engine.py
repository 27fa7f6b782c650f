"""The verifier engine and its drafter without a server; the drafter may have a process and cores of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

from outrider.cluster.config.service_config import ServiceConfig
from outrider.drafter_service.engine.messages import DrafterReady, DrafterUpdate
from outrider.drafter_service.service.colocated import open_local_drafter
from outrider.drafter_service.service.drafter_spec import DrafterSpec
from outrider.drafter_service.service.local_client import LocalDraftClient
from outrider.drafter_service.service.rank_main import run_drafter_rank
from outrider.verifier_service.engine.control import EngineControl
from outrider.verifier_service.engine.factory import build_engine, load_rank, profile_engine, run_verifier_rank
from outrider.verifier_service.engine.loop import EngineLoop
from outrider.verifier_service.links.relay_client import RelayDraftClient
from outrider.verifier_service.messages.draft import DrafterEvent, VerifierMessage
from outrider.verifier_service.messages.drafter_load import DrafterLoad
from outrider.verifier_service.messages.engine import (
    ControlResult,
    PeerState,
    PeerWeights,
    UpdateDraftWeights,
    UpdateWeights,
    WeightChange,
)
from outrider.verifier_service.messages.request import GenerationRequest, RequestOutput
from outrider.verifier_service.messages.wire import decode, encode
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.ranks import PipeListener, RankSpec, keep_loaded
from outrider.verifier_service.model.runner import ParallelRunner
from outrider.verifier_service.pipe_writer import PipeWriter
from outrider.verifier_service.refit.rank_weights import RankWeights

JOIN_TIMEOUT_S = 5.0
SPAWNING = multiprocessing.get_context("spawn")


class NoDrafters:
    """The `DraftClient` of an engine without drafters."""

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        raise AssertionError("nothing can be sent to a drafter that never came up")

    def poll(self) -> list[DrafterEvent]:
        return []


class PipeDraftClient:
    """A `DraftClient` of a drafter process, over a pipe."""

    def __init__(self, pipe: Connection, drafter_id: str, ready: DrafterReady) -> None:
        self._pipe = pipe
        self._writer = PipeWriter(pipe, lambda error: None)  # reading detects the same loss
        self._relay = RelayDraftClient()
        self._drafter_id = drafter_id
        self._is_up = True
        self._results: list[ControlResult] = []  # not taken yet
        self.load: DrafterLoad | None = None  # the last reported
        self._relay.feed(PeerState(peer=drafter_id, is_up=True, vocab_size=ready.vocab_size, needs=ready.needs))

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        self._relay.send(drafter_id, messages)
        for relay in self._relay.take_outbox():
            self._writer.write(encode(relay))

    def poll(self) -> list[DrafterEvent]:
        self._read()
        return self._relay.poll()

    def change_weights(self, message: UpdateDraftWeights) -> ControlResult:
        """Give the drafter new weights of its own; wait until it has answered."""
        self._writer.write(encode(message))
        while self._is_up and not self._results:
            self.wait(JOIN_TIMEOUT_S)
            self._read()
        if self._results:
            return self._results.pop()
        return ControlResult(call_id=message.call_id, error="the drafter's process has ended")

    def close(self) -> None:
        """Close the pipe: the drafter reads end of file and stops."""
        self._writer.close()
        self._pipe.close()

    def wait(self, timeout_s: float) -> None:
        """Sleep until the drafter sends something, at most `timeout_s`."""
        if self._is_up:
            with self._noticing_loss():
                self._pipe.poll(timeout_s)
        else:
            time.sleep(timeout_s)

    def _read(self) -> None:
        """Take in what has arrived."""
        with self._noticing_loss():
            while self._is_up and self._pipe.poll(0):
                update = decode(self._pipe.recv_bytes(), (DrafterUpdate,))
                self._take_load(update.load)
                self._results.extend(update.results)
                for relay in update.relays:
                    self._relay.feed(relay)

    def _take_load(self, load: DrafterLoad | None) -> None:
        if load is None:
            return
        told, self.load = None if self.load is None else self.load.weight_version, load
        if load.weight_version is not None and load.weight_version != told:
            self._relay.feed(PeerWeights(peer=self._drafter_id, weight_version=load.weight_version))

    @contextlib.contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError):
            if self._is_up:
                self._is_up = False
                self._relay.feed(PeerState(peer=self._drafter_id, is_up=False))


class RankProcesses:
    """Ranks as plain child processes; their sockets are in a temporary folder."""

    def __init__(
        self,
        main: Callable[[Any, RankSpec], None],
        spec: Any,
        size: int,
        first_rank: int,
        context: SpawnContext | ForkServerContext = SPAWNING,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="outrider-"))
        self.processes = [
            context.Process(target=main, args=(spec, self.rank(rank, size)), daemon=True)
            for rank in range(first_rank, size)
        ]

    def rank(self, rank: int, size: int) -> RankSpec:
        return RankSpec(rank=rank, size=size, folder=self.folder)

    def start(self) -> None:
        for process in self.processes:
            process.start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes if process.pid is not None]

    def are_alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        """Wait until the ranks have read end of file; kill those that do not stop."""
        for process in self.processes:
            process.join(JOIN_TIMEOUT_S)
            if process.is_alive():
                process.kill()
                process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


def start_drafter(
    opening: contextlib.ExitStack,
    ranks: RankProcesses,
    size: int = 1,
    starting: contextlib.AbstractContextManager[None] | None = None,
) -> tuple[Connection, DrafterReady]:
    """Start a drafter's ranks, which end with `opening`, and wait until it is loaded; return the pipe to the first.

    `starting` is entered while they start.
    """
    opening.callback(ranks.close)
    listener = opening.enter_context(PipeListener(ranks.rank(0, size).shell_address))
    with starting or contextlib.nullcontext():
        ranks.start()
    pipe = listener.accept(ranks.are_alive)
    return pipe, decode(pipe.recv_bytes(), (DrafterReady,))


class OfflineEngine:
    """Generate without a server, with the same engine and drafter code.

    `drafter_process`: the drafter has a process of its own and, if there are enough cores, a core per thread, taken
    from the verifier's. With one, call `step`: `serve` does not wake for its drafts.
    """

    def __init__(self, config: ServiceConfig, *, drafter_process: bool = False, prices_drafts: bool = False) -> None:
        """`prices_drafts`: measure step times first; then unpinned plans are bounds, and the price sets the length."""
        if len(config.drafters) > 1:
            raise ValueError("drafter_pools: without a server there is one drafter")
        self.config = config
        self.drafter_pids: list[int] = []  # empty if the drafter runs in this process
        self._exit = contextlib.ExitStack()
        with contextlib.ExitStack() as opening:
            spec, drafter = config.verifier_spec, config.drafter_spec
            is_apart = drafter_process and bool(config.pools)
            process = self._start_drafter(opening, drafter) if drafter is not None and is_apart else None
            runner, weights = _load_here(opening, run_verifier_rank, spec, spec.model)
            self.drafts: NoDrafters | LocalDraftClient | PipeDraftClient = process or NoDrafters()
            show = None
            if drafter is not None and process is None:
                self.drafts, show = open_local_drafter(drafter, runner, *_load_draft_model(opening, drafter))
            self.engine, self.runner, self.model = build_engine(runner, spec, self.drafts), runner, runner.model
            self.engine.stats.graphs = runner.graph_counts
            self._weights = weights
            self._change_draft = None if isinstance(self.drafts, NoDrafters) else self.drafts.change_weights
            self._control = EngineControl(self.engine, weights, self._change_draft)
            self.max_model_len, self.eos_token_ids = runner.max_model_len, frozenset(runner.eos_token_ids)
            if prices_drafts:
                profile_engine(self.engine, runner, spec)
            if show is not None:
                show(self.engine)
            keep_loaded()
            self._exit = opening.pop_all()

    def _start_drafter(self, opening: contextlib.ExitStack, spec: DrafterSpec) -> PipeDraftClient:
        size = spec.speculative.draft_tensor_parallel_size
        spec = dataclasses.replace(spec, takes_orders=True)  # of this program
        ranks = RankProcesses(run_drafter_rank, spec, size, first_rank=0)
        opening.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))  # closing gives the cores back
        aside = _cores_set_aside(size * (self.config.model.threads_per_rank or 1))
        pipe, ready = start_drafter(opening, ranks, size, aside)
        self.drafter_pids = ranks.pids
        client = PipeDraftClient(pipe, "process", ready)
        opening.callback(client.close)
        return client

    def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[RequestOutput]:
        """Run all requests together; yield outputs as tokens are committed."""
        for request in requests:
            if (failure := self.engine.add(request)) is not None:
                yield failure
        while self.engine.has_work():
            yield from self.step()

    def step(self) -> list[RequestOutput]:
        """Run one step; if every request waits for its draft, sleep until one arrives."""
        outputs = self.engine.step()
        if outputs is None and isinstance(self.drafts, PipeDraftClient):
            self.drafts.wait(self.engine.idle_s() or 0.0)
        return outputs or []

    def serve(self, pipe: Connection) -> None:
        """Take messages and send outputs as an engine process does, until the pipe's other end is closed."""
        EngineLoop(
            *(self.engine, RelayDraftClient(), pipe),
            clock=time.monotonic,
            check_integrity=self.config.check_integrity,
            weights=self._weights,
            change_draft=self._change_draft,
        ).run()

    def update_weights(self, folder: str, weight_version: str | None) -> None:
        """Take a checkpoint's weights, while no request runs. Raises `ValueError` if they do not fit: nothing changes.

        If the copy fails half-way, the engine refuses all requests until a whole update succeeds.
        """
        self._change(UpdateWeights(call_id="", folder=folder, weight_version=weight_version))

    def update_draft_weights(self, folder: str, weight_version: str | None) -> None:
        """Give the drafter a checkpoint's weights, while no request runs; raises `ValueError` if they are refused."""
        self._change(UpdateDraftWeights(call_id="", folder=folder, weight_version=weight_version))

    def _change(self, message: UpdateWeights | UpdateDraftWeights) -> None:
        assert not self.engine.has_work(), "weights change between requests"
        self.engine.drain()
        self._control.handle(message)
        if self._control.is_changing:
            self._control.finish_change()
        (result,) = self._control.take_results()
        if result.error is not None:
            raise ValueError(result.error)

    def cancel(self, request_id: str) -> None:
        """Stop a request and free its KV and session; a finished request is ignored."""
        self.engine.cancel(request_id)

    def close(self) -> None:
        self._exit.close()

    def __enter__(self) -> OfflineEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _load_draft_model(
    opening: contextlib.ExitStack, spec: DrafterSpec
) -> tuple[ParallelRunner | None, Callable[[WeightChange], int] | None]:
    """Load a drafter's model, if it has one; return its runner and what changes its weights."""
    if not spec.loads_model or spec.model is None:
        return None, None
    runner, weights = _load_here(opening, run_drafter_rank, spec, spec.model)
    return runner, weights.change


def _load_here(
    opening: contextlib.ExitStack, main: Callable[[Any, RankSpec], None], spec: Any, model: ModelConfig
) -> tuple[ParallelRunner, RankWeights]:
    """Run rank 0 in this process, and the other ranks as child processes."""
    size = model.tensor_parallel_size
    followers = RankProcesses(main, spec, size, first_rank=1)
    opening.callback(followers.close)
    followers.start()
    share = load_rank(model, followers.rank(0, size), has_trees=spec.has_trees, are_followers_alive=followers.are_alive)
    runner = ParallelRunner(*share)
    opening.callback(runner.close)
    return runner, RankWeights(*share)


@contextlib.contextmanager
def _cores_set_aside(num_cores: int) -> Iterator[None]:
    """Start children on the last `num_cores` cores; keep this process on the others, if there are any."""
    cores = sorted(os.sched_getaffinity(0))
    if num_cores >= len(cores):
        yield
        return
    os.sched_setaffinity(0, cores[-num_cores:])  # inherited by the children
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores[:-num_cores])
