"""Waves of a burst, from a client that is played."""

from __future__ import annotations

import io

from rich.console import Console

from fakes.played import plain_answer
from outrider.lab.demo.ask import Answer, Wish
from outrider.lab.demo.burst import show_burst
from outrider.lab.demo.questions import Question, in_turn

QUESTIONS = [Question(shown=str(number), path="/", fields={}, token_ids=()) for number in range(6)]


class PlayedClient:
    """Answers at once, and knows what it was asked."""

    name = "played"

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []

    async def ask(self, question: Question, wish: Wish, on_tokens=lambda tokens: None) -> Answer:
        self.asked.append((question.shown, wish.may_draft))
        answer = plain_answer(wish.max_tokens)
        on_tokens(answer.tokens)
        return answer


async def test_each_wave_runs_without_drafts_and_with_them_on_questions_of_its_own():
    client, written = PlayedClient(), io.StringIO()
    waves = await show_burst(Console(file=written), client, QUESTIONS, (1, 2), max_tokens=3)
    assert client.asked == [("0", False), ("1", True), ("2", False), ("3", False), ("4", True), ("5", True)]
    assert [(wave.what, len(wave.off), len(wave.on)) for wave in waves] == [("burst of 1", 1, 1), ("burst of 2", 2, 2)]
    assert all(wave.seconds is not None and wave.ratio is not None for wave in waves)
    assert "2 requests: " in written.getvalue()


def test_where_there_are_fewer_questions_they_are_asked_again():
    assert [question.shown for question in in_turn(QUESTIONS, 4, 5)] == ["4", "5", "0", "1", "2"]
