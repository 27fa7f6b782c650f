"""What the web page talks to: the real application over a backend that plays, and what it was asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp
from transformers import PreTrainedTokenizerFast

from fakes.backend import CHAT_TEMPLATE, FakeBackend, Step, build_gateway, build_tokenizer
from fakes.fleet_snapshots import BUSY_VERIFIER, DECIDED_AT_S, busy_fleet
from fakes.reports import changed
from outrider.cluster.api.openai.endpoints import build_api
from outrider.cluster.monitoring.fleet_load import fleet_load
from outrider.cluster.replies.reader import ReplySyntax
from outrider.cluster.router.fleet import FleetSnapshot
from outrider.verifier_service.messages.request import (
    DisabledReason,
    GenerationRequest,
    RequestOutput,
    SpeculationMetrics,
)
from support.waiting import healthy

ATTACK = "<img src=x onerror=\"document.title='owned'\">"
NUM_DRAFT_TOKENS = 3
MAX_MODEL_LEN = 2048
SYNTAX = ReplySyntax(tool_call_parser="hermes", reasoning_parser="qwen3")
SPECULATION = SpeculationMetrics(enabled=True, num_drafts=3, num_draft_tokens=9, num_accepted_tokens=4)
NO_SPECULATION = SpeculationMetrics(enabled=False, disabled_reason=DisabledReason.REQUEST_OPT_OUT)


@dataclass(slots=True)
class DraftingBackend:
    """Play steps that each, but for a first one of one token, verified a draft of `NUM_DRAFT_TOKENS` tokens.

    Where no speculation is wanted, only a step of several tokens has verified one.
    """

    played: FakeBackend
    pace_s: float = 0.0
    num_running: int = 0
    max_running: int = 0

    async def generate(self, request: GenerationRequest, hear: Callable[[RequestOutput], None]) -> None:
        wanted = 0

        def draft(output: RequestOutput) -> None:
            nonlocal wanted
            drafted = max(wanted, output.num_accepted_tokens)
            is_full = output.num_accepted_tokens == drafted
            hear(
                dataclasses.replace(
                    output,
                    num_draft_tokens=drafted,
                    follows_leaf=is_full,
                    speculation=output.speculation and (NO_SPECULATION if is_plain(request) else SPECULATION),
                )
            )
            wanted = 0 if is_plain(request) else NUM_DRAFT_TOKENS

        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        self.played.pace_s = self.pace_s
        try:
            await self.played.generate(request, draft)
        finally:
            self.num_running -= 1


def is_plain(request: GenerationRequest) -> bool:
    """Return whether a request wants no speculation."""
    return request.sampling.num_speculative_tokens == 0


@dataclass(slots=True)
class Service:
    """What the page talks to, and what it was asked."""

    tokenizer: PreTrainedTokenizerFast
    steps: Sequence[Step] = ()
    plain_steps: Sequence[Step] | None = None  # of requests that want no speculation; None: the same
    snapshot: FleetSnapshot = field(default_factory=busy_fleet)
    backend: FakeBackend = field(init=False)
    drafting: DraftingBackend = field(init=False)

    def __post_init__(self) -> None:
        self.backend = FakeBackend(self._script, speculation=SPECULATION)
        self.drafting = DraftingBackend(self.backend)

    def _script(self, request: GenerationRequest) -> Sequence[Step]:
        return self.steps if self.plain_steps is None or not is_plain(request) else self.plain_steps

    def api(self) -> ASGIApp:
        gateway = build_gateway(self.drafting, self.tokenizer, max_model_len=MAX_MODEL_LEN, fleet_load=self._load)
        return build_api(gateway, healthy, reply_syntax=SYNTAX)

    def _load(self) -> dict[str, Any]:
        return fleet_load(self.snapshot, DECIDED_AT_S + 0.5)

    def change(self, **changes: Any) -> None:
        """Change the first verifier's report."""
        busy, idle = busy_fleet().verifiers
        busy = dataclasses.replace(busy, report=changed(BUSY_VERIFIER, **changes))
        self.snapshot = dataclasses.replace(self.snapshot, verifiers=(busy, idle))

    def say(self, text: str, *, num_a_step: int = 4) -> None:
        """Answer with a text from now on, in steps of so many tokens."""
        self.steps = in_steps(self.tokenizer.encode(text), num_a_step)

    def prompts(self) -> list[str]:
        """Return what the model was given, request by request."""
        return [self.tokenizer.decode(list(request.prompt_token_ids)) for request in self.backend.requests]


def in_steps(ids: Sequence[int], num_a_step: int) -> list[Sequence[int]]:
    """Cut tokens into a first step of one, and steps of so many."""
    return [ids[:1], *(ids[at : at + num_a_step] for at in range(1, len(ids), num_a_step))]


def build_service(chat_template: str | None = CHAT_TEMPLATE) -> Service:
    """Return a service whose tokenizer has the attack as one token."""
    tokenizer = build_tokenizer(chat_template)
    tokenizer.add_tokens([ATTACK])
    return Service(tokenizer)
