"""An engine that prices its drafts, in virtual time: steps take what a profile says, drafters what the test says."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

import torch

from fakes.engine_bench import MemoryDrafts, greedy_tokens, make_request, make_runner, tokens_of
from outrider.verifier_service.drafting.asking import CoordinatorConfig
from outrider.verifier_service.drafting.coordinator import DraftCoordinator
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.messages.draft import Commit, Draft, DrafterEvent
from outrider.verifier_service.messages.engine import StepTime
from outrider.verifier_service.messages.request import RequestOutput
from outrider.verifier_service.pricing.cost_model import StepTimeModel
from outrider.verifier_service.pricing.draft_pricing import DraftPricing
from outrider.verifier_service.scheduling.kv_cache import BlockPool
from outrider.verifier_service.scheduling.scheduler import Scheduler, SchedulerConfig
from support import parts

FREE = (StepTime(num_tokens=1, seconds=0.020), StepTime(num_tokens=64, seconds=0.020))
DEAR = (StepTime(num_tokens=1, seconds=0.010), StepTime(num_tokens=64, seconds=0.640))
KNEED = tuple(StepTime(num_tokens=n, seconds=0.02 * max(1, n // 16)) for n in (1, 16, 32, 64, 128))
# as a model of 100 M parameters takes on one core
ONE_CORE = tuple(
    StepTime(num_tokens=n, seconds=seconds)
    for n, seconds in ((1, 0.017), (2, 0.018), (4, 0.020), (8, 0.028), (16, 0.038), (32, 0.072), (64, 0.130))
)
VOCAB_SIZE = 97
SURE = (0.15, 0.95)  # what a drafter says of tokens that seem wrong, and right


class GuessingDrafts(MemoryDrafts):
    """A drafter that knows the target's tokens, and gets some of them wrong, here and there."""

    def __init__(
        self,
        *,
        share_wrong: float = 0.0,
        share_told: float | None = None,
        share_empty: float = 0.0,
        confidences: Sequence[float] = (),
        draft_s: float = 0.0,
        empty_s: float = 0.0,
    ) -> None:
        """A draft takes `draft_s` per token, and `empty_s` if it has none, as the share `share_empty` of them.

        Of so many tokens as `share_told` its confidences tell whether they are right, of the others they say as often
        that they are; None: they are those given, if any.
        """
        super().__init__()
        self.events = [DrafterEvent(drafter_id="d", vocab_size=VOCAB_SIZE)]
        self.share_wrong, self._share_told, self._share_empty = share_wrong, share_told, share_empty
        self._confidences = confidences
        self._prefixes: dict[str, list[int]] = {}
        self.draft_s, self.empty_s, self.num_drafts = draft_s, empty_s, 0
        self.asked: list[int] = []

    def seconds(self, num_tokens: int) -> float:
        """Return how long a draft of so many tokens is waited for."""
        return self.draft_s * num_tokens if num_tokens else self.empty_s

    def wait_s(self, draft: Draft) -> float:
        """Return how long a draft that came was waited for."""
        return self.seconds(len(draft.token_ids))

    def send(self, drafter_id, messages) -> None:
        super().send(drafter_id, messages)
        for message in parts.singly(messages):
            if isinstance(message, Commit):
                self.asked.append(message.max_length)
                self.events.append(DrafterEvent(drafter_id="d", message=self._draft(message)))
            elif hasattr(message, "token_ids"):
                self._prefixes[message.request_id] = list(message.token_ids)

    def _draft(self, ask: Commit) -> Draft:
        prefix = self._prefixes[ask.request_id]
        prefix += ask.token_ids
        is_empty = random.Random(f"{ask.request_id} {len(prefix)} empty").random() < self._share_empty
        token_ids = [] if is_empty else list(greedy_tokens(ask.max_length, prefix))
        confidences = list(self._confidences[: len(token_ids)])
        for place in range(len(token_ids)):
            chance = random.Random(f"{ask.request_id} {len(prefix) + place}")
            if is_wrong := chance.random() < self.share_wrong:
                token_ids[place] = (token_ids[place] + 1) % VOCAB_SIZE
            if self._share_told is not None:
                seems_wrong = is_wrong if chance.random() < self._share_told else chance.random() < self.share_wrong
                confidences.append(SURE[not seems_wrong])
        return Draft(
            request_id=ask.request_id,
            round_id=ask.round_id,
            position=len(prefix),
            token_ids=tuple(token_ids),
            confidences=tuple(confidences) or None,
        )


class Bench:
    """An engine that prices by `profile`; its steps take what that says, and a poll takes the drafter's time."""

    def __init__(
        self,
        drafts: GuessingDrafts,
        profile: Sequence[StepTime],
        *,
        slowdown: float = 0.0,
        true: Sequence[StepTime] = (),
        max_tree_nodes: int = 0,
        num_blocks: int = 1024,
    ) -> None:
        """Steps that verify drafts take longer by the share `slowdown`: drafting left the caches to somebody else.

        Where `true` is given, steps take what it says and not what the profile does.
        """
        self.now_s, self.drafts, self._slowdown = 0.0, drafts, slowdown
        self.runner = make_runner(num_blocks=num_blocks, max_model_len=512)
        self.pricing = DraftPricing()
        self.pricing.use_profile(profile)
        self._true = StepTimeModel.from_points(true or profile or FREE)
        limits = {"max_model_len": 512, "vocab_size": VOCAB_SIZE}
        self.engine = VerifierEngine(
            self.runner,
            Scheduler(SchedulerConfig(**limits), BlockPool(num_blocks, 4), self.pricing),
            DraftCoordinator(drafts, CoordinatorConfig(max_tree_nodes=max_tree_nodes, **limits), pricing=self.pricing),
            clock=lambda: self.now_s,
            generator=torch.Generator().manual_seed(0),
            pricing=self.pricing,
        )
        self._execute, self._poll = self.runner.execute, drafts.poll
        self.runner.execute = self._timed_execute
        drafts.poll = self._timed_poll

    def _timed_execute(self, batch, chosen=None) -> torch.Tensor:
        is_drafted = any(request.draft is not None for request in self.engine.requests.values())
        self.now_s += self._true.t(batch.num_tokens) * (1.0 + self._slowdown * is_drafted)
        return self._execute(batch, chosen)

    def _timed_poll(self) -> list[DrafterEvent]:
        events = self._poll()
        drafted = [event.message for event in events if isinstance(event.message, Draft)]
        self.now_s += max(map(self.drafts.wait_s, drafted), default=0.0)
        return events

    def run(self, *, num_requests: int = 1, max_tokens: int = 100, **options) -> dict[str, list[RequestOutput]]:
        for index in range(num_requests):
            request = make_request(str(index), draft_length=4, max_tokens=max_tokens, drafter_id="d")
            if options:
                request = dataclasses.replace(request, plan=dataclasses.replace(request.plan, **options))
            assert self.engine.add(request) is None
        outputs: dict[str, list[RequestOutput]] = {}
        while self.engine.has_work():
            for output in self.engine.step() or []:
                outputs.setdefault(output.request_id, []).append(output)
            self.engine.check_integrity()
        for found in outputs.values():
            assert tokens_of(found) == greedy_tokens(max_tokens), "whatever is drafted"
        return outputs


class FarDrafts(GuessingDrafts):
    """A drafter with a clock of its own: what was sent together is one batch, and batches wait for each other."""

    def __init__(
        self,
        *,
        level_s: float,
        fixed_s: float = 0.0,
        opening_s: float = 0.0,
        cold_s: Sequence[float] = (),
        share_wrong: float = 0.0,
        share_told: float | None = None,
    ) -> None:
        """A batch takes `fixed_s`, `level_s` per position of its longest draft and `opening_s` per new request.

        The first batches take `cold_s` each besides.
        """
        super().__init__(share_wrong=share_wrong, share_told=share_told)
        self.level_s, self.fixed_s, self._opening_s = level_s, fixed_s, opening_s
        self._cold_s = list(cold_s)
        self._opened: set[str] = set()
        self.clock: Callable[[], float] = lambda: 0.0
        self._free_s = 0.0
        self._coming: list[tuple[float, list[DrafterEvent]]] = []

    def send(self, drafter_id, messages) -> None:
        num_before = len(self.events)
        super().send(drafter_id, messages)
        batch, self.events = self.events[num_before:], self.events[:num_before]
        if batch:
            drafts = [event.message for event in batch]
            longest = max(len(draft.token_ids) for draft in drafts)
            opened = {draft.request_id for draft in drafts} - self._opened
            self._opened |= opened
            self._free_s = max(self._free_s, self.clock()) + self.fixed_s + self.level_s * longest
            self._free_s += self._opening_s * len(opened) + (self._cold_s.pop(0) if self._cold_s else 0.0)
            self._coming.append((self._free_s, batch))

    def poll(self) -> list[DrafterEvent]:
        events = super().poll()
        while self._coming and self._coming[0][0] <= self.clock():
            events += self._coming.pop(0)[1]
        return events

    @property
    def is_busy(self) -> bool:
        return self._free_s > self.clock()

    @property
    def next_s(self) -> float:
        """When the next batch is there."""
        return self._coming[0][0]


class FarBench(Bench):
    """The same with a drafter elsewhere: verifier and drafter work at the same time."""

    def __init__(
        self,
        drafts: FarDrafts,
        profile: Sequence[StepTime],
        *,
        contention: float = 0.0,
        true: Sequence[StepTime] = (),
        first_run: int = 0,
    ) -> None:
        """Steps take longer by the share `contention` while the drafter works: they share a machine's memory.

        `first_run` names the requests, which says where drafts are wrong.
        """
        super().__init__(drafts, profile, true=true)
        self._contention = contention
        drafts.clock = lambda: self.now_s
        self.drafts: FarDrafts = drafts
        self._num_runs = first_run

    def _timed_poll(self) -> list[DrafterEvent]:
        return self._poll()

    def _timed_execute(self, batch, chosen=None) -> torch.Tensor:
        if self.drafts.is_busy:
            self.now_s += self._contention * self._true.t(batch.num_tokens)
        return super()._timed_execute(batch, chosen)

    def speed(self, concurrency: int, *, num_requests: int, max_tokens: int = 48, **plan: object) -> float:
        """Return the tokens per second of so many requests, `concurrency` at a time."""
        begin_s, num_added, num_finished = self.now_s, 0, 0
        self._num_runs += 1
        while num_finished < num_requests:
            while num_added < num_requests and len(self.engine.requests) < concurrency:
                name = f"{self._num_runs}-{num_added}"
                request = make_request(name, draft_length=8, max_tokens=max_tokens, drafter_id="d")
                request = dataclasses.replace(request, plan=dataclasses.replace(request.plan, **plan))
                assert self.engine.add(request) is None
                num_added += 1
            outputs = self.engine.step()
            if outputs is None:
                idle_s = self.engine.idle_s()
                assert idle_s is not None
                self.now_s = min(self.now_s + idle_s, self.drafts.next_s) + 1e-6
            for output in outputs or []:
                num_finished += output.finish_reason is not None
        return num_requests * max_tokens / (self.now_s - begin_s)
