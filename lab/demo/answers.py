"""The demo's first acts, one request at a time: new questions, a file edited, and the same questions asked again."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from outrider.lab.demo.ask import Answer, Client, Wish
from outrider.lab.demo.comparison import Comparison, paired
from outrider.lab.demo.paint import Painter, legend
from outrider.lab.demo.questions import Question
from outrider.lab.demo.waiting import Count, show_wait

MAX_TOKENS = 64
NEW = "new text, of which a look-up finds little"
EDITED = "most of a file stays as it is, and the client sent it along as `prediction`"
SAID_BEFORE = "these answers were given a minute ago, and look-ups remember them"


async def show_answers(
    console: Console,
    asked: Sequence[tuple[Client, Sequence[Question]]],
    edits: Sequence[Question],
    *,
    knows_answers: bool,
    max_tokens: int = MAX_TOKENS,
) -> list[Comparison]:
    """Ask every client its questions, the first one to edit files as well, then all questions again.

    `knows_answers`: the drafter remembers what was answered.
    """
    console.print(Text("\nAnswers, greedy; every token by its origin:", "bold"))
    for line in legend(console):
        console.print(line)
    found = [await _compare(console, client, ("answers", NEW), questions, max_tokens) for client, questions in asked]
    if edits:
        length = max(len(edit.token_ids) for edit in edits)
        found.append(await _compare(console, asked[0][0], ("files edited", EDITED), edits, length))
    again = ("asked again", SAID_BEFORE if knows_answers else "the same, to a drafter that remembers no answers")
    for (client, questions), first in zip(asked, found[: len(asked)], strict=True):
        found.append(await _compare(console, client, again, questions, max_tokens, plain=first.off))
    return found


async def _compare(
    console: Console,
    client: Client,
    act: tuple[str, str],
    questions: Sequence[Question],
    max_tokens: int,
    plain: Sequence[Answer] = (),
) -> Comparison:
    """Ask each question without drafts, unless its answer is known, and with them, every token shown as it comes."""
    what, story = act
    off, on = list(plain), []
    for question in questions:
        console.print(Text(f"\n{client.name} > {question.shown}", "bold"), soft_wrap=True)
        if not plain:
            with show_wait(f"{client.name}, speculation off", max_tokens) as on_work:
                count = Count(on_work)
                wish = Wish(max_tokens=max_tokens, may_draft=False)
                off.append(await client.ask(question, wish, count.take))
        painter = Painter(console)
        on.append(await client.ask(question, Wish(max_tokens=max_tokens), painter.write))
        painter.end()
    return Comparison(
        what=f"{what} by {client.name} ({len(on)})",
        story=story,
        off=tuple(off),
        on=tuple(on),
        pairs=tuple(
            paired(f"{client.name}: {question.shown}", question, *both)
            for question, *both in zip(questions, off, on, strict=True)
        ),
    )
