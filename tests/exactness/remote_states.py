"""A target with an EAGLE-3 head far away: a drafter process behind the real link servicer, a verifier engine here.

python -m exactness.remote_states         round trip, bytes per round and parts of a step of the embedded target
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import queue
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import torch
from transformers import LlamaConfig

from fakes.by_channel import ByChannel
from outrider.drafter_service.heads.eagle3 import Eagle3Config, Eagle3Head
from outrider.drafter_service.service.colocated import open_local_drafter
from outrider.drafter_service.service.drafter_spec import DrafterSpec
from outrider.drafter_service.service.speculative_config import Method, SpeculativeConfig
from outrider.lab.bench.method_arms import DRAFTING, MESSAGES, WAITING, TimedClient
from outrider.lab.bench.profile import PhaseClock
from outrider.verifier_service.drafting.asking import CoordinatorConfig
from outrider.verifier_service.drafting.coordinator import DraftCoordinator
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.engine.factory import load_rank
from outrider.verifier_service.engine.verifier_spec import VerifierSpec
from outrider.verifier_service.links.link_pool import LinkPool
from outrider.verifier_service.links.relay_client import RelayDraftClient
from outrider.verifier_service.links.tensor_channel import ChannelLimits, TensorSender
from outrider.verifier_service.messages.draft import (
    Draft,
    DraftClient,
    DrafterEvent,
    Drafts,
    States,
    VerifierMessage,
    each_draft,
)
from outrider.verifier_service.messages.link import DrafterEndpoint, Hello
from outrider.verifier_service.messages.request import FinishReason, GenerationRequest, SamplingParams, SpeculationPlan
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.ranks import RankSpec
from outrider.verifier_service.model.runner import ParallelRunner
from outrider.verifier_service.scheduling.kv_cache import BlockPool
from outrider.verifier_service.scheduling.scheduler import Scheduler, SchedulerConfig
from tiny.forking import FORKING
from tiny.heads import randomised
from tiny.models import make_checkpoint

PATIENCE_S = 120.0
DRAFT_DEADLINE_S = 60.0
NUM_LAYERS = 5
TAPS = (1, 2, 4)


# --- checkpoints ---


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Write a tiny target and a random EAGLE-3 head over three of its layers."""
    target, head = folder / "target", folder / "head"
    make_checkpoint(target, num_hidden_layers=NUM_LAYERS)
    write_head(target, head, TAPS)
    return target, head


def write_head(target: Path, folder: Path, taps: tuple[int, ...]) -> None:
    description = LlamaConfig.from_pretrained(target)
    layer = LlamaConfig(**{**description.to_dict(), "num_hidden_layers": 1})
    vocab_size, width = description.vocab_size, description.hidden_size
    config = Eagle3Config(layer=layer, taps=taps, draft_vocab_size=vocab_size // 2, target_hidden_size=width)
    head = Eagle3Head(config, target_ids=torch.arange(0, 2 * (vocab_size // 2), 2))
    randomised(head, seed=4)
    head.save(folder)


def head_spec(target: Path, head: Path, *, tensor_host: str = "", num_speculative_tokens: int = 3) -> DrafterSpec:
    def model(path: Path) -> ModelConfig:
        return ModelConfig(path=str(path), num_kv_blocks=256, block_size=4, device="cpu", check_logits=False)

    return DrafterSpec(
        model=model(head),
        target=model(target),
        speculative=SpeculativeConfig(
            method=Method.EAGLE3, model=str(head), num_speculative_tokens=num_speculative_tokens
        ),
        sampling_seed=0,
        check_integrity=True,
        tensor_host=tensor_host,
    )


# --- the drafter's process ---


async def _serve(
    spec: DrafterSpec, rank: RankSpec, transports: tuple[str, ...], on_port: Callable[[int], None]
) -> None:
    """Be the shell of a drafter: what `DrafterReplica` does, without Ray."""
    from outrider.cluster.replicas.drafter_replica import ShellPort
    from outrider.cluster.replicas.engine_shell import EngineShell
    from outrider.drafter_service.engine.messages import FROM_DRAFT_ENGINE, DrafterReady
    from outrider.drafter_service.service.service import DrafterLinkServicer
    from outrider.proto.link_pb2_grpc import add_DrafterLinkServicer_to_server
    from outrider.verifier_service.messages.link import CHANNEL_OPTIONS, DrafterIdentity
    from outrider.verifier_service.model.ranks import PipeListener

    with PipeListener(rank.shell_address) as listener:
        pipe = await asyncio.to_thread(listener.accept)
    ready: asyncio.Future[DrafterReady] = asyncio.get_running_loop().create_future()
    failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def hear(message: Any) -> None:
        if ready.done():
            port.on_update(message)
        else:
            ready.set_result(message)

    shell = EngineShell(pipe, FROM_DRAFT_ENGINE, on_message=hear, on_failure=failed.set_result)
    port = ShellPort(shell)  # type: ignore[arg-type]  # of its host it wants `send` and `failure` alone
    shell.start()
    engine = await ready
    identity = DrafterIdentity(
        drafter_id="d",
        vocab_size=engine.vocab_size,
        vocab_fingerprint="",
        max_draft_length=engine.max_draft_length,
        max_model_len=engine.max_model_len,
        needs=engine.needs,
        tensor_transports=transports,
        tensor_store=engine.tensor_store,
    )
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    add_DrafterLinkServicer_to_server(DrafterLinkServicer(port, identity), server)
    number = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    on_port(number)
    raise SystemExit(await failed)


def drafter_main(spec: DrafterSpec, transports: tuple[str, ...], port: Connection) -> None:
    """Run a drafter: its engine on the main thread, its shell on another."""
    from outrider.drafter_service.service.rank_main import run_drafter_rank

    def tell(number: int) -> None:
        port.send_bytes(str(number).encode())

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        rank = RankSpec(rank=0, size=1, folder=Path(folder))
        threading.Thread(target=lambda: asyncio.run(_serve(spec, rank, transports, tell)), daemon=True).start()
        run_drafter_rank(spec, rank)


class DrafterProcess:
    """A drafter at a port of its own."""

    def __init__(
        self, target: Path, head: Path, transports: Sequence[str] = (), *, num_speculative_tokens: int = 3
    ) -> None:
        tensor_host = "127.0.0.1" if transports else ""
        spec = head_spec(target, head, tensor_host=tensor_host, num_speculative_tokens=num_speculative_tokens)
        self._heard, told = FORKING.Pipe(duplex=False)
        self._process = FORKING.Process(target=drafter_main, args=(spec, tuple(transports), told), daemon=True)
        self._process.start()
        told.close()  # the process's end closes with it
        self._port: int | None = None

    @property
    def endpoint(self) -> DrafterEndpoint:
        if self._port is None:
            try:
                self._port = int(self._heard.recv_bytes())
            except EOFError:
                self._process.join()
                raise AssertionError(f"the drafter ended: {self._process.exitcode}") from None
        return DrafterEndpoint(drafter_id="d", endpoint=f"127.0.0.1:{self._port}", epoch=self._port)

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._heard.close()


@contextlib.contextmanager
def drafting(*arguments: Any, **options: Any) -> Iterator[DrafterProcess]:
    process = DrafterProcess(*arguments, **options)
    try:
        yield process
    finally:
        process.kill()


# --- the verifier ---


class WatchedClient:
    """A `DraftClient` that notes what goes through it."""

    def __init__(self, client: DraftClient) -> None:
        self._client = client
        self.drafts: list[tuple[str, int, tuple[int, ...]]] = []  # request, position, tokens
        self.states: list[tuple[str, int, int]] = []  # request, first position, bytes

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        self.states += [(m.request_id, m.position, len(m.data)) for m in messages if isinstance(m, States)]
        self._client.send(drafter_id, messages)

    def poll(self) -> list[DrafterEvent]:
        events = self._client.poll()
        for event in events:
            for draft in each_draft(event.message) if isinstance(event.message, Draft | Drafts) else ():
                self.drafts.append((draft.request_id, draft.position, draft.token_ids))
        return events


@dataclass(slots=True)
class Run:
    """What requests gave."""

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    num_rounds: int = 0
    num_accepted_tokens: int = 0
    num_cached_tokens: int = 0

    def add(self, output: Any) -> None:
        assert output.finish_reason is not FinishReason.ERROR, output.error
        self.token_ids.setdefault(output.request_id, []).extend(output.token_ids)
        if output.finish_reason is not None:
            self.num_rounds += output.speculation.num_drafts
            self.num_accepted_tokens += output.speculation.num_accepted_tokens
            self.num_cached_tokens += output.num_cached_tokens


def build_patient_engine(runner: ParallelRunner, spec: VerifierSpec, drafts: DraftClient) -> VerifierEngine:
    """Build an engine that waits for every draft, so that runs can be compared draft by draft."""
    limits = {"max_model_len": runner.max_model_len, "vocab_size": runner.vocab_size}
    config = SchedulerConfig(max_num_batched_tokens=spec.max_num_batched_tokens, max_num_seqs=64, **limits)
    patience = dict.fromkeys(("first_deadline_s", "min_deadline_s", "max_deadline_s"), DRAFT_DEADLINE_S)
    return VerifierEngine(
        runner,
        Scheduler(config, BlockPool(runner.num_blocks, runner.block_size)),
        DraftCoordinator(drafts, CoordinatorConfig(**limits, **patience), runner.states),
        clock=time.monotonic,
        generator=torch.Generator().manual_seed(7),
    )


def verifier_spec(target: Path, head: Path, state_dtype: str = "auto", **options: Any) -> VerifierSpec:
    from outrider.drafter_service.service.drafter_spec import state_taps

    model = replace(head_spec(target, head).target, state_taps=state_taps(head_spec(target, head)))
    model = replace(model, state_dtype=state_dtype)
    return VerifierSpec(model=model, sampling_seed=0, **options)


class Colocated:
    """The drafter in the verifier's process."""

    def __init__(self, target: Path, head: Path, **options: Any) -> None:
        spec = verifier_spec(target, head, **options)
        runner = ParallelRunner(load_rank(spec.model, RankSpec(rank=0, size=1, folder=target))[0], [])
        local, attach = open_local_drafter(head_spec(target, head), runner, None)
        self.client, self.phases = WatchedClient(local), PhaseClock(time.perf_counter)
        self.phases.begin()
        self.engine = build_patient_engine(runner, spec, TimedClient(self.client, self.phases.end, DRAFTING))
        self.engine.on_phase = self.phases.end
        attach(self.engine)

    def run(self, requests: Sequence[GenerationRequest]) -> Run:
        run = Run()
        for request in requests:
            assert self.engine.add(request) is None
        while self.engine.has_work():
            self.phases.begin()
            for output in self.engine.step() or []:
                run.add(output)
        return run


class RemoteVerifier:
    """A verifier whose drafters are behind links; its shell is an event loop on a thread."""

    def __init__(
        self,
        target: Path,
        head: Path,
        transports: Sequence[str] = (),
        *,
        limits: ChannelLimits | None = None,
        **options: Any,
    ) -> None:
        spec = verifier_spec(target, head, **options)
        runner = ParallelRunner(load_rank(spec.model, RankSpec(rank=0, size=1, folder=target))[0], [])
        self.relay = RelayDraftClient(lambda route: self._open_sender(route, limits), make_ways=ByChannel)
        self.senders: list[TensorSender] = []
        self.client, self.phases = WatchedClient(self.relay), PhaseClock(time.perf_counter)
        self.phases.begin()
        self.engine = build_patient_engine(runner, spec, TimedClient(self.client, self.phases.end, MESSAGES))
        self.engine.on_phase = self.phases.end
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        hello = Hello(
            verifier_id="v",
            epoch=time.time_ns(),
            vocab_size=runner.vocab_size,
            state_taps=spec.model.state_taps,
            tensor_transports=tuple(transports),
        )
        self._pool: LinkPool = self._await(self._make_pool(hello))

    def _open_sender(self, route: Any, limits: ChannelLimits | None) -> TensorSender:
        self.senders.append(TensorSender(route, limits))
        return self.senders[-1]

    async def _make_pool(self, hello: Hello) -> LinkPool:
        return LinkPool(hello, self._inbox.put)

    def _await(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)

    def connect(self, drafter: DrafterProcess) -> None:
        """Hold a link to this drafter, and to no other; wait until it is up and its channel, if any, is there."""
        self._await(self._pool.hold([drafter.endpoint]))
        self.wait_until(lambda: self.engine.drafting.circuits(time.monotonic()))
        for sender in self.senders[-1:]:
            self.wait_until(lambda sender=sender: sender.is_connected or sender.failure is not None)

    def wait_until(self, condition: Any) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline_s, "what was waited for does not come"
            self.turn(patience_s=0.01)

    def run(self, requests: Sequence[GenerationRequest], *, on_turn: Any = None) -> Run:
        """Run requests to their end; `on_turn` is called with the run after every step."""
        run, deadline_s = Run(), time.monotonic() + PATIENCE_S
        for request in requests:
            assert self.engine.add(request) is None
        while self.engine.has_work():
            assert time.monotonic() < deadline_s, "the requests do not finish"
            for output in self.turn():
                run.add(output)
            if on_turn is not None:
                on_turn(run)
        return run

    def turn(self, patience_s: float = 1.0) -> list[Any]:
        """Take one step and relay what it says; sleep where nothing could run."""
        self._take_in(0.0)
        outputs = self.engine.step()
        self._loop.call_soon_threadsafe(self._pool.send, self.relay.take_outbox())
        if outputs is None:
            self._take_in(min(patience_s, self.engine.idle_s() or patience_s))
            self.phases.end(WAITING)
            return []
        self.phases.begin()
        return outputs

    def _take_in(self, patience_s: float) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._inbox.get(timeout=patience_s) if patience_s else self._inbox.get_nowait()
                self.relay.feed(message)
                patience_s = 0.0

    def close(self) -> None:
        self._await(self._pool.close())
        self.relay.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()


@contextlib.contextmanager
def verifying(*arguments: Any, **options: Any) -> Iterator[RemoteVerifier]:
    verifier = RemoteVerifier(*arguments, **options)
    try:
        yield verifier
    finally:
        verifier.close()


def request(request_id: str, prompt: Sequence[int], *, length: int = 3, **sampling: Any) -> GenerationRequest:
    options = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.0, **sampling}
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**options),
        plan=SpeculationPlan(draft_length=length),
    )


# --- figures ---


NUM_REPEATS = 3


def measure() -> None:
    """Print the round trip and the bytes of a round, by transport, prompt length and concurrency."""
    from outrider.drafter_service import embedded

    torch.set_num_threads(1)
    target = embedded.target_path()
    shipped = embedded.drafter_paths()[Method.EAGLE3]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        head = shipped if shipped.exists() else Path(folder) / "head"
        if head != shipped:
            write_head(target, head, (1, 3, 5))
        verifiers: dict[str, RemoteVerifier] = {}
        for name, transports in (("grpc", ()), ("gloo", ("gloo",))):
            drafter = stack.enter_context(drafting(target, head, transports))
            verifiers[name] = stack.enter_context(verifying(target, head, transports))
            verifiers[name].connect(drafter)
        near = Colocated(target, head)
        for prompt_length, num_requests in ((16, 1), (16, 8), (400, 1)):
            figures: dict[str, list[float]] = {name: [] for name in verifiers}
            for repeat in range(NUM_REPEATS):  # in turns: whatever else the machine does hits both
                for name, verifier in verifiers.items():
                    trips = _measure(name, verifier, prompt_length, num_requests, repeat)
                    figures[name] += trips if repeat else []
            for name, each in (("one process", near), *verifiers.items()):
                sys.stdout.write(f"  {name}: {_parts(each, prompt_length, num_requests)}\n")
            for name, trips in figures.items():
                sys.stdout.write(f"  {name}: median {1e3 * statistics.median(trips):.2f} ms of {len(trips)} rounds\n")


def _parts(verifier: Colocated | RemoteVerifier, prompt_length: int, num_requests: int) -> str:
    """Say what a decoding step takes by part, in ms, while all requests run."""
    rng = torch.Generator().manual_seed(prompt_length)
    prompts = torch.randint(3, 2000, (num_requests, prompt_length), generator=rng).tolist()
    verifier.phases.steps.clear()
    verifier.phases.begin()
    verifier.run([request(f"parts-{i}", prompt, max_tokens=48) for i, prompt in enumerate(prompts)])
    steps = [step for step in verifier.phases.steps if "forward" in step][2:]  # the first ones read prompts
    total: collections.Counter[str] = collections.Counter()
    for step in steps:
        total.update(step)
    return ", ".join(f"{part} {1e3 * seconds / len(steps):.2f}" for part, seconds in total.items()) + " ms a step"


def _measure(name: str, verifier: RemoteVerifier, prompt_length: int, num_requests: int, repeat: int) -> list[float]:
    rng = torch.Generator().manual_seed(100 * repeat + prompt_length)  # no prompt twice: it would be cached
    prompts = torch.randint(3, 2000, (num_requests, prompt_length), generator=rng).tolist()
    trips: dict[tuple[str, float], float] = {}  # seconds, by request and when they began

    def note(run: Run) -> None:
        for known in verifier.engine.requests.values():
            if (answered := verifier.engine.drafting.answered_round(known)) is not None:
                trips[known.request_id, answered.asked_s] = answered.received_s - answered.asked_s

    bytes_before = collections.Counter(verifier.relay.num_state_bytes)
    requests = [request(f"{prompt_length}-{i}", prompt, max_tokens=48) for i, prompt in enumerate(prompts)]
    begin_s = time.monotonic()
    run = verifier.run(requests, on_turn=note)
    spent = verifier.relay.num_state_bytes - bytes_before
    seconds = list(trips.values())
    sys.stdout.write(
        f"{name}: prompt {prompt_length}, {num_requests} at once: {len(seconds)} rounds in "
        f"{time.monotonic() - begin_s:.1f} s, round trip median {1e3 * statistics.median(seconds):.2f} ms, "
        f"p90 {1e3 * statistics.quantiles(seconds, n=10)[-1]:.2f}, first {1e3 * seconds[0]:.2f}; "
        f"{sum(spent.values()) / len(seconds):.0f} state bytes a round {dict(spent)}; "
        f"{run.num_accepted_tokens} of {sum(map(len, run.token_ids.values()))} tokens accepted\n"
    )
    return seconds


if __name__ == "__main__":
    measure()
