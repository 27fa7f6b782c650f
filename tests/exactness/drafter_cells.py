"""The matrix of drafters: every method, as chain and tree, in the verifier's process and out of it.

A cell is served or refused, and `REFUSALS` names every refusal with its reason: nothing is left out in silence. All
three modes of verification (greedy, rejection, coupled) of a served cell run together in one engine's batches.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from exactness.drafter_checkpoints import head_folder, masked_draft_model
from exactness.small_engines import Generated
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.offline.engine import NoDrafters, PipeDraftClient, RankProcesses, start_drafter
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.engine.messages import DrafterReady
from outrider.drafter_service.engine.payloads import handle_payload
from outrider.drafter_service.service.colocated import open_local_drafter
from outrider.drafter_service.service.drafter_spec import DrafterSpec
from outrider.drafter_service.service.rank_main import build_draft_engine, run_drafter_rank
from outrider.drafter_service.service.speculative_config import Method
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.engine.factory import build_engine
from outrider.verifier_service.engine.verifier_spec import VerifierSpec
from outrider.verifier_service.messages.draft import DraftClient, DrafterEvent, VerifierMessage
from outrider.verifier_service.messages.link import DRAFTER_MESSAGES
from outrider.verifier_service.messages.request import (
    GenerationRequest,
    SamplingParams,
    SpeculationPlan,
    VerificationMode,
)
from outrider.verifier_service.messages.wire import decode, encode
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.runner import ModelRunner, ParallelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from tiny.forking import FORKING

DRAFT_LENGTH = 3
NUM_TREE_NODES = 7
PATIENCE_S = 600.0  # for a draft: a busy machine must not turn drafts into empty ones
MODES = tuple(VerificationMode)


class Shape(enum.StrEnum):
    CHAIN = "chain"
    TREE = "tree"


class Place(enum.StrEnum):
    """Where a drafter runs, by the configuration's word for it."""

    IN_PROCESS = "verifier"
    REMOTE = "pool"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A method, or one of several ways to use it."""

    method: Method
    name: str
    model: str | None = None  # which checkpoint: draft | masked | renumbered | head; None: it has none
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    num_sets: int = 1  # parameter sets by draft position


def _variant(method: Method, model: str | None = None, name: str = "", **options: Any) -> Variant:
    return Variant(method=method, name=f"{method} {name}".strip(), model=model, options=options)


_HEADS = (Method.MEDUSA, Method.MLP_SPECULATOR, Method.EAGLE, Method.EAGLE3, Method.MTP, Method.DFLASH)
VARIANTS: tuple[Variant, ...] = (
    _variant(Method.DRAFT_MODEL, "draft"),
    _variant(Method.DRAFT_MODEL, "draft", "top-k trees", tree_method="top_k"),
    _variant(Method.DRAFT_MODEL, "draft", "greedy drafts", draft_sample_method="greedy"),
    _variant(Method.DRAFT_MODEL, "renumbered", "by text", vocabulary="text"),
    _variant(Method.DRAFT_MODEL, "renumbered", "in shared tokens", vocabulary="intersect"),
    _variant(Method.NGRAM),
    _variant(Method.SUFFIX),
    _variant(Method.LOOKAHEAD),
    _variant(Method.EARLY_EXIT),
    _variant(Method.SPARSE, sparse_num_blocks=2),
    _variant(Method.TIDAR, mask_token_id=0),  # a target that was not taught, so seldom right
    *(_variant(method, "head") for method in _HEADS),
    replace(_variant(Method.EAGLE3, "head", "switched by position"), num_sets=2),
    _variant(Method.PARALLEL_DRAFT, "masked"),
    _variant(Method.HYBRID, "draft", "of suffix and draft model", methods=["suffix", "draft_model"]),
)


@dataclass(frozen=True, slots=True)
class Cell:
    variant: Variant
    shape: Shape
    place: Place

    def __str__(self) -> str:
        return f"{self.variant.name}, {self.shape}, {self.place.name.lower().replace('_', ' ')}"


CELLS = tuple(Cell(*parts) for parts in itertools.product(VARIANTS, Shape, Place))


def refusal(cell: Cell) -> str | None:
    """Return the words with which a cell must be refused; None: it must be served."""
    method = cell.variant.method
    if method in (Method.EARLY_EXIT, Method.SPARSE, Method.TIDAR) and cell.place is Place.REMOTE:
        return f"speculative_config: location: {method} reads the target's own KV, so it runs in the verifier alone"
    if method is Method.TIDAR and cell.shape is Shape.TREE:
        return "speculative_config: num_tree_nodes: tidar has masks for every outcome of a chain, not of a tree"
    if cell.variant.options.get("vocabulary") == "text" and cell.shape is Shape.TREE:
        return "speculative_config: num_tree_nodes: a draft that goes by way of text is a chain"
    if cell.variant.num_sets > 1 and cell.shape is Shape.TREE:
        return "speculative_config: num_tree_nodes: parameter sets by position draft a chain"
    return None


SERVED = tuple(cell for cell in CELLS if refusal(cell) is None)
REFUSED = tuple(cell for cell in CELLS if refusal(cell) is not None)

# What `make test` runs; `make soak` runs all, as whoever changes a drafter or a message should.
CROSSING = {  # one remote cell for each thing that crosses the link
    "ids": "draft_model greedy drafts, chain, remote",
    "rows": "draft_model, chain, remote",
    "parents of a tree": "draft_model, tree, remote",
    "all states": "eagle3, chain, remote",
    "the last state": "medusa, tree, remote",
    "predictions": "lookahead, chain, remote",
}
GROWING = {  # one cell for each way to grow a draft in each family of drafters
    "model, chain": "draft_model, chain, remote",
    "model, drawn tree": "draft_model, tree, remote",
    "model, likeliest children": "draft_model top-k trees, tree, remote",
    "model, point masses": "draft_model greedy drafts, tree, remote",
    "model, another tokenizer's text": "draft_model by text, chain, remote",
    "model, another tokenizer's ids": "draft_model in shared tokens, tree, remote",
    "look-up, chain": "ngram, chain, remote",
    "look-up, tree": "suffix, tree, remote",
    "recurrent head": "eagle3, tree, remote",
    "independent heads": "medusa, chain, remote",
    "block of positions, head": "dflash, tree, remote",
    "block of positions, model": "parallel_draft, chain, remote",
    "target's own layers": "early_exit, tree, in process",
    "one after another": "hybrid of suffix and draft model, tree, remote",
}


def soak_but(is_tested: Callable[[Cell], bool]) -> list[Any]:
    """Return the served cells as parameters of a test; those that `make test` leaves out are marked as soaks."""
    return [pytest.param(cell, marks=() if is_tested(cell) else pytest.mark.soak) for cell in SERVED]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """A target and what drafts for it."""

    root: Path  # where heads are written
    target: Path
    draft: Path
    renumbered: Path  # a draft model with another tokenizer
    options: Mapping[str, Any]  # of the service
    trained: Mapping[Method, Path] = field(default_factory=dict)

    def paths_of(self, variant: Variant) -> list[str]:
        match variant.model:
            case None:
                return []
            case "draft":
                return [str(self.draft)]
            case "masked":
                return [str(masked_draft_model(self.root, self.draft))]
            case "renumbered":
                return [str(self.renumbered)]
        if (trained := self.trained.get(variant.method)) is not None and variant.num_sets == 1:
            return [str(trained)]
        return [str(head_folder(self.root, self.target, variant.method, seed)) for seed in range(variant.num_sets)]

    def config_of(self, cell: Cell) -> ServiceConfig:
        """Configure a cell as an operator would; raises `ValueError` where it is refused."""
        paths = self.paths_of(cell.variant)
        speculative: dict[str, Any] = {
            "method": cell.variant.method.value,
            "location": cell.place.value,
            "num_speculative_tokens": DRAFT_LENGTH,
            "num_tree_nodes": NUM_TREE_NODES if cell.shape is Shape.TREE else 0,
            **cell.variant.options,
        }
        if paths:
            speculative["model"] = paths[0]
        if len(paths) > 1:
            speculative["models"] = paths
        return self._config(speculative_config=speculative)

    def plain_config(self) -> ServiceConfig:
        return self._config(num_drafters=0)

    def _config(self, **options: Any) -> ServiceConfig:
        return ServiceConfig(**{"model": str(self.target), "seed": 0, **self.options, **options})


class FramedDraftClient:
    """A `DraftClient` whose drafter is in this process, at the far end of the link's frames."""

    _PEER = "framed"

    def __init__(self, engine: DraftEngine) -> None:
        self._engine = engine
        self._frames: list[bytes] = []
        self._events = [DrafterEvent(drafter_id=self._PEER, vocab_size=engine.vocab_size, needs=engine.needs)]

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        self._frames.extend(encode(message) for message in messages)

    def poll(self) -> list[DrafterEvent]:
        frames, self._frames = self._frames, []
        answers = [answer for frame in frames for answer in handle_payload(self._engine, self._PEER, frame)]
        while self._engine.has_work():
            answers += [encode(message) for _, message in self._engine.step()]
        events = [DrafterEvent(drafter_id=self._PEER, message=decode(answer, DRAFTER_MESSAGES)) for answer in answers]
        events, self._events = [*self._events, *events], []
        return events


Link = Callable[[DrafterSpec], DraftClient]  # reaches a drafter outside of the verifier's process


class Bench:
    """Run cells one after another; what is slow to load is loaded once."""

    def __init__(self) -> None:
        self._exit = ExitStack()  # of the drafter's process
        self._runners: dict[ModelConfig, ParallelRunner] = {}
        self._process: tuple[DrafterSpec, Connection, DrafterReady] | None = None  # the last one that was started

    def close(self) -> None:
        self._exit.close()

    def run(self, config: ServiceConfig, requests: Iterable[GenerationRequest], link: Link | None = None) -> Generated:
        """Run requests together; a drafter in a pool is reached through `link`."""
        spec = replace(config.verifier_spec, min_draft_deadline_s=PATIENCE_S, max_draft_deadline_s=PATIENCE_S)
        runner, drafter = self._runner(spec.model), config.drafter_spec
        if drafter is None:
            return drive(build_engine(runner, spec, NoDrafters()), requests)
        if config.pools:
            assert link is not None
            client = link(drafter)
            return drive(build_engine(runner, spec, client), requests, client)
        local, show = open_local_drafter(drafter, runner, self.draft_model(drafter))
        engine = build_engine(runner, spec, local)
        show(engine)
        return drive(engine, requests)

    def require_same_tokens(
        self, options: Mapping[str, Any], speculative: Mapping[str, Any], prompts: Sequence[Sequence[int]]
    ) -> None:
        """Run prompts greedily, without drafts and with those of a drafter in the verifier."""
        requests = [
            GenerationRequest(
                request_id=str(index),
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
                plan=SpeculationPlan(draft_length=speculative["num_speculative_tokens"]),
            )
            for index, prompt in enumerate(prompts)
        ]
        plain = self.run(ServiceConfig(**options, num_drafters=0), requests)
        here = {**speculative, "location": "verifier"}
        drafted = self.run(ServiceConfig(**options, speculative_config=here), requests)
        assert drafted.token_ids == plain.token_ids
        assert drafted.num_draft_tokens > 0

    def verifier(self, spec: VerifierSpec, client: DraftClient) -> VerifierEngine:
        return build_engine(self._runner(spec.model), spec, client)

    def framed(self, spec: DrafterSpec) -> DraftClient:
        """Reach a drafter of this process through encoded frames: deterministic, and quick to start."""
        return FramedDraftClient(build_draft_engine(spec, runner=self.draft_model(spec)))

    def process(self, spec: DrafterSpec) -> DraftClient:
        """Reach a drafter in a process of its own, which chains and trees of one variant share."""
        drafts_chains = spec.speculative.vocabulary == "text" or bool(spec.speculative.models)
        num_nodes = 0 if drafts_chains else NUM_TREE_NODES
        shared = replace(spec, speculative=replace(spec.speculative, num_tree_nodes=num_nodes))
        if self._process is None or self._process[0] != shared:
            self._process = (shared, *self._start(shared))
        _, pipe, ready = self._process
        return PipeDraftClient(pipe, "process", ready)

    def _start(self, spec: DrafterSpec) -> tuple[Connection, DrafterReady]:
        self._exit.close()  # the process before it: they are large
        ranks = RankProcesses(run_drafter_rank, spec, 1, first_rank=0, context=FORKING)
        pipe, ready = start_drafter(self._exit, ranks)
        self._exit.callback(pipe.close)
        return pipe, ready

    def draft_model(self, spec: DrafterSpec) -> ParallelRunner | None:
        return self._runner(spec.model) if spec.loads_model and spec.model is not None else None

    def _runner(self, model: ModelConfig) -> ParallelRunner:
        model = replace(model, check_logits=False)
        if model not in self._runners:
            self._runners[model] = ParallelRunner(ModelRunner(model, TensorParallelGroup.single()))
        return self._runners[model]


def drive(
    engine: VerifierEngine, requests: Iterable[GenerationRequest], client: DraftClient | None = None
) -> Generated:
    """Generate all requests in one engine; wait with it where the drafter is a process."""
    generated = Generated()
    for request in requests:
        assert engine.add(request) is None
    while engine.has_work():
        outputs = engine.step()
        if outputs is None and isinstance(client, PipeDraftClient):
            client.wait(engine.idle_s() or 0.0)
        for output in outputs or []:
            generated.add(output)
    engine.check_integrity()
    return generated
