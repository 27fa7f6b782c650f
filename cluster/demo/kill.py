"""The demo's third act: a drafter dies while a stream runs. Not a token changes, and another takes its place."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

import click
from rich.console import Console
from rich.text import Text

from outrider.cluster.client.openai_client import ServerError
from outrider.cluster.demo.answers import require_same
from outrider.cluster.demo.ask import ACCEPTED, Answer, Client, Token, Wish
from outrider.cluster.demo.fleet import Fleet
from outrider.cluster.demo.paint import Painter
from outrider.cluster.demo.questions import Question
from outrider.cluster.demo.waiting import show_wait

MAX_TOKENS = 128
KILL_AFTER = 32  # tokens
RECOVERY_S = 30.0
POLL_S = 0.5
POLL_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """What a drafter's end did to a stream."""

    answer: Answer
    struck_s: float
    drafts_again_s: float | None  # from the kill until a draft was verified again; None: not within `RECOVERY_S`

    @property
    def longest_pause_s(self) -> float:
        """The longest wait between two messages that a reader had from the kill on."""
        before = [token.arrived_s for token in self.answer.tokens if token.arrived_s <= self.struck_s][-1:]
        after = [token.arrived_s for token in self.answer.tokens if token.arrived_s > self.struck_s]
        return max((later - earlier for earlier, later in itertools.pairwise(before + after)), default=0.0)

    @property
    def outcome(self) -> str:
        """Say what was lost: nothing but time."""
        back_s = self.drafts_again_s
        again = f"drafts again after {back_s:.1f} s" if back_s is not None else f"no draft within {RECOVERY_S:.0f} s"
        num_tokens = len(self.answer.tokens)
        return f"none of {num_tokens} tokens changed; longest pause {self.longest_pause_s * 1e3:.0f} ms; {again}"


class _Assassin:
    """Shows a stream, and kills a process once it has brought enough tokens."""

    def __init__(self, pid: int, painter: Painter) -> None:
        self._pid = pid
        self._painter = painter
        self._origins: list[str] = []
        self.struck_s: float | None = None

    def take(self, tokens: Sequence[Token]) -> None:
        self._painter.write(tokens)
        self._origins += [token.origin for token in tokens]
        if self.struck_s is None and len(self._origins) >= KILL_AFTER:
            self.struck_s = time.monotonic()
            os.kill(self._pid, signal.SIGKILL)
            num_accepted = self._origins.count(ACCEPTED)
            self._painter.note(f"[drafter killed: process {self._pid}, which brought {num_accepted} tokens so far]")


async def show_kill(console: Console, client: Client, fleet: Fleet, question: Question) -> Kill:
    """Stream, kill the drafter on the way, wait for the next one; raises `click.ClickException` for another token."""
    console.print(Text("\nA drafter killed in mid-stream, drafts pinned on:", "bold"))
    await fleet.pin_drafts()
    await wait_for_drafts(client, question, RECOVERY_S)
    plain = await _plain(client, question)
    painter = Painter(console)
    assassin = _Assassin(await fleet.drafter_pid(), painter)
    console.print(Text(f"\n{client.name} > {question.shown}", "bold"), soft_wrap=True)
    answer = await client.ask(question, Wish(max_tokens=MAX_TOKENS, ignore_eos=True), assassin.take)
    painter.end()
    require_same(plain, answer, "a drafter killed in mid-stream")
    if assassin.struck_s is None:
        raise click.ClickException(f"the stream ended before its token {KILL_AFTER}")
    again_s = await wait_for_drafts(client, question, RECOVERY_S)
    kill = Kill(answer=answer, struck_s=assassin.struck_s, drafts_again_s=again_s and again_s - assassin.struck_s)
    console.print(Text(f"\n{kill.outcome}", "dim"), soft_wrap=True)
    return kill


async def _plain(client: Client, question: Question) -> Answer:
    """Return what the stream must be, from plain decoding."""
    num_tokens = 0
    with show_wait("the same stream before, speculation off", MAX_TOKENS) as on_work:

        def count(tokens: Sequence[Token]) -> None:
            nonlocal num_tokens
            num_tokens += len(tokens)
            on_work(num_tokens, "streamed")

        return await client.ask(question, Wish(max_tokens=MAX_TOKENS, may_draft=False, ignore_eos=True), count)


async def wait_for_drafts(client: Client, question: Question, timeout_s: float) -> float | None:
    """Ask until a draft is verified; return when that was, None: it was not in time."""
    begin_s = time.monotonic()
    with show_wait("waiting for drafts", timeout_s) as on_work:
        while (now_s := time.monotonic()) < begin_s + timeout_s:
            on_work(now_s - begin_s, "asking")
            try:
                answer = await client.ask(question, Wish(max_tokens=POLL_TOKENS, ignore_eos=True))
            except ServerError as error:
                if error.status != 503:
                    raise
            else:
                if answer.speculation.num_drafts:
                    on_work(timeout_s, "here")
                    return time.monotonic()
            await asyncio.sleep(POLL_S)
    return None
