"""A verifier engine over the fake runner, with drafters in memory and a clock that the test advances."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch

from fakes.runner import FakeRunner, LateRunner, continuation
from outrider.verifier_service.drafting.asking import CoordinatorConfig
from outrider.verifier_service.drafting.coordinator import DraftCoordinator
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.engine.pipelined import PipelinedEngine
from outrider.verifier_service.messages.draft import (
    Commit,
    Draft,
    DraftClient,
    DrafterEvent,
    DraftNeeds,
    VerifierMessage,
)
from outrider.verifier_service.messages.request import GenerationRequest, RequestOutput, SamplingParams, SpeculationPlan
from outrider.verifier_service.pricing.draft_pricing import DraftPricing
from outrider.verifier_service.sampling.verification import begin
from outrider.verifier_service.scheduling.kv_cache import BlockPool
from outrider.verifier_service.scheduling.scheduler import Scheduler, SchedulerConfig
from support import parts

PROMPT = (5, 9, 2)


def greedy_tokens(length: int, prompt: Sequence[int] = PROMPT) -> tuple[int, ...]:
    """What the fake target says after `prompt`."""
    return continuation(list(prompt), length, 97)


class Pace(enum.Enum):
    """When a step's logits are there, and when the next one is launched."""

    AT_ONCE = enum.auto()
    LATE = enum.auto()  # as on an accelerator
    ASYNC = enum.auto()  # the same, and the next step is launched before one is read, where that can be


def make_runner(*, eos_token_ids: tuple[int, ...] = (), is_late: bool = False, **sizes: int) -> FakeRunner:
    runner = (LateRunner if is_late else FakeRunner)(**sizes)
    runner.eos_token_ids = eos_token_ids
    return runner


def make_request(
    request_id: str = "a",
    *,
    prompt: Sequence[int] = PROMPT,
    draft_length: int = 0,
    drafter_id: str | None = None,
    **sampling: object,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 32, **sampling}),
        plan=SpeculationPlan(drafter_id=drafter_id, draft_length=draft_length),
    )


class MemoryDrafts:
    """A `DraftClient` that records what is sent and delivers what the test queues."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, VerifierMessage]] = []
        self.events: list[DrafterEvent] = []

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        self.sent.extend((drafter_id, message) for message in parts.singly(messages))

    def poll(self) -> list[DrafterEvent]:
        events, self.events = self.events, []
        return events

    def take(self) -> list[tuple[str, VerifierMessage]]:
        """Return, and forget, what was sent."""
        sent, self.sent = self.sent, []
        return sent

    def last_ask(self) -> tuple[str, Commit]:
        return next((to, message) for to, message in reversed(self.sent) if isinstance(message, Commit))

    def answer(self, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> None:
        """Draft `token_ids` for the last ask, as a tree where they have `parents`."""
        drafter_id, ask = self.last_ask()
        draft = Draft(
            request_id=ask.request_id,
            round_id=ask.round_id,
            position=ask.position + len(ask.token_ids),
            token_ids=tuple(token_ids),
            parents=None if parents is None else tuple(parents),
        )
        self.events.append(DrafterEvent(drafter_id=drafter_id, message=draft))


class EngineBench:
    """One engine and everything around it."""

    pace = Pace.AT_ONCE

    def __init__(
        self,
        *,
        drafters: Sequence[str] = ("d",),
        needs: DraftNeeds = DraftNeeds(),
        max_num_batched_tokens: int = 256,
        max_num_seqs: int = 256,
        max_tree_nodes: int = 0,
        pricing: DraftPricing | None = None,
        drafts: DraftClient | None = None,
        rollouts: bool = False,
        **runner: object,
    ) -> None:
        """`drafts`: real drafters, in place of those in memory."""
        self.now_s = 0.0
        self.drafts = MemoryDrafts()
        self.drafts.events = [
            DrafterEvent(drafter_id=drafter_id, vocab_size=97, needs=needs) for drafter_id in drafters
        ]
        self.runner = make_runner(is_late=self.pace is not Pace.AT_ONCE, **runner)
        if needs.taps:
            self.runner.keep_states()
        limits = {"max_model_len": self.runner.max_model_len, "vocab_size": self.runner.vocab_size}
        config = SchedulerConfig(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs, **limits)
        is_apart = isinstance(self.runner, LateRunner)
        self.engine = (PipelinedEngine if is_apart else VerifierEngine)(
            self.runner,
            Scheduler(config, BlockPool(self.runner.num_blocks, self.runner.block_size)),
            DraftCoordinator(
                self.drafts if drafts is None else drafts,
                CoordinatorConfig(max_tree_nodes=max_tree_nodes, rollouts=rollouts, tells_texts=True, **limits),
                self.runner.states,
                pricing,
            ),
            clock=lambda: self.now_s,
            generator=torch.Generator().manual_seed(0),
            wall_clock=lambda: 1000.0 + self.now_s,
            pricing=pricing,
            verify=self.runner.verify if is_apart else begin,
        )
        self.engine.launches_early = self.pace is Pace.ASYNC

    def add(self, request_id: str = "a", **options: object) -> RequestOutput | None:
        return self.engine.add(make_request(request_id, **options))

    def step(self) -> list[RequestOutput] | None:
        outputs = self.engine.step(self.meanwhile)
        self.engine.scheduler.check_integrity()
        return outputs

    def meanwhile(self) -> None:
        """Do what is done while a step runs: its logits arrive at the end of it."""
        assert isinstance(self.runner, LateRunner), "nothing runs while the engine waits"
        self.runner.arrive(num_left=int(self.engine._next is not None))

    def step_one(self) -> RequestOutput:
        """Run a step that has one output."""
        (output,) = self.step()
        return output

    def finish(self, max_steps: int = 200) -> dict[str, list[RequestOutput]]:
        """Step until nothing is left, passing over what no drafter answers."""
        outputs: dict[str, list[RequestOutput]] = {}
        for _ in range(max_steps):
            if not self.engine.has_work():
                return outputs
            for output in self.step() or []:
                outputs.setdefault(output.request_id, []).append(output)
            self.now_s += self.engine.idle_s() or 0.0
        raise AssertionError("requests do not finish")


def tokens_of(outputs: Sequence[RequestOutput]) -> tuple[int, ...]:
    return tuple(token_id for output in outputs for token_id in output.token_ids)
