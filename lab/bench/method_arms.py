"""The methods that `outrider bench methods` compares: which there are, how one is opened, and how a batch decodes.

Every drafter runs in the verifier's process (near) or, unless it reads the target's KV, in a process of its own (far).
The target has as many threads as there are cores but one: a near drafter takes turns with it, a far one has the last.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

import torch

from outrider.cluster.common.hints import did_you_mean
from outrider.cluster.config.known_models import drafter_paths
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.offline.engine import PipeDraftClient, RankProcesses, start_drafter
from outrider.drafter_service.service.colocated import open_local_drafter
from outrider.drafter_service.service.drafter_spec import DrafterSpec
from outrider.drafter_service.service.methods import METHODS, Kind, Method
from outrider.drafter_service.service.rank_main import run_drafter_rank
from outrider.drafter_service.service.speculative_config import Location, SpeculativeConfig
from outrider.lab.bench.arms import BenchError, Clock, placed
from outrider.lab.bench.profile import PhaseClock
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.engine.factory import build_engine, load_rank, profile_engine
from outrider.verifier_service.engine.pipelined import PipelinedEngine
from outrider.verifier_service.messages.draft import DraftClient, DrafterEvent, VerifierMessage
from outrider.verifier_service.messages.engine import StepTime
from outrider.verifier_service.messages.request import GenerationRequest, RequestOutput, SamplingParams, SpeculationPlan
from outrider.verifier_service.messages.tree import VerifiedTokens
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.ranks import RankSpec
from outrider.verifier_service.model.runner import ParallelRunner
from outrider.verifier_service.sampling.entries import VerificationEntry
from outrider.verifier_service.sampling.unread import UnreadTokens
from outrider.verifier_service.sampling.verification import DoneVerification, Verification, begin

TREE_SUFFIX = "+tree"
DEFAULT_NAMES = (
    *("ngram", "suffix", "suffix+tree", "lookahead", "early_exit", "sparse", "draft_model", "draft_model+tree"),
    *("medusa", "medusa+tree", "mlp_speculator", "eagle", "eagle3", "eagle3+tree", "parallel_draft", "dflash"),
    "hybrid",
)
HYBRID_LOOKUP = Method.SUFFIX
HYBRID_MODELS = (Method.EAGLE3, Method.EAGLE, Method.MEDUSA, Method.DRAFT_MODEL)  # the first that has a checkpoint
CACHE_BYTES = 768 << 20  # for KV, of each side
NUM_BLOCKS = 2  # in which every mode decodes, of a wave of requests
NUM_SKIPPED = 2  # steps after each change of mode, which still have the drafts of the one before
# priced steps before any count: drafts that do not pay have lost their first trial, and the second, 64 steps later, is
# among them, or after all that count
NUM_SETTLING, NUM_SETTLINGS = 24, 4
MANY, MANY_SHARE = 64, 2  # from so many requests on a part of the steps, since each makes many tokens; settled once
WAITING, DRAFTING, MESSAGES = "waiting", "drafting", "messages"  # parts of a step beside the engine's own


class Mode(enum.StrEnum):
    """How much is drafted."""

    OFF = "off"
    ALWAYS = "always"  # in every step as much as is allowed
    PRICED = "priced"  # as each step's price has it

    def plan(self, length: int) -> SpeculationPlan:
        return SpeculationPlan(draft_length=0 if self is Mode.OFF else length, is_pinned=self is not Mode.PRICED)


# --- which methods there are ---


def known_checkpoints(model: str | None, given: Mapping[str, Path]) -> dict[Method, Path]:
    """Return where the draft models and heads of a target are: those given, and those shipped with it."""
    found = {method: path for method, path in drafter_paths(model).items() if path.is_dir()}
    return found | {_parse_method(name): path for name, path in given.items()}


def method_configs(
    names: Sequence[str] | None,
    base: ServiceConfig,
    checkpoints: Mapping[Method, Path],
    *,
    num_tree_nodes: int,
    is_far: bool = False,
) -> dict[str, ServiceConfig]:
    """Return the service of every method by its name; `names` None: all that can be had there.

    Raises `ValueError` where a name is none, its checkpoint is missing, or its place or combination is refused.
    """
    found = {}
    for name in names or DEFAULT_NAMES:
        method = _parse_method(name)
        missing = _missing(method, checkpoints)
        stays = is_far and METHODS[method].kind is Kind.TARGET
        if names is None and (missing is not None or stays):
            continue
        if missing is not None:
            raise ValueError(f"methods: {name} has no checkpoint: give --checkpoint {missing}=FOLDER")
        if stays:
            raise ValueError(f"methods: {name} reads the target's KV and runs in the verifier's process alone")
        found[name] = _config_of(name, method, base, checkpoints, num_tree_nodes, is_far)
    return found


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


def _config_of(
    name: str,
    method: Method,
    base: ServiceConfig,
    checkpoints: Mapping[Method, Path],
    num_tree_nodes: int,
    is_far: bool,
) -> ServiceConfig:
    model = method
    options: dict[str, object] = {"method": method.value}
    if method is Method.HYBRID:
        model = next(candidate for candidate in HYBRID_MODELS if candidate in checkpoints)
        options["methods"] = [HYBRID_LOOKUP.value, model.value]
    if name.endswith(TREE_SUFFIX):
        options["num_tree_nodes"] = num_tree_nodes
    options["location"] = (Location.POOL if is_far else Location.VERIFIER).value
    path = checkpoints.get(model)
    draft_model = None if path is None else str(path)
    return base.with_options(draft_model=draft_model, speculative_config=options, num_drafters=1)


# --- what is measured ---


@dataclass(slots=True)
class Steps:
    """What the counted steps of one mode came to."""

    num_steps: int = 0
    num_tokens: int = 0
    num_rounds: int = 0  # verifications, those without a draft included
    num_drafts: int = 0
    seconds: Counter[str] = field(default_factory=Counter)  # by part of a step

    def add(self, parts: Mapping[str, float], outputs: Sequence[RequestOutput]) -> None:
        """Count a step."""
        self.num_steps += 1
        self.seconds.update(parts)
        for output in outputs:
            self.num_tokens += len(output.token_ids)
            self.num_rounds += 1
            self.num_drafts += output.num_draft_tokens > 0

    def plus(self, other: Steps) -> Steps:
        """Return both together."""
        return Steps(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds.total()


class OneAtATime:
    """A verification that, while it `is_on`, commits one token and notes how many drafted ones were right.

    So a draft is seen at every position, and the tokens are those of plain decoding.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.seen: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)  # drafted and right, by request, position

    def __call__(
        self,
        logits: torch.Tensor,
        entries: Sequence[VerificationEntry],
        rng: torch.Generator,
        rows: Sequence[int] | None = None,
        unread: UnreadTokens | None = None,
    ) -> Verification:
        assert unread is None, "what is read at once cannot be drafted meanwhile"
        verification = begin(logits, entries, rng, rows)
        if not self.is_on:
            return verification
        verified = verification.collect()
        for entry, found in zip(entries, verified, strict=True):
            if entry.draft is not None:
                place = (len(entry.draft_token_ids), len(found.path))
                self.seen[entry.draft.request_id][entry.position] = place
        return DoneVerification([VerifiedTokens(one.token_ids[:1], ()) for one in verified], verification.chosen)


@dataclass(frozen=True, slots=True)
class TimedClient:
    """A `DraftClient` that tells a clock when it was asked for drafts, and when it has answered."""

    client: DraftClient
    end: Callable[[str], None]
    part: str  # of a step: what answering takes

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        self.client.send(drafter_id, messages)

    def poll(self) -> list[DrafterEvent]:
        self.end("schedule")
        events = self.client.poll()
        self.end(self.part)
        return events


# --- opening one, and decoding with it ---


@dataclass(slots=True)
class MethodArm:
    """A loaded target and one drafter for it."""

    engine: VerifierEngine
    clock: PhaseClock
    recorder: OneAtATime
    pipe: PipeDraftClient | None  # of a drafter in a process of its own
    length: int  # of drafts, at most
    max_model_len: int
    step_times: tuple[StepTime, ...]

    def decode(self, wave: Sequence[tuple[int, ...]], num_steps: int, name: str) -> tuple[dict[Mode, Steps], Tokens]:
        """Decode the prompts together in all modes, in turn; return the steps of each, and all tokens."""
        found = {mode: Steps() for mode in Mode}
        tokens = self._begin(wave, name)
        num_counted = num_steps // NUM_BLOCKS // (1 if len(wave) < MANY else MANY_SHARE)
        for block in range(NUM_BLOCKS):  # forwards, then backwards: no mode has the longer contexts
            for mode in [*Mode][:: -1 if block % 2 else 1]:
                self._run(mode, NUM_SKIPPED, tokens)
                found[mode] = found[mode].plus(self._run(mode, num_counted, tokens))
        self._cancel()
        return found, tokens

    def _begin(self, wave: Sequence[tuple[int, ...]], name: str) -> Tokens:
        """Read the prompts; return the tokens that came with them."""
        tokens: Tokens = defaultdict(list)
        self._add(wave, name, Mode.OFF.plan(0))
        while not all(request.is_decoding and request.num_output_tokens for request in self.engine.requests.values()):
            self._step(tokens)
        return tokens

    def _run(self, mode: Mode, num_steps: int, tokens: Tokens) -> Steps:
        """Run so many steps in a mode, and return them."""
        found = Steps()
        self.engine.set_plans(dict.fromkeys(self.engine.requests, mode.plan(self.length)))
        for _ in range(num_steps):
            outputs = self._step(tokens)
            found.add(self.clock.steps[-1], outputs)
        return found

    def settle(self, wave: Sequence[tuple[int, ...]]) -> None:
        """Let the price of so many requests settle, on the first tokens of the prompts' answers, each time as new."""
        for number in range(NUM_SETTLINGS if len(wave) < MANY else 1):
            self._begin(wave, f"{len(wave)} settle {number}")
            self._run(Mode.PRICED, NUM_SETTLING, defaultdict(list))
            self._cancel()

    def record(self, prompts: Sequence[tuple[int, ...]], num_tokens: int) -> tuple[list[list[tuple[int, int]]], Tokens]:
        """Return of every prompt and position what was drafted and what of it was right, and the tokens."""
        self.recorder.is_on = True
        tokens: Tokens = defaultdict(list)
        self._add(prompts, "recorded", Mode.ALWAYS.plan(self.length))
        while min(len(tokens[request_id]) for request_id in self.engine.requests) < num_tokens:
            self._step(tokens)
        self._cancel()
        self.recorder.is_on = False
        seen = [self.recorder.seen[f"recorded-{index}"] for index in range(len(prompts))]
        # the first token comes with the prompt: nothing is drafted for it
        places = [range(len(prompt) + 1, len(prompt) + num_tokens) for prompt in prompts]
        return [[own.get(at, (0, 0)) for at in range_] for own, range_ in zip(seen, places, strict=True)], tokens

    def _add(self, prompts: Sequence[tuple[int, ...]], name: str, plan: SpeculationPlan) -> None:
        room = self.max_model_len - max(map(len, prompts))
        copies: Counter[tuple[int, ...]] = Counter()
        for index, prompt in enumerate(prompts):
            copies[prompt] += 1
            request = GenerationRequest(
                request_id=f"{name}-{index}",
                prompt_token_ids=prompt,
                sampling=SamplingParams(temperature=0.0, max_tokens=room, ignore_eos=True),
                plan=plan,
                cache_salt=f"{name}-{copies[prompt]}",  # no request finds its own answer
            )
            if (refusal := self.engine.add(request)) is not None:
                raise BenchError(refusal.error or "refused")

    def _step(self, tokens: Tokens) -> list[RequestOutput]:
        """Run one step to its end, its waits included."""
        self.clock.steps.clear()
        self.clock.begin()
        while (outputs := self.engine.step()) is None:
            self.clock.end("schedule")
            if self.pipe is not None:
                self.pipe.wait(self.engine.idle_s() or 0.0)
            self.clock.end(WAITING)
        for output in outputs:
            if output.finish_reason is not None:
                raise BenchError(f"{output.request_id}: {output.error or 'the context of the model is too short'}")
            tokens[output.request_id] += output.token_ids
        return outputs

    def _cancel(self) -> None:
        for request_id in list(self.engine.requests):
            self.engine.cancel(request_id)


Tokens = defaultdict[str, list[int]]  # by request


@contextlib.contextmanager
def opened(config: ServiceConfig, clock: Clock, *, is_far: bool = False) -> Iterator[MethodArm]:
    """Load a method's target and drafter, and give this process the target's threads, until the end.

    By `clock` parts of steps are measured, and near ones priced.
    """
    gc.collect()  # the last one's models are in cycles
    cores = sorted(os.sched_getaffinity(0))
    target_cores = frozenset(cores[:-1] or cores)
    drafter_cores = frozenset(cores[-1:]) if is_far else target_cores
    config = config.with_options(kv_cache_memory_bytes=config.model.kv_cache_memory_bytes or CACHE_BYTES)
    verifier = config.with_options(threads_per_rank=len(target_cores)).verifier_spec
    drafter = config.with_options(threads_per_rank=len(drafter_cores)).drafter_spec
    assert drafter is not None
    phases, recorder = PhaseClock(clock), OneAtATime()
    phases.begin()
    timed = partial(TimedClient, end=phases.end)
    with contextlib.ExitStack() as opening:
        pipe = None
        if is_far:
            with placed(drafter_cores, len(drafter_cores)):  # a child inherits the cores
                pipe = _start_drafter(opening, drafter)
        # near, one thread may run on any core: pinned to one it would wait there for whatever else the machine does
        opening.enter_context(placed(target_cores if is_far else frozenset(cores), len(target_cores)))
        runner = _load(verifier.model)
        if pipe is not None:
            engine = build_engine(runner, verifier, timed(pipe, part=MESSAGES), verify=recorder)
        else:
            draft_model = _load(drafter.model) if drafter.loads_model and drafter.model is not None else None
            local, attach = open_local_drafter(drafter, runner, draft_model)
            engine = build_engine(runner, verifier, timed(local, part=DRAFTING), verify=recorder, clock=clock)
            attach(engine)
            if isinstance(engine, PipelinedEngine):
                engine.drafts_here = None  # `recorder` reads drafts at once
        step_times = profile_engine(engine, runner, verifier)
        engine.on_phase = phases.end
        yield MethodArm(engine, phases, recorder, pipe, config.max_draft_length, runner.max_model_len, step_times)


def _load(model: ModelConfig) -> ParallelRunner:
    return ParallelRunner(*load_rank(model, RankSpec(rank=0, size=1, folder=Path())))


def _start_drafter(opening: contextlib.ExitStack, spec: DrafterSpec) -> PipeDraftClient:
    """Start the drafter's process and wait until it is loaded."""
    pipe, ready = start_drafter(opening, RankProcesses(run_drafter_rank, spec, size=1, first_rank=0))
    client = PipeDraftClient(pipe, "far", ready)
    opening.callback(client.close)
    return client
