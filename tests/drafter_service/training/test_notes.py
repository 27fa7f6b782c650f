"""Lessons out of notes are the teacher's, each window is read once, and what notes cannot hold is not noted."""

import torch

from outrider.drafter_service.training.corpus_windows import TokenStream, Windows
from outrider.drafter_service.training.notes import Notes
from outrider.drafter_service.training.teacher import Teacher
from tiny.models import make_model
from tiny.training import make_corpus, make_teacher

WINDOW = 16
BYTES_OF_A_WINDOW = WINDOW * 2 * 64 * 2  # of one tap and the last states, 64 wide, in half precision


class CountingTeacher(Teacher):
    """Counts the windows that it reads, and in how many forwards."""

    num_read = num_forwards = 0

    def tapping(self, taps):
        return CountingTeacher(self.model, taps)

    def lesson(self, token_ids, counted=None):
        CountingTeacher.num_read += len(token_ids)
        CountingTeacher.num_forwards += 1
        return super().lesson(token_ids, counted)


def counting_teacher() -> CountingTeacher:
    CountingTeacher.num_read = CountingTeacher.num_forwards = 0
    return CountingTeacher(make_teacher().model, (2,))


def conversations() -> TokenStream:
    plain = make_corpus().training
    return TokenStream(plain.token_ids, torch.arange(len(plain)) % 5 > 1, torch.arange(0, len(plain), WINDOW))


def windows(rows: int, step: int = 0) -> Windows:
    return conversations().batch(step, rows=rows, window=WINDOW, seed=0)


def test_lessons_are_the_teachers_up_to_rounding():
    teacher = counting_teacher()
    drawn = windows(6)
    ours, theirs = Notes(teacher).lesson(drawn), teacher.lesson(drawn.token_ids, drawn.counted)
    assert torch.equal(ours.token_ids, theirs.token_ids)
    assert torch.equal(ours.counted, theirs.counted)
    assert torch.equal(ours.likeliest, theirs.likeliest)
    assert torch.allclose(ours.states, theirs.states, rtol=2**-7, atol=2**-7)
    assert (ours.logits() - theirs.logits()).abs().max() < 0.02 * theirs.logits().abs().max()
    some = torch.tensor([3, 1, 200])
    assert torch.allclose(ours.logits(some, start=4), ours.logits()[:, 4:, some], atol=1e-5)


def test_a_window_is_read_once_and_its_lesson_stays_the_same():
    notes = Notes(counting_teacher())
    first = notes.lesson(windows(5))
    num_read = CountingTeacher.num_read
    again = notes.lesson(windows(5))
    assert CountingTeacher.num_read == num_read
    assert torch.equal(first.states, again.states)
    assert torch.equal(first.final, again.final)
    notes.lesson(windows(5, step=1))
    assert CountingTeacher.num_read > num_read


def test_windows_that_are_not_noted_are_read_together_and_are_what_they_are_alone():
    notes, alone = Notes(counting_teacher()), Notes(counting_teacher())
    drawn = windows(6)
    notes.lesson(Windows(drawn.token_ids[:2], drawn.counted[:2], drawn.starts[:2]))  # some of them are noted already
    CountingTeacher.num_forwards = 0
    together = notes.lesson(drawn)
    assert CountingTeacher.num_forwards == 1
    for row in range(6):
        part = slice(row, row + 1)
        own = alone.lesson(Windows(drawn.token_ids[part], drawn.counted[part], drawn.starts[part]))
        assert torch.allclose(together.states[part], own.states, rtol=2**-7, atol=2**-7)
        assert torch.equal(together.likeliest[part], own.likeliest)


def test_no_more_is_noted_than_there_is_room_for():
    tokens = conversations().token_ids[: 4 * WINDOW].long().reshape(4, WINDOW)
    drawn = Windows(tokens, torch.ones_like(tokens, dtype=torch.bool), torch.arange(0, 4 * WINDOW, WINDOW))
    notes = Notes(counting_teacher(), limit_bytes=3 * BYTES_OF_A_WINDOW)
    notes.lesson(drawn)
    CountingTeacher.num_read = 0
    notes.lesson(drawn)
    assert CountingTeacher.num_read == 1


def test_windows_that_do_not_come_again_are_not_noted():
    notes = Notes(counting_teacher())
    plain = Windows(windows(2).token_ids, windows(2).counted)
    notes.lesson(plain)
    notes.lesson(plain)
    assert CountingTeacher.num_read == 4


def test_a_target_that_does_more_to_its_logits_is_read_each_time():
    model = make_model("gemma2", num_hidden_layers=4, vocab_size=320, final_logit_softcapping=0.5)
    teacher = CountingTeacher(model, (2,))
    notes = Notes(teacher)
    lesson = notes.lesson(windows(2))
    assert torch.equal(lesson.logits(), teacher.lesson(windows(2).token_ids).logits())
    assert lesson.table is None
