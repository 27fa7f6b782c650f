"""The demo's second act: more and more requests at once, and what the router makes of their drafts."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from outrider.cluster.common.terminal import OnWork
from outrider.lab.demo.answers import tokens_per_verification
from outrider.lab.demo.ask import Answer, Client, Token, Wish
from outrider.lab.demo.fleet import Fleet
from outrider.lab.demo.questions import Question, in_turn
from outrider.lab.demo.waiting import show_wait

MOST_TOKENS = 32  # of an answer
FEWEST_TOKENS = 6
BUDGET_S = 10.0  # of a wave
REASONS = {
    "load": "a draft token costs more than it brings",
    "low_acceptance": "too few were right",
    "draft_queue": "drafts come too late",
    "drafter_timeout": "no drafter answers in time",
    "drafter_unavailable": "there is no drafter",
    "warmup": "steps are not measured yet",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """So many requests at once, and what came of them."""

    answers: tuple[Answer, ...]
    seconds: float
    decisions: Counter[str] = field(default_factory=Counter)  # of the router, meanwhile

    @property
    def num_requests(self) -> int:
        return len(self.answers)

    @property
    def rate(self) -> float:
        """Tokens per second of all together, their prompts' time included."""
        return sum(len(answer.tokens) for answer in self.answers) / self.seconds

    @property
    def num_drafting(self) -> int:
        """How many requests had a draft verified."""
        return sum(answer.speculation.num_drafts > 0 for answer in self.answers)

    @property
    def drafting_share(self) -> float:
        """The share of requests' steps that verified a draft."""
        num_steps = sum(answer.num_steps for answer in self.answers)
        return sum(answer.speculation.num_drafts for answer in self.answers) / max(1, num_steps)

    @property
    def tokens_per_verification(self) -> float | None:
        return tokens_per_verification(self.answers)

    @property
    def reasons(self) -> Counter[str]:
        """How many requests ended without drafts, by the reason."""
        return Counter(
            answer.speculation.disabled_reason for answer in self.answers if answer.speculation.disabled_reason
        )

    def fate(self, *, explained: bool = False) -> str:
        """Say what became of the drafts; explained: with what the reasons mean."""
        if not self.reasons:
            return "drafts stayed"
        meanings = REASONS if explained else {}
        named = ", ".join(
            f"{reason} {count}" + (f" ({meanings[reason]})" if reason in meanings else "")
            for reason, count in self.reasons.most_common()
        )
        return f"drafts were taken away from {self.reasons.total()} of {self.num_requests} requests: {named}"

    @property
    def summary(self) -> str:
        """Say in one line what the wave was like."""
        decided = ", ".join(f"{decision} {count}" for decision, count in self.decisions.most_common())
        return (
            f"{self.num_requests} requests: {self.rate:.0f} tokens/s; {self.num_drafting} of them drafted, in "
            f"{self.drafting_share:.0%} of all steps; {self.fate(explained=True)}; "
            f"the router decided {decided or 'nothing new'}"
        )


def answer_length(num_requests: int, tokens_per_s: float | None, budget_s: float = BUDGET_S) -> int:
    """Return how long the answers of a wave may be, so that it ends in time at the rate of the one before."""
    if tokens_per_s is None:
        return MOST_TOKENS
    return max(FEWEST_TOKENS, min(MOST_TOKENS, int(tokens_per_s * budget_s / num_requests)))


async def show_burst(
    console: Console, client: Client, fleet: Fleet, questions: Sequence[Question], sizes: Sequence[int]
) -> list[Wave]:
    """Let wave follow wave, each with a line; the router decides who drafts."""
    console.print(Text("\nA burst that grows; the router decides, request by request, whether drafts pay:", "bold"))
    await fleet.let_router_decide()
    waves: list[Wave] = []
    for size in sizes:
        length = answer_length(size, waves[-1].rate if waves else None)
        waves.append(await _wave(client, fleet, in_turn(questions, size), length))
        console.print(waves[-1].summary, highlight=False, soft_wrap=True)
    return waves


async def _wave(client: Client, fleet: Fleet, questions: Sequence[Question], length: int) -> Wave:
    """Ask all at once; the answers go on to their full length, so that every wave is as long as it is said to be."""
    before = await fleet.decisions()
    begin_s = time.monotonic()
    wish = Wish(max_tokens=length, ignore_eos=True)
    with show_wait(f"burst of {len(questions)}", len(questions) * length) as on_work:
        count = _Count(on_work, len(questions))
        answers = await asyncio.gather(*(count.through(client.ask(one, wish, count.take)) for one in questions))
    seconds = time.monotonic() - begin_s
    return Wave(answers=tuple(answers), seconds=seconds, decisions=await fleet.decisions() - before)


class _Count:
    """Counts what a wave has brought, for its progress bar."""

    def __init__(self, on_work: OnWork, num_requests: int) -> None:
        self._on_work = on_work
        self._num_requests = num_requests
        self._num_tokens = 0
        self._num_answered = 0

    def take(self, tokens: Sequence[Token]) -> None:
        self._num_tokens += len(tokens)
        self._on_work(self._num_tokens, f"{self._num_answered} of {self._num_requests} answered")

    async def through(self, asking: Awaitable[Answer]) -> Answer:
        """Wait for an answer and count it."""
        answer = await asking
        self._num_answered += 1
        self.take(())
        return answer
