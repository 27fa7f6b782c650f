"""Tokens keep their text and show their origin, with colours or without."""

from __future__ import annotations

import io

from rich.console import Console

from fakes.played import played_answer
from outrider.lab.demo.paint import Painter

ANSWER = played_answer(
    ("The", "plain"),
    (" sky", "accepted"),
    (" is", "accepted"),
    (" blue", "recovered"),
    (",", "accepted"),
    (" as", "bonus"),
    (" is\n", "plain"),
    ("it", "accepted"),
)


def painted(**options: bool | str | None) -> str:
    written = io.StringIO()
    painter = Painter(Console(file=written, width=20, **options))
    for token in ANSWER.tokens:
        painter.write([token])
    painter.end()
    return written.getvalue()


def test_without_a_terminal_marks_stand_at_the_words():
    assert painted() == "The \u2039sky is\u203a ~blue\u2039,\u203a +as is\n\u2039it\u203a\n"


def test_a_terminal_gets_colours_and_no_marks():
    written = painted(force_terminal=True, color_system="standard")
    assert "\x1b[32m sky\x1b[0m" in written
    assert "\x1b[31m blue\x1b[0m" in written
    assert "\x1b[36m as\x1b[0m" in written
    assert "\u2039" not in written
    assert "~" not in written


def test_a_model_does_not_drive_the_terminal():
    written = io.StringIO()
    Painter(Console(file=written)).write(played_answer(("\x1b[2J", "plain")).tokens)
    assert "\x1b" not in written.getvalue()
