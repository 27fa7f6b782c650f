"""The drafters that `outrider bench drafters` compares: which there are, and how one is opened, run and weighed.

Every drafter runs in the verifier's process (near) and, unless it reads the target's KV, in a process of its own (far).
The target has the same cores in every arm, all but the last: a near drafter takes turns with it, a far one has that.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.cluster.common.hints import did_you_mean
from outrider.cluster.config.known_models import drafter_paths
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.offline.engine import NoDrafters, PipeDraftClient, RankProcesses
from outrider.drafter_service.engine.messages import DrafterReady
from outrider.drafter_service.service.colocated import open_local_drafter
from outrider.drafter_service.service.drafter_spec import DrafterSpec
from outrider.drafter_service.service.methods import METHODS, Kind, Method
from outrider.drafter_service.service.rank_main import run_drafter_rank
from outrider.drafter_service.service.speculative_config import Location, SpeculativeConfig
from outrider.lab.bench.arms import Clock, OutriderArm, placed
from outrider.lab.bench.figures import BenchResult, Measurement, Workload, answer_pairs, rows_of
from outrider.lab.bench.pairs import warm_up
from outrider.lab.report import Machine
from outrider.lab.same_tokens import compare, plain_decoding
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.engine.factory import build_engine, load_rank
from outrider.verifier_service.messages.draft import DraftClient, DrafterEvent, DrafterMessage, VerifierMessage
from outrider.verifier_service.messages.request import RequestOutput
from outrider.verifier_service.messages.wire import decode, encode
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.ranks import PipeListener, RankSpec
from outrider.verifier_service.model.runner import ParallelRunner

OFF = "no drafts"
TREE_SUFFIX = "+tree"
DEFAULT_NAMES = (
    *("draft_model", "draft_model+tree", "ngram", "suffix", "suffix+tree", "lookahead", "early_exit", "sparse"),
    *("medusa", "medusa+tree", "mlp_speculator", "eagle", "eagle3", "eagle3+tree"),
    *("parallel_draft", "dflash", "hybrid"),
)
HYBRID_LOOKUP = Method.SUFFIX
HYBRID_MODELS = (Method.EAGLE3, Method.EAGLE, Method.MEDUSA, Method.DRAFT_MODEL)  # the first that has a checkpoint
CACHE_BYTES = 256 << 20  # for KV, of each side


OpenOne = Callable[["DrafterArm", Clock], contextlib.AbstractContextManager[OutriderArm]]


class Place(enum.StrEnum):
    """Where an arm's drafter runs; without one NEAR, for then nothing is far."""

    NEAR = "near"
    FAR = "far"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterArm:
    """One way to draft, or (`name` OFF) none."""

    name: str
    place: Place
    config: ServiceConfig

    @property
    def label(self) -> str:
        return self.name if self.name == OFF else f"{self.name}, {self.place}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What is measured."""

    target: str
    pair: str  # what was done to the target
    groups: tuple[tuple[DrafterArm, ...], ...]  # measured beside each other, plain decoding first
    workload: Workload
    concurrencies: tuple[int, ...]
    repeats: int
    num_tree_nodes: int

    @property
    def num_runs(self) -> int:
        """Return how many measured runs there will be."""
        return self.repeats * len(self.concurrencies) * sum(map(len, self.groups))

    def result_of(self, machine: Machine, measurements: Sequence[Measurement]) -> BenchResult:
        """Add the runs up, and hold greedy tokens against plain decoding's."""
        is_greedy = self.workload.temperature == 0.0
        model = self.groups[0][0].config.verifier_spec.model
        answers = answer_pairs(self.pair, measurements, self.workload.prompts, OFF) if is_greedy else []
        rows = rows_of(self.pair, measurements, 0, baseline=OFF, compare=is_greedy, off=OFF)
        return BenchResult(
            machine=machine,
            target=self.target,
            draft=None,
            baseline=OFF,
            workload=self.workload,
            repeats=self.repeats,
            read_bytes_per_s={},
            rows=tuple(sorted(rows, key=lambda row: row.concurrency)),
            tallies=(compare(answers, plain_decoding(model)),) if is_greedy else (),
        )


def measure(
    plan: BenchPlan, *, clock: Clock, on_run: Callable[[str], None], open_arm: OpenOne | None = None
) -> list[Measurement]:
    """Run every arm at every concurrency as often as asked, each after a warm-up that does not count.

    Every second repeat goes backwards, so that a machine that gets slower or faster favours no arm. What is measured
    beside each other has the same number as its repeat.
    """
    measurements: list[Measurement] = []
    for repeat in range(plan.repeats):
        direction = -1 if repeat % 2 else 1
        for group in range(len(plan.groups))[::direction]:
            for arm in plan.groups[group][::direction]:
                with (open_arm or opened)(arm, clock) as ready:
                    for concurrency in plan.concurrencies:
                        on_run(f"{arm.label}, concurrency {concurrency}")
                        ready.run(warm_up(plan.workload, concurrency), concurrency)
                        measurements.append(
                            Measurement(
                                arm=arm.label,
                                num_threads=ready.num_threads,
                                concurrency=concurrency,
                                repeat=repeat * len(plan.groups) + group,
                                trace=ready.run(plan.workload, concurrency),
                                read_bytes_per_s=1.0,
                            )
                        )
                del ready  # the next arm's models need the room
    return measurements


# --- which arms there are ---


def known_checkpoints(model: str | None, given: Mapping[str, Path]) -> dict[Method, Path]:
    """Return where the draft models and heads of a target are: those given, and those shipped with the embedded one."""
    shipped = drafter_paths(model)
    found = {method: path for method, path in shipped.items() if path.is_dir()}
    return found | {_parse_method(name): path for name, path in given.items()}


def arm_groups(
    names: Sequence[str] | None, base: ServiceConfig, checkpoints: Mapping[Method, Path], num_tree_nodes: int
) -> tuple[tuple[DrafterArm, ...], ...]:
    """Make the arms of every method, plain decoding in front; `names` None: all that can be had.

    Raises `ValueError` where a name is none, its checkpoint is missing, or its combination is refused.
    """
    methods: dict[Method, list[DrafterArm]] = {}
    for name in names or DEFAULT_NAMES:
        method = _parse_method(name)
        if names is None and _missing(method, checkpoints) is not None:
            continue
        methods.setdefault(method, []).extend(_arms_of(name, method, base, checkpoints, num_tree_nodes))
    if not methods:
        raise ValueError("methods: there are none")
    plain = DrafterArm(name=OFF, place=Place.NEAR, config=base.with_options(draft_model=None, num_drafters=0))
    return tuple((plain, *arms) for arms in methods.values())


def _parse_method(name: str) -> Method:
    text = name.removesuffix(TREE_SUFFIX)
    if text not in set(Method):
        raise ValueError(f"methods: unknown method {text!r}{did_you_mean(text, [method.value for method in Method])}")
    return Method(text)


def _missing(method: Method, checkpoints: Mapping[Method, Path]) -> Method | None:
    """Return the method whose checkpoint is needed and not there."""
    if method is Method.HYBRID:
        return None if any(model in checkpoints for model in HYBRID_MODELS) else Method.DRAFT_MODEL
    needed = SpeculativeConfig(method=method, location=Location.VERIFIER).needs_checkpoint
    return method if needed and method not in checkpoints else None


def _arms_of(
    name: str, method: Method, base: ServiceConfig, checkpoints: Mapping[Method, Path], num_tree_nodes: int
) -> Iterator[DrafterArm]:
    if (missing := _missing(method, checkpoints)) is not None:
        raise ValueError(f"methods: {name} has no checkpoint: give --checkpoint {missing}=FOLDER")
    model = method
    options: dict[str, object] = {"method": method.value}
    if method is Method.HYBRID:
        model = next(candidate for candidate in HYBRID_MODELS if candidate in checkpoints)
        options["methods"] = [HYBRID_LOOKUP.value, model.value]
        name = name.replace(method, f"{method}: {HYBRID_LOOKUP}, {model}")
    if name.endswith(TREE_SUFFIX):
        options["num_tree_nodes"] = num_tree_nodes
    path = checkpoints.get(model)
    for place, location in ((Place.NEAR, Location.VERIFIER), (Place.FAR, Location.POOL)):
        if METHODS[method].kind is Kind.TARGET and place is Place.FAR:
            continue
        config = base.with_options(
            draft_model=None if path is None else str(path),
            speculative_config={**options, "location": location.value},
            num_drafters=1,
        )
        yield DrafterArm(name=name, place=place, config=config)


# --- opening one ---


class WeighingClient:
    """A `DraftClient` that keeps what passes through it, to be weighed when the clock has stopped."""

    def __init__(self, client: DraftClient) -> None:
        self._client = client
        self._passed: list[VerifierMessage | DrafterMessage] = []

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        self._passed.extend(messages)
        self._client.send(drafter_id, messages)

    def poll(self) -> list[DrafterEvent]:
        events = self._client.poll()
        self._passed.extend(event.message for event in events if event.message is not None)
        return events

    def take_bytes(self) -> dict[str, int]:
        """Return, and forget, the encoded bytes of what has passed, by type of message."""
        passed, self._passed = self._passed, []
        sizes: Counter[str] = Counter()
        for message in passed:
            sizes[type(message).__name__] += len(encode(message))
        return dict(sizes)


@dataclass(slots=True)
class WeighedEngine:
    """An engine whose messages to its drafter are weighed; an `Engine` of arms."""

    engine: VerifierEngine
    pipe: PipeDraftClient | None  # of a drafter in a process of its own
    client: WeighingClient

    def step(self) -> list[RequestOutput]:
        """Run one step; where every request waits for its draft, sleep until one arrives."""
        outputs = self.engine.step()
        if outputs is None and self.pipe is not None:
            self.pipe.wait(self.engine.idle_s() or 0.0)
        return outputs or []

    def take_bytes(self) -> dict[str, int]:
        """Return, and forget, the bytes that crossed a wire, by type of message."""
        found = self.client.take_bytes()
        return {} if self.pipe is None else found


@contextlib.contextmanager
def opened(arm: DrafterArm, clock: Clock) -> Iterator[OutriderArm]:
    """Load an arm's target and drafter, and keep this process on the target's cores, until the end."""
    gc.collect()  # the last arm's models are in cycles
    target_cores, drafter_cores = shared_out(arm.place)
    config = arm.config.with_options(kv_cache_memory_bytes=arm.config.model.kv_cache_memory_bytes or CACHE_BYTES)
    verifier = config.with_options(threads_per_rank=len(target_cores)).verifier_spec
    drafter = config.with_options(threads_per_rank=len(drafter_cores)).drafter_spec
    with contextlib.ExitStack() as opening:
        pipe = None
        if drafter is not None and arm.place is Place.FAR:
            with placed(drafter_cores, len(drafter_cores)):  # a child inherits the cores
                pipe = _start_drafter(opening, drafter)
        opening.enter_context(placed(target_cores, len(target_cores)))
        runner = _load(verifier.model)
        if drafter is None or pipe is not None:
            client = WeighingClient(pipe or NoDrafters())
            engine = build_engine(runner, verifier, client)
        else:
            draft_model = _load(drafter.model) if drafter.loads_model and drafter.model is not None else None
            local, attach = open_local_drafter(drafter, runner, draft_model)
            client = WeighingClient(local)
            engine = build_engine(runner, verifier, client)
            attach(engine)
        yield OutriderArm(
            arm.label,
            WeighedEngine(engine, pipe, client),
            cores=target_cores,
            num_threads=len(target_cores),
            clock=clock,
            drafts=arm.name != OFF,
            forgets=True,
        )


def shared_out(place: Place) -> tuple[frozenset[int], frozenset[int]]:
    """Return the cores of target and drafter."""
    cores = sorted(os.sched_getaffinity(0))
    target_cores, last = frozenset(cores[:-1] or cores), frozenset(cores[-1:])
    return target_cores, target_cores if place is Place.NEAR else last


def _load(model: ModelConfig) -> ParallelRunner:
    return ParallelRunner(*load_rank(model, RankSpec(rank=0, size=1, folder=Path())))


def _start_drafter(opening: contextlib.ExitStack, spec: DrafterSpec) -> PipeDraftClient:
    """Start the drafter's process and wait until it is loaded."""
    ranks = RankProcesses(run_drafter_rank, spec, size=1, first_rank=0)
    opening.callback(ranks.close)
    listener = opening.enter_context(PipeListener(ranks.rank(0, 1).shell_address))
    ranks.start()
    pipe = listener.accept(ranks.are_alive)
    client = PipeDraftClient(pipe, "far", decode(pipe.recv_bytes(), (DrafterReady,)))
    opening.callback(client.close)
    return client
