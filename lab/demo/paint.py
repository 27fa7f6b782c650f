"""Streamed tokens for a reader: coloured by their origin, or with marks around them where there are no colours."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from outrider.cluster.client.chat import UNSAFE
from outrider.lab.demo.ask import ACCEPTED, PLAIN, Token

STYLES = {ACCEPTED: "green", "recovered": "red", "bonus": "cyan", PLAIN: ""}
MEANINGS = {
    ACCEPTED: "drafted, and right",
    "recovered": "the target's own, where the draft was wrong",
    "bonus": "the target's own, after a draft that was right",
    PLAIN: "without a draft",
}
MARKS = {"recovered": "~", "bonus": "+"}  # in front of the token
OPEN, CLOSE = "\u2039", "\u203a"  # around accepted tokens: brackets that neither code nor prose has


class Painter:
    """Writes one answer, as it comes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._has_colors = has_colors(console)
        self._is_open = False

    def write(self, tokens: Sequence[Token]) -> None:
        """Write the next tokens."""
        for token in tokens:
            text = token.text.translate(UNSAFE)
            if text:
                self._print(Text(text, STYLES.get(token.origin, "")) if self._has_colors else self._marked(token, text))

    def end(self) -> None:
        """Close what is open, and the line."""
        self._print(Text(f"{CLOSE if self._is_open else ''}\n"))
        self._is_open = False

    def note(self, text: str) -> None:
        """Put a line of our own between two tokens."""
        self.end()
        self._print(Text(f"{text}\n", "bold"))

    def _marked(self, token: Token, text: str) -> Text:
        is_accepted = token.origin == ACCEPTED
        close = CLOSE if self._is_open and not is_accepted else ""
        mark = OPEN if is_accepted and not self._is_open else MARKS.get(token.origin, "")
        self._is_open = is_accepted
        word = text.lstrip(" ")  # most tokens begin with a space: a mark stands at their word
        return Text(f"{close}{text[: len(text) - len(word)]}{mark}{word}")

    def _print(self, text: Text) -> None:
        self._console.print(text, end="", soft_wrap=True)


def has_colors(console: Console) -> bool:
    """Tell whether colours reach the reader: a terminal that has them, and no wish to be without."""
    return console.color_system is not None and not console.no_color


def legend(console: Console) -> list[Text]:
    """Say what the colours mean, or the marks, a line each."""
    return [Text.assemble("  ", _shown_origin(console, origin), f": {MEANINGS[origin]}") for origin in MEANINGS]


def _shown_origin(console: Console, origin: str) -> Text:
    if has_colors(console):
        return Text(origin, STYLES[origin])
    return Text(f"{OPEN}{origin}{CLOSE}" if origin == ACCEPTED else f"{MARKS.get(origin, '')}{origin}")
