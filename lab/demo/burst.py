"""The demo's burst: many requests at once, without drafts and as the price of a step has it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from outrider.lab.demo.ask import Answer, Client, Wish
from outrider.lab.demo.comparison import Comparison
from outrider.lab.demo.questions import Question, in_turn
from outrider.lab.demo.waiting import Count, show_wait

MAX_TOKENS = 24  # of an answer
TOGETHER = "many requests share a step, in which a draft token takes the time of another request's"


async def show_burst(
    console: Console,
    client: Client,
    questions: Sequence[Question],
    sizes: Sequence[int],
    max_tokens: int = MAX_TOKENS,
) -> list[Comparison]:
    """Let wave follow wave, each of questions that nobody has asked before while there are such."""
    console.print(Text("\nA burst that grows; step by step it is decided whether drafts pay:", "bold"))
    waves: list[Comparison] = []
    start = 0
    for size in sizes:
        found: list[tuple[tuple[Answer, ...], float]] = []
        for may_draft in (False, True):
            chosen = in_turn(questions, start, size)
            start += size
            found.append(await _wave(client, chosen, Wish(max_tokens=max_tokens, may_draft=may_draft, ignore_eos=True)))
        (off, off_s), (on, on_s) = found
        waves.append(Comparison(what=f"burst of {size}", story=TOGETHER, off=off, on=on, seconds=(off_s, on_s)))
        off_rate, on_rate = waves[-1].rates
        console.print(f"{size} requests: {off_rate:.0f} tokens/s off, {on_rate:.0f} on", highlight=False)
    return waves


async def _wave(client: Client, questions: Sequence[Question], wish: Wish) -> tuple[tuple[Answer, ...], float]:
    """Ask all at once; return the answers and the seconds that they took together."""
    begin_s = time.monotonic()
    drafts = "on" if wish.may_draft else "off"
    with show_wait(f"burst of {len(questions)}, drafts {drafts}", len(questions) * wish.max_tokens) as on_work:
        count = Count(on_work)
        answers = await asyncio.gather(*(client.ask(one, wish, count.take) for one in questions))
    return tuple(answers), time.monotonic() - begin_s
