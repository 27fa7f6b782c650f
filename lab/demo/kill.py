"""The demo's last act: a drafter dies while a stream runs. Not a token changes, and another takes its place."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

import click
from rich.console import Console
from rich.text import Text

from outrider.lab.demo.ask import ACCEPTED, PLAIN, Answer, Client, Token, Wish
from outrider.lab.demo.comparison import paired
from outrider.lab.demo.fleet import Fleet
from outrider.lab.demo.paint import Painter
from outrider.lab.demo.questions import Question
from outrider.lab.demo.waiting import Count, show_wait
from outrider.lab.same_tokens import Pair, first_difference

MAX_TOKENS = 128
KILL_AFTER = 32  # tokens
RECOVERY_S = 30.0
NUM_POLLS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """When there was another drafter, and when a draft of its was verified; None: not in time."""

    drafter_s: float | None = None
    draft_s: float | None = None

    def after(self, struck_s: float) -> str:
        """Say how long it took from a kill on."""
        if self.draft_s is not None:
            return f"drafts again after {self.draft_s - struck_s:.1f} s"
        if self.drafter_s is not None:
            return f"another drafter after {self.drafter_s - struck_s:.1f} s, which found nothing to draft"
        return f"no other drafter within {RECOVERY_S:.0f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """What a drafter's end did to a stream."""

    answer: Answer
    pair: Pair  # with what it must be
    struck_s: float
    recovery: Recovery

    @property
    def longest_pause_s(self) -> float:
        """The longest wait between two messages that a reader had from the kill on."""
        before = [token.arrived_s for token in self.answer.tokens if token.arrived_s <= self.struck_s][-1:]
        after = [token.arrived_s for token in self.answer.tokens if token.arrived_s > self.struck_s]
        return max((later - earlier for earlier, later in itertools.pairwise(before + after)), default=0.0)

    @property
    def outcome(self) -> str:
        """Say what was lost: nothing but time, or the first token that changed."""
        place = first_difference(self.pair.given, self.pair.expected)
        changed = "none" if place is None else f"token {place + 1}"
        changed += f" of {len(self.answer.tokens)} tokens changed"
        return f"{changed}; longest pause {self.longest_pause_s * 1e3:.0f} ms; {self.recovery.after(self.struck_s)}"


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
    """Stream, kill the drafter on the way, wait for the next one."""
    console.print(Text("\nA drafter killed in mid-stream, drafts pinned on:", "bold"))
    await fleet.pin_drafts()
    await fleet.wait_for_drafter(RECOVERY_S)
    plain = await _plain(client, question)
    await client.ask(question, Wish(max_tokens=MAX_TOKENS, ignore_eos=True))  # so that look-ups have what to draft from
    painter = Painter(console)
    dead = await fleet.linked_drafters()
    assassin = _Assassin(await fleet.drafter_pid(), painter)
    console.print(Text(f"\n{client.name} > {question.shown}", "bold"), soft_wrap=True)
    answer = await client.ask(question, Wish(max_tokens=MAX_TOKENS, ignore_eos=True), assassin.take)
    painter.end()
    if assassin.struck_s is None:
        raise click.ClickException(f"the stream ended before its token {KILL_AFTER}")
    recovery = await _recovery(client, fleet, question, dead)
    pair = paired("a drafter killed in mid-stream", question, plain, answer)
    kill = Kill(answer=answer, pair=pair, struck_s=assassin.struck_s, recovery=recovery)
    console.print(Text(f"\n{kill.outcome}", "dim"), soft_wrap=True)
    return kill


async def _plain(client: Client, question: Question) -> Answer:
    """Return what the stream must be, from plain decoding."""
    with show_wait("the same stream before, speculation off", MAX_TOKENS) as on_work:
        wish = Wish(max_tokens=MAX_TOKENS, may_draft=False, ignore_eos=True)
        return await client.ask(question, wish, Count(on_work).take)


async def _recovery(client: Client, fleet: Fleet, question: Question, dead: frozenset[str]) -> Recovery:
    """Wait for a drafter that is none of the dead, then for a draft of its own."""
    if not await fleet.wait_for_drafter(RECOVERY_S, but=dead):
        return Recovery()
    drafter_s = time.monotonic()
    with show_wait("waiting for its first draft", NUM_POLLS) as on_work:
        for number in range(NUM_POLLS):
            on_work(number, "asking")
            # as far as the stream came before the kill: where the method found drafts then, it finds some now
            answer = await client.ask(question, Wish(max_tokens=KILL_AFTER, ignore_eos=True))
            if answer.speculation.num_drafts:
                on_work(NUM_POLLS, "here")
                return Recovery(drafter_s=drafter_s, draft_s=first_draft_s(answer))
    return Recovery(drafter_s=drafter_s)


def first_draft_s(answer: Answer) -> float:
    """Return when the first token came that a draft had a part in."""
    return next(token.arrived_s for token in answer.tokens if token.origin != PLAIN)
