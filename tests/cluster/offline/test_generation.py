"""What `outrider generate` prints, and when, out of pieces that come in any order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider.cluster.offline.generation import Printed, as_text, in_order
from outrider.cluster.offline.outputs import TextPiece


def piece(request_id: int, text: str, finish_reason: str | None = None, *, index: int = 0) -> TextPiece:
    error = "it would not" if finish_reason == "error" else None
    return TextPiece(request_id=str(request_id), index=index, text=text, finish_reason=finish_reason, error=error)


def printed(pieces: list[TextPiece], num_prompts: int = 3) -> str:
    turns = [(str(number), 0) for number in range(num_prompts)]
    return "".join(part.text for part in as_text(in_order(pieces, turns)))


def test_the_first_that_has_not_ended_comes_as_it_is_generated_and_later_ones_at_once_in_their_turn():
    turns = [("0", 0), ("1", 0), ("2", 0)]
    asked: list[TextPiece] = []

    def generated() -> Iterator[TextPiece]:
        for each in (
            *(piece(0, "a"), piece(1, "b"), piece(1, "B", "stop"), piece(0, "A"), piece(2, "c")),
            *(piece(0, "!", "length"), piece(2, "C", "stop")),
        ):
            asked.append(each)
            yield each

    shown = [(len(asked), each.text) for each in in_order(generated(), turns)]
    assert shown == [(1, "a"), (4, "A"), (6, "!"), (6, "bB"), (6, "c"), (7, "C")]


def test_a_short_second_waits_for_a_long_first():
    pieces = [piece(1, "short", "stop"), piece(0, "lo"), piece(2, "last", "stop"), piece(0, "ng", "stop")]
    assert printed(pieces) == "long\nshort\nlast\n"


def test_the_outputs_of_a_prompt_have_their_turns_too():
    pieces = [piece(0, "b", "stop", index=1), piece(1, "c", "stop"), piece(0, "a", "stop")]
    turns = [("0", 0), ("0", 1), ("1", 0)]
    assert [each.text for each in in_order(pieces, turns)] == ["a", "b", "c"]


@pytest.mark.parametrize(("said", "shown"), [("", "it would not\n"), ("par", "par\nit would not\n")])
def test_an_error_is_a_line_in_its_turn_and_costs_no_other(said: str, shown: str):
    begun = [piece(1, said)] if said else []
    pieces = [*begun, piece(1, "", "error"), piece(2, "c", "stop"), piece(0, "a"), piece(0, "", "stop")]
    assert printed(pieces) == f"a\n{shown}c\n"


def test_only_an_end_without_a_text_is_silence():
    pieces = [piece(0, "", "stop"), piece(1, "a"), piece(1, "", "stop"), piece(2, "", "error")]
    assert list(as_text(pieces)) == [
        Printed("\n", is_silence=True),
        Printed("a"),
        Printed("\n"),
        Printed("it would not\n"),
    ]
