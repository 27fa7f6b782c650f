"""Answers as a service might have streamed them, and a reference that is asked where they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outrider.lab.demo.ask import Answer, Speculation, Token
from outrider.lab.report import Machine
from outrider.lab.same_tokens import Seeded

MACHINE = Machine(
    cpu="Test CPU",
    num_cores=2,
    memory_bytes=8 << 30,
    load_average=0.25,
    python="3.11.1",
    torch="2.13.0",
    transformers="5.23.0",
)


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


@dataclass
class FakeReference:
    """Leads by the margin of a text's last token, and writes tokens as numbers."""

    margins: Mapping[int, float] = field(default_factory=dict)
    otherwise: float = 0.5
    may_tip: bool = False
    asked: list[tuple[list[int], Seeded | None]] = field(default_factory=list)

    def margin(self, token_ids: Sequence[int], seeded: Seeded | None) -> float:
        self.asked.append((list(token_ids), seeded))
        return self.margins.get(token_ids[-1], self.otherwise)

    def text(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))
