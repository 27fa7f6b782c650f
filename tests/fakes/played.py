"""Answers as a service might have streamed them."""

from __future__ import annotations

from outrider.lab.demo.ask import Answer, Speculation, Token


def played_answer(
    *tokens: tuple[str, str], every_s: float = 0.1, begin_s: float = 0.0, **speculation: int | str | None
) -> Answer:
    """Return an answer of (text, origin) tokens, one every so often."""
    return Answer(
        tokens=tuple(
            Token(len(text), text, origin, begin_s + index * every_s) for index, (text, origin) in enumerate(tokens)
        ),
        speculation=Speculation(**speculation),
    )


def plain_answer(num_tokens: int, **options: float | int | str | None) -> Answer:
    """Return an answer of so many tokens without drafts."""
    return played_answer(*[(" word", "plain")] * num_tokens, **options)
