"""How a model marks its thoughts in an answer, for what holds after them and what bounds them."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.verifier_service.messages.draft import require

MAX_MARK_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """Thoughts at an answer's beginning. Raises `ValueError` naming `thought` or the budget if it is out of range.

    prompt | opening, thought …, closing | what the request's form holds for
           |<- is_open: the prompt has written the opening, and the answer begins within the thought ->|

    If it is not open, the answer may begin with the opening, or with what the form holds for. What looks like a mark
    later on is text.
    """

    opening: str
    closing: str
    is_open: bool
    max_tokens: int | None = None  # after so many tokens of thought the closing is forced; None: no bound

    def __post_init__(self) -> None:
        for mark in (self.opening, self.closing):
            is_short = 1 <= len(mark.encode()) <= MAX_MARK_BYTES
            require(is_short, "thought", f"between marks of 1 to {MAX_MARK_BYTES} bytes")
        require(self.max_tokens is None or self.max_tokens >= 0, "thinking_token_budget", "at least 0")
