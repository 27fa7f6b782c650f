"""vLLM's scheduler without asynchronous steps, and the engine around it and a V2 runner, played in one virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from fakes.hosted.engine import MAX_MODEL_LEN, VOCAB_SIZE, Clock, PlayedPool
from fakes.hosted.v2_runner import BLOCK_SIZE, V2Runner
from outrider.cluster.hosted.drafting import HostedConfig, HostedDrafting
from outrider.cluster.hosted.plugin import HostStep
from outrider.cluster.hosted.vllm_scheduled import ScheduledRequests
from outrider.cluster.hosted.vllm_speculator import PoolSpeculator, attach
from outrider.cluster.hosted.vllm_states import StepStates

VERSION = "0.32.0"


@dataclass
class Sampling:
    """vLLM's `SamplingParams`, as far as it is read."""

    temperature: float = 0.0
    seed: int | None = None
    extra_args: dict[str, Any] | None = None
    max_tokens: int | None = 64
    ignore_eos: bool = True
    stop_token_ids: list[int] | None = None
    all_stop_token_ids: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Held:
    """A request of the scheduler."""

    token_ids: list[int]
    num_prompt_tokens: int
    sampling: Sampling
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    spec_token_ids: list[int] = field(default_factory=list)
    is_in_runner: bool = False

    @property
    def is_done(self) -> bool:
        num_output = len(self.token_ids) - self.num_prompt_tokens
        return num_output >= (self.sampling.max_tokens or MAX_MODEL_LEN) or len(self.token_ids) >= MAX_MODEL_LEN


class Scheduler:
    """The scheduler: everybody runs in every step, `chunk` tokens of a prompt at a time."""

    def __init__(self, num_spec_tokens: int) -> None:
        self.num_spec_tokens = num_spec_tokens
        self.chunk = MAX_MODEL_LEN
        self.requests: dict[str, Held] = {}
        self.outputs: dict[str, list[int]] = {}  # of requests that have ended
        self._finished: set[str] = set()
        self._preempted: set[str] = set()
        self._next_block = 1

    def add(self, request_id: str, prompt: Sequence[int], **sampling: Any) -> None:
        self.requests[request_id] = Held(list(prompt), len(prompt), Sampling(**sampling))

    def abort(self, request_id: str) -> None:
        del self.requests[request_id]
        self._finished.add(request_id)

    def preempt(self, request_id: str) -> None:
        held = self.requests[request_id]
        held.num_computed, held.blocks, held.spec_token_ids, held.is_in_runner = 0, [], [], False
        self._preempted.add(request_id)

    def schedule(self, only: Sequence[str] | None = None) -> Any:
        new, cached = [], SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[])
        scheduled: dict[str, int] = {}
        drafts: dict[str, list[int]] = {}
        for request_id, held in self.requests.items():
            if only is not None and request_id not in only:
                continue
            left = len(held.token_ids) - held.num_computed
            # never beyond the context, nor drafts while a prompt is read
            spec = held.spec_token_ids[: MAX_MODEL_LEN - len(held.token_ids) - 1] if left == 1 else []
            count = min(left, self.chunk) + len(spec)
            blocks = self._grow(held, held.num_computed + count)
            if held.is_in_runner:
                cached.req_ids.append(request_id)
                cached.num_computed_tokens.append(held.num_computed)
                cached.new_block_ids.append((blocks,) if blocks else None)
            else:
                new.append(
                    SimpleNamespace(
                        req_id=request_id,
                        prompt_len=held.num_prompt_tokens,
                        prefill_token_ids=list(held.token_ids),
                        sampling_params=held.sampling,
                        block_ids=(list(held.blocks),),
                        num_computed_tokens=held.num_computed,
                    )
                )
            held.is_in_runner, held.spec_token_ids = True, []
            scheduled[request_id] = count
            if spec:
                drafts[request_id] = spec
            held.num_computed += count
        finished, self._finished = self._finished, set()
        preempted, self._preempted = self._preempted, set()
        return SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens=drafts,
            finished_req_ids=finished,
            preempted_req_ids=preempted,
            num_spec_tokens_to_schedule=self.num_spec_tokens,
            has_structured_output_requests=False,
        )

    def _grow(self, held: Held, num_tokens: int) -> list[int]:
        count = -(-num_tokens // BLOCK_SIZE) - len(held.blocks)
        blocks = [self._next_block + place for place in range(max(0, count))]
        self._next_block += len(blocks)
        held.blocks += blocks
        return blocks

    def update_from_output(self, scheduler_output: Any, sampled: dict[str, list[int]]) -> None:
        for request_id, tokens in sampled.items():
            if (held := self.requests.get(request_id)) is None:
                continue
            if num_drafted := len(scheduler_output.scheduled_spec_decode_tokens.get(request_id, ())):
                held.num_computed -= num_drafted - (len(tokens) - 1)
            for token_id in tokens:
                if not held.is_done:
                    held.token_ids.append(token_id)
            if held.is_done:
                self.outputs[request_id] = self.requests.pop(request_id).token_ids
                self._finished.add(request_id)

    def update_draft_token_ids(self, drafts: Any) -> None:
        for request_id, token_ids in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            if (held := self.requests.get(request_id)) is not None:
                held.spec_token_ids = token_ids


class Direct:
    """The plug-in of a rank without its guard: what fails while a step is read fails the test."""

    def __init__(self, drafting: HostedDrafting) -> None:
        self.drafting = drafting
        self.told: list[HostStep] = []

    def propose(self, num_rows: int, read: Callable[[], HostStep]) -> list[list[int]]:
        self.told.append(read())
        return self.drafting.propose(*self.told[-1])


class V2Engine:
    """An engine of vLLM with our speculator in its V2 runner, and a pool of drafters in memory."""

    def __init__(self, *, num_speculative_tokens: int = 4, state_taps: tuple[int, ...] = (), **runner: Any) -> None:
        self.clock = Clock()
        self.pool = PlayedPool(self.clock)
        self.runner = V2Runner(self.clock, num_speculative_tokens, **runner)
        self.scheduler = Scheduler(num_speculative_tokens)
        self.requests = ScheduledRequests()
        self.states = StepStates(state_taps) if state_taps else None
        config = HostedConfig(
            vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, num_speculative_tokens=num_speculative_tokens
        )
        self.plugin = Direct(HostedDrafting(self.pool, replace(config, is_pinned=True), clock=self.clock))
        self.speculator = PoolSpeculator(
            self.runner,
            self.plugin,
            self.requests,
            num_speculative_tokens=num_speculative_tokens,
            draft_seeded=False,
            states=self.states,
            clock=self.clock,
        )
        attach(self.runner, self.speculator, VERSION, state_taps)
        self.runner.load_model()

    def add(self, request_id: str = "a", prompt: Sequence[int] = (3, 1, 4), **sampling: Any) -> None:
        self.scheduler.add(request_id, prompt, **sampling)

    def step(self, only: Sequence[str] | None = None) -> Any:
        """Run vLLM's `EngineCore.step` and `post_step`; return what was scheduled."""
        scheduled = self.scheduler.schedule(only)
        self.runner.execute_model(scheduled)
        if scheduled.total_num_scheduled_tokens > 0:
            self.scheduler.update_from_output(scheduled, self.runner.sample_tokens(None))
            self.scheduler.update_draft_token_ids(self.runner.take_draft_token_ids())
        return scheduled

    def run(self, max_steps: int = 1000) -> int:
        """Run until everybody has ended; return how many steps that took."""
        for count in range(max_steps):
            if not self.scheduler.requests:
                return count
            self.step()
        raise AssertionError("requests do not end")
