"""Engines over tiny random models, stepped by hand, with every part's integrity checked after every step."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from outrider.drafter_service.engine.drafter import DraftEngineConfig
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.service.local_client import LocalDraftClient
from outrider.verifier_service.drafting.asking import CoordinatorConfig
from outrider.verifier_service.drafting.coordinator import DraftCoordinator
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.engine.runners import Runner
from outrider.verifier_service.engine.unread import UnreadDrafts
from outrider.verifier_service.messages.draft import ROOT, Commit, Draft, DrafterEvent, Open, VerifierMessage
from outrider.verifier_service.messages.request import FinishReason, GenerationRequest, RequestOutput
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.runner import ModelRunner
from outrider.verifier_service.model.step_graphs import GraphBackend
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from outrider.verifier_service.scheduling.kv_cache import BlockPool
from outrider.verifier_service.scheduling.scheduler import Scheduler, SchedulerConfig
from support import parts
from tiny.drafters import model_drafter
from tiny.models import VOCAB_SIZE, make_model

BLOCK_SIZE = 4
NUM_BLOCKS = 128
MAX_STEPS = 2000
TIED_EMBEDDING_SCALE = 0.1


@dataclass(frozen=True, slots=True)
class Models:
    """A lively model, its engine's runner, and a draft model that is nearly as good."""

    model: PreTrainedModel
    target: ModelRunner
    draft: ModelRunner


def lively_models(model_type: str, folder: Path) -> Iterator[Models]:
    """Yield them, on one thread of torch's meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = make_lively_model(model_type)
    draft = perturbed_copy(model_type, 0.05)
    yield Models(model=model, target=load(model, folder / "target"), draft=load(draft, folder / "draft"))
    torch.set_num_threads(threads)


def load(model: PreTrainedModel, folder: Path, backend: GraphBackend | None = None) -> ModelRunner:
    """Serve a model by way of a checkpoint in `folder`; `backend` captures its steps."""
    model.save_pretrained(folder)
    config = ModelConfig(
        path=str(folder), num_kv_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, device="cpu", check_logits=False
    )
    return ModelRunner(config, TensorParallelGroup.single(), backend)


def make_lively_model(model_type: str) -> PreTrainedModel:
    """Make a random model that does not repeat its last token, as a large tied embedding would have it do."""
    model = make_model(model_type)
    if model.config.tie_word_embeddings:
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(TIED_EMBEDDING_SCALE)
    return model


def perturbed_copy(model_type: str, noise: float) -> PreTrainedModel:
    """Return the lively model, every weight off by about `noise` of its matrix's own spread."""
    model = make_lively_model(model_type)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * parameter.std() * noise
    return model


# --- drafters ---


class NoDrafts:
    """A `DraftClient` without a drafter."""

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        raise AssertionError("there is no drafter to send anything to")

    def poll(self) -> list[DrafterEvent]:
        return []

    def check_integrity(self) -> None:
        """Nothing is held."""


class RandomDrafts:
    """A drafter that guesses at random, as point masses; now and then it has nothing, or knows no session."""

    def __init__(self, vocab_size: int, *, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)
        self._num_tokens: dict[str, int] = {}
        self._events = [DrafterEvent(drafter_id="random", vocab_size=vocab_size)]

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        for message in parts.singly(messages):
            match message:
                case Open(request_id=request_id, token_ids=token_ids):
                    self._num_tokens[request_id] = len(token_ids)
                case Commit() as commit:
                    self._events.append(DrafterEvent(drafter_id="random", message=self._draft(commit)))

    def _draft(self, commit: Commit) -> Draft:
        assert commit.position == self._num_tokens[commit.request_id], "commits are not contiguous"
        self._num_tokens[commit.request_id] += len(commit.token_ids)
        length = self._rng.choice((0, 1, commit.max_length, commit.max_length))
        return Draft(
            request_id=commit.request_id,
            round_id=commit.round_id,
            position=commit.position + len(commit.token_ids),
            token_ids=tuple(self._rng.randrange(self._vocab_size) for _ in range(length)),
        )

    def poll(self) -> list[DrafterEvent]:
        events, self._events = self._events, []
        return events

    def check_integrity(self) -> None:
        """Nothing but counters is held."""


class ModelDrafts:
    """A draft model in this process, lost for good after `num_polls_alive` polls where that is given."""

    def __init__(self, runner: Runner, *, num_polls_alive: int | None = None) -> None:
        drafter = model_drafter(runner, torch.Generator().manual_seed(3))
        self.engine = DraftEngine(drafter, clock=lambda: 0.0, config=DraftEngineConfig(max_draft_length=8))
        self._client = LocalDraftClient(self.engine)
        self._num_polls_left = num_polls_alive

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        assert self._num_polls_left is None or self._num_polls_left > 0, "asked a drafter that is down"
        self._client.send(drafter_id, messages)

    def poll(self) -> list[DrafterEvent]:
        if self._num_polls_left is None:
            return self._client.poll()
        self._num_polls_left -= 1
        if self._num_polls_left > 0:
            return self._client.poll()
        return [DrafterEvent(drafter_id="local", is_up=False)] if self._num_polls_left == 0 else []

    def unread(self) -> UnreadDrafts | None:
        return self._client.unread()

    def check_integrity(self) -> None:
        self.engine.check_integrity()


class ShownDrafts(RandomDrafts):
    """A drafter that is shown the outputs beforehand, and knows how far each request is."""

    def __init__(self, vocab_size: int, expected: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        super().__init__(vocab_size)
        self._expected = expected  # by the prompt
        self._tokens: dict[str, tuple[int, ...]] = {}

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        for message in messages:
            if isinstance(message, Open):
                self._tokens[message.request_id] = message.token_ids
        super().send(drafter_id, messages)

    def _follow(self, commit: Commit) -> tuple[int, ...]:
        """Add a commit's tokens to its request's, and return those."""
        tokens = self._tokens[commit.request_id] = self._tokens[commit.request_id] + commit.token_ids
        return tokens

    def _prompt_of(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        return next(prompt for prompt in self._expected if tokens[: len(prompt)] == prompt)


class Hints(ShownDrafts):
    """It is often right; trees where it is asked for them."""

    def __init__(self, expected: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        super().__init__(VOCAB_SIZE + 40, expected)
        self.num_trees = 0

    def _draft(self, commit: Commit) -> Draft:
        plain = super()._draft(commit)
        rest = self._rest(self._follow(commit))
        assert list(commit.forced_ids) == rest[: len(commit.forced_ids)], "forced, and yet something else"
        if commit.max_nodes == 0:
            hinted = (
                right if self._rng.random() < 0.7 else wrong
                for right, wrong in zip(rest, plain.token_ids, strict=False)
            )
            return replace(plain, token_ids=tuple(hinted))
        return self._tree(plain, rest, commit)

    def _rest(self, tokens: tuple[int, ...]) -> Sequence[int]:
        """Return what comes after prompt and output."""
        prompt = self._prompt_of(tokens)
        return self._expected[prompt][len(tokens) - len(prompt) :]

    def _tree(self, plain: Draft, rest: Sequence[int], commit: Commit) -> Draft:
        """Grow a random tree around the right path, as far as there is one."""
        token_ids, parents, depths, right = [], [], [], ROOT
        for node in range(commit.max_nodes):
            depth = 0 if right == ROOT else depths[right] + 1
            if depth < min(commit.max_length, len(rest)) and self._rng.random() < 0.4:
                parent, token_id, depth = right, rest[depth], depth
                right = node
            else:
                parent = self._rng.randrange(ROOT, node)
                depth = 0 if parent == ROOT else depths[parent] + 1
                token_id = self._rng.randrange(self._vocab_size)
            if depth >= commit.max_length or (parent, token_id) in zip(parents, token_ids, strict=True):
                break
            token_ids.append(token_id)
            parents.append(parent)
            depths.append(depth)
        self.num_trees += bool(token_ids)
        return replace(plain, token_ids=tuple(token_ids), parents=tuple(parents))


Drafts = NoDrafts | RandomDrafts | ModelDrafts


# --- the engine ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 8
    num_blocks: int = NUM_BLOCKS


def make_engine(
    runner: Runner, drafts: Drafts, limits: Limits, *, kind: type[VerifierEngine] = VerifierEngine, **options: Any
) -> VerifierEngine:
    """Put an engine with these options around a runner, which may be shared with engines that have finished."""
    assert limits.num_blocks <= runner.num_blocks
    model = {"max_model_len": runner.max_model_len, "vocab_size": runner.vocab_size}
    config = SchedulerConfig(
        max_num_batched_tokens=limits.max_num_batched_tokens, max_num_seqs=limits.max_num_seqs, **model
    )
    return kind(
        runner,
        Scheduler(config, BlockPool(limits.num_blocks, runner.block_size)),
        DraftCoordinator(drafts, CoordinatorConfig(**model)),
        clock=lambda: 0.0,
        generator=torch.Generator().manual_seed(0),
        **options,
    )


@dataclass(slots=True)
class Generated:
    """What a run gave: tokens by request, and what happened on the way."""

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    outputs: dict[str, list[RequestOutput]] = field(default_factory=dict)
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_cached_tokens: int = 0
    num_preempted_waits: int = 0  # steps that preempted requests spent waiting, summed

    def add(self, output: RequestOutput) -> None:
        assert output.finish_reason is not FinishReason.ERROR, output.error
        self.token_ids.setdefault(output.request_id, []).extend(output.token_ids)
        self.outputs.setdefault(output.request_id, []).append(output)
        if output.finish_reason is not None:
            self.num_draft_tokens += output.speculation.num_draft_tokens
            self.num_accepted_tokens += output.speculation.num_accepted_tokens
            self.num_cached_tokens += output.num_cached_tokens


def generate(engine: VerifierEngine, drafts: Drafts, requests: Iterable[GenerationRequest]) -> Generated:
    """Run requests together to their end; raises `AssertionError` where any part contradicts itself."""
    generated = Generated()
    for request in requests:
        assert engine.add(request) is None
    for _ in range(MAX_STEPS):
        if not engine.has_work():
            break
        for output in engine.step() or []:
            generated.add(output)
        generated.num_preempted_waits += sum(r.num_preemptions > 0 for r in engine.scheduler.waiting)
        engine.scheduler.check_integrity()
        drafts.check_integrity()
    assert not engine.has_work(), "the engine does not finish"
    assert engine.scheduler.kv_usage == 0.0, "a finished request holds KV"
    return generated
