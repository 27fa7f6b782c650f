"""The demo's first act: the same questions with speculation off, measured, and on, shown token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import click
from rich.console import Console
from rich.text import Text

from outrider.cluster.common.terminal import NOTHING
from outrider.lab.demo.ask import Answer, Client, Wish
from outrider.lab.demo.paint import Painter, legend
from outrider.lab.demo.questions import Question
from outrider.lab.demo.waiting import show_wait

MAX_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One protocol's answers without and with drafts."""

    protocol: str
    off: tuple[Answer, ...]
    on: tuple[Answer, ...]

    @property
    def off_rate(self) -> float:
        return rate(self.off)

    @property
    def on_rate(self) -> float:
        return rate(self.on)

    @property
    def tokens_per_verification(self) -> float | None:
        return tokens_per_verification(self.on)

    @property
    def summary(self) -> str:
        """Say in one line what drafts brought."""
        num_drafted = sum(answer.speculation.num_draft_tokens for answer in self.on)
        num_accepted = sum(answer.speculation.num_accepted_tokens for answer in self.on)
        return (
            f"{self.protocol}: the same text without drafts and with them; {self.off_rate:.0f} tokens/s off, "
            f"{self.on_rate:.0f} on; {num_accepted} of {num_drafted} draft tokens accepted, "
            f"{shown_length(self.tokens_per_verification)} tokens per verification"
        )


def rate(answers: Sequence[Answer]) -> float:
    """Return tokens per second from each answer's first token to its last."""
    seconds = sum(answer.decode_s for answer in answers)
    return sum(len(answer.tokens) - 1 for answer in answers) / seconds if seconds else 0.0


def tokens_per_verification(answers: Sequence[Answer]) -> float | None:
    """Return what a step that verifies a draft brings, its own token included; None: no draft was verified."""
    num_drafts = sum(answer.speculation.num_drafts for answer in answers)
    num_accepted = sum(answer.speculation.num_accepted_tokens for answer in answers)
    return 1 + num_accepted / num_drafts if num_drafts else None


def shown_length(length: float | None) -> str:
    """Write tokens per verification for a reader."""
    return NOTHING if length is None else f"{length:.2f}"


async def show_answers(
    console: Console, asked: Sequence[tuple[Client, Sequence[Question]]], max_tokens: int = MAX_TOKENS
) -> list[Comparison]:
    """Ask every client its questions twice; raises `click.ClickException` where drafts changed a text."""
    console.print(Text("\nAnswers, greedy, drafts pinned on; every token by its origin:", "bold"))
    for line in legend(console):
        console.print(line)
    return [await _compare(console, client, questions, max_tokens) for client, questions in asked]


async def _compare(console: Console, client: Client, questions: Sequence[Question], max_tokens: int) -> Comparison:
    off, on = [], []
    with show_wait(f"{client.name}, speculation off", len(questions)) as on_work:
        for number, question in enumerate(questions):
            on_work(number, f"question {number + 1} of {len(questions)}")
            off.append(await client.ask(question, Wish(max_tokens=max_tokens, may_draft=False)))
        on_work(len(questions), "measured")
    for question, plain in zip(questions, off, strict=True):
        console.print(Text(f"\n{client.name} > {question.shown}", "bold"), soft_wrap=True)
        painter = Painter(console)
        on.append(await client.ask(question, Wish(max_tokens=max_tokens), painter.write))
        painter.end()
        require_same(plain, on[-1], f"{client.name}: {question.shown}")
    comparison = Comparison(protocol=client.name, off=tuple(off), on=tuple(on))
    console.print(Text(f"\n{comparison.summary}", "dim"), soft_wrap=True)
    return comparison


def require_same(expected: Answer, answer: Answer, what: str) -> None:
    """Raise `click.ClickException` unless both answers have the same tokens."""
    if answer.token_ids != expected.token_ids:
        pairs = enumerate(zip(expected.token_ids, answer.token_ids, strict=False))
        shorter = min(len(expected.tokens), len(answer.tokens))
        first = next((index for index, (before, after) in pairs if before != after), shorter)
        raise click.ClickException(
            f"{what}: token {first + 1} differs from plain decoding's\nplain: {expected.text!r}\nhere: {answer.text!r}"
        )
