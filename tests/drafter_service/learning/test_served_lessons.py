"""What of a sample is learned from, and against which law."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from outrider.drafter_service.learning.reservoir import Kept
from outrider.drafter_service.learning.served_lessons import Reading, ServedLesson, draw_lesson, spans
from outrider.drafter_service.training.objectives import Objective, draft_loss
from outrider.drafter_service.training.teacher import TaughtLesson
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE
from tiny.served import rows_of, sample

CPU = torch.device("cpu")
VOCAB_SIZE = 12
TOKENS_ONLY = Reading(vocab_size=VOCAB_SIZE)
ATTENDS = Reading(vocab_size=VOCAB_SIZE, state_width=2, attends=True)
LAST_STATE = Reading(vocab_size=VOCAB_SIZE, state_width=2)


def kept_of(length=10, num_prompt=4, positions=(), **fields):
    """A text of ascending ids, whose state at a position has the position's number as values."""
    raw = torch.tensor([[position, -position] for position in positions], dtype=torch.bfloat16)
    states = raw.view(torch.int16).numpy().tobytes() if positions else b""
    made = sample(
        token_ids=range(length), num_prompt_tokens=num_prompt, state_positions=tuple(positions),
        state_width=2 if positions else 0, states=states, **fields,
    )  # fmt: skip
    return Kept.of(made, is_held_out=False)


def lesson_of(kept, reading, *, window=10, num_positions=2, seed=0):
    lesson = draw_lesson(
        [kept], [1.0], reading, rows=1, window=window, num_positions=num_positions, rng=random.Random(seed), device=CPU
    )
    assert lesson is not None
    return lesson


def test_only_tokens_after_the_prompt_count():
    lesson = lesson_of(kept_of(), TOKENS_ONLY, window=12)
    # the row of token 3 is of token 4, the answer's first; token 9 is the last, and 10 and 11 are padding
    assert lesson.counted.tolist() == [[False] * 3 + [True] * 6 + [False] * 3]
    assert lesson.token_ids.tolist() == [[*range(10), 0, 0]]
    assert lesson.top_ids[0, 3:9, 0].tolist() == [4, 5, 6, 7, 8, 9]


def test_counting_prompt_tokens_would_be_caught():
    """A planted defect: were the prompt's rows counted, the loss would differ."""
    lesson = lesson_of(kept_of(), TOKENS_ONLY)
    logits = torch.randn(1, 10, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    right = Objective.CE.mean_loss(lesson.law(None).beside(logits, 0))
    assert right.item() == pytest.approx(F.cross_entropy(logits[0, 3:9], torch.arange(4, 10)).item(), abs=1e-5)
    defective = ServedLesson(
        **{name: getattr(lesson, name) for name in ServedLesson.__slots__}
        | {"counted": torch.ones_like(lesson.counted)}
    )
    disturbed = logits.clone()
    disturbed[:, :3] = 50 * torch.eye(VOCAB_SIZE)[11]  # what is said of the prompt
    assert Objective.CE.mean_loss(lesson.law(None).beside(disturbed, 0)).item() == pytest.approx(right.item())
    # rows without a law stay out even then: nothing is known of the prompt's tokens
    assert defective.law(None).counted.tolist() == [[False] * 3 + [True] * 6 + [False]]


def test_a_head_that_attends_begins_after_a_hole():
    kept = kept_of(20, 3, positions=(4, 5, 6, 9, 10, 11, 12))
    reading = Reading(vocab_size=20, state_width=2, attends=True)
    assert spans(kept, reading) == [range(4, 7), range(9, 13)]
    starts = set()
    for seed in range(40):
        lesson = lesson_of(kept, reading, window=6, seed=seed)
        start = int(lesson.token_ids[0, 0])
        starts.add(start)
        assert start in (4, 9, 10)
        there = list(range(start, 7 if start < 7 else 13))[:6]
        assert lesson.has_state.tolist() == [[True] * len(there) + [False] * (6 - len(there))]
        assert lesson.states[0, : len(there), 0].tolist() == there
        assert lesson.states[0, len(there) :].abs().sum() == 0
    assert starts == {4, 9, 10}


def test_a_head_that_attends_reads_nothing_behind_the_next_hole():
    kept = kept_of(12, 2, positions=(1, 2, 4, 5))
    for seed in range(10):
        lesson = lesson_of(kept, ATTENDS, window=8, seed=seed)
        start = int(lesson.token_ids[0, 0])
        assert lesson.has_state.tolist() == [[True, True] + [False] * 6], start


def test_a_head_of_the_last_state_alone_learns_where_it_was_asked():
    kept = kept_of(10, 2, positions=(2, 5, 7))
    lesson = lesson_of(kept, LAST_STATE)
    start = int(lesson.token_ids[0, 0])
    assert [start + place for place in lesson.has_state[0].nonzero().flatten().tolist()] == [2, 5, 7]
    assert lesson.states[0, lesson.has_state[0], 0].tolist() == [2, 5, 7]


def test_a_root_without_a_state_teaches_nothing():
    """A planted defect: were a root without a state counted, the loss would differ."""
    lesson = lesson_of(kept_of(10, 2, positions=(2, 5, 6)), LAST_STATE)
    assert lesson.token_ids[0].tolist() == [*range(2, 10), 0, 0]
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(1, 8, VOCAB_SIZE, generator=generator) for _ in range(2)]
    right = draft_loss(rows, lesson.law(None))
    disturbed = [part.clone() for part in rows]
    for part in disturbed:
        part[:, [1, 2, 5, 6, 7], 0] = 50.0
    assert draft_loss(disturbed, lesson.law(None)).item() == pytest.approx(right.item())
    first = F.cross_entropy(rows[0][0, [0, 3, 4]], torch.tensor([4, 7, 8]))
    second = F.cross_entropy(rows[1][0, [0, 3, 4]], torch.tensor([5, 8, 9]))
    assert right.item() == pytest.approx(((first + 0.8 * second) / 1.8).item(), abs=1e-5)
    deep = torch.tensor([1, 3])
    some = draft_loss([rows[0], rows[1][:, deep]], lesson.law(None), deep=deep)
    only = F.cross_entropy(rows[1][0, [3]], torch.tensor([8]))
    assert some.item() == pytest.approx(((first + 0.8 * only) / 1.8).item(), abs=1e-5)


def laws(num_rows, seed=0):
    return (2 * torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))).softmax(-1)


@pytest.mark.parametrize("objective", [Objective.CE, Objective.TV])
@pytest.mark.parametrize("vocab_ids", [None, [1, 2, 3, 5, 7, 11], [7, 1, 5, 2, 11, 3]])
def test_a_whole_law_in_rows_is_the_teachers(vocab_ids, objective):
    told = laws(6)
    ids, weights = rows_of(told, VOCAB_SIZE)
    lesson = lesson_of(kept_of(num_top=VOCAB_SIZE, top_ids=ids, top_weights=weights), TOKENS_ONLY)
    assert lesson.top_weights[0, 3:9].sum(-1).tolist() == pytest.approx([DRAFT_PROB_SCALE] * 6, abs=8)
    rows = torch.cat([laws(3, seed=1), told, laws(1, seed=2)])[None]  # [1, 10, VOCAB_SIZE], the first 3 of the prompt
    dense = TaughtLesson(
        token_ids=lesson.token_ids, final=rows.log(), likeliest=rows.argmax(-1), states=lesson.states,
        counted=lesson.counted,
    )  # fmt: skip
    chosen = None if vocab_ids is None else torch.tensor(vocab_ids)
    size = VOCAB_SIZE if chosen is None else len(chosen)
    draft = torch.randn(1, 7, size, generator=torch.Generator().manual_seed(3)).requires_grad_()
    ours, theirs = (objective.mean_loss(each.law(chosen).beside(draft, 2)) for each in (lesson, dense))
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-3)
    assert lesson.law(chosen).counted.tolist() == dense.law(chosen).counted.tolist()
    (grad,), (expected,) = torch.autograd.grad(ours, draft), torch.autograd.grad(theirs, draft)
    assert torch.allclose(grad, expected, atol=1e-3)
    roots = torch.tensor([1, 3, 5])
    some = draft[:, roots]
    ours, theirs = (objective.mean_loss(each.law(chosen).beside(some, 2, roots)) for each in (lesson, dense))
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-3)


def test_each_row_is_of_its_own_token():
    """The row after token p is of token p + 1: a law shifted by one is another one."""
    told = laws(6)
    ids, weights = rows_of(told, 1)
    lesson = lesson_of(kept_of(num_top=1, top_ids=ids, top_weights=weights), TOKENS_ONLY)
    assert lesson.top_ids[0, 3:9, 0].tolist() == told.argmax(-1).tolist()
    assert len(set(told.argmax(-1).tolist())) > 2


def test_a_law_of_few_tokens_takes_no_vocabularys_memory():
    lesson = lesson_of(kept_of(), TOKENS_ONLY)
    law = lesson.law(torch.arange(VOCAB_SIZE))
    assert (law.ids.shape, law.probs.shape, law.entropy.shape) == ((1, 10, 1), (1, 10, 1), (1, 10))


def test_a_token_outside_a_reduced_vocabulary_teaches_nothing():
    law = lesson_of(kept_of(), TOKENS_ONLY).law(torch.tensor([8, 4, 6]))
    assert law.counted.nonzero()[:, 1].tolist() == [3, 5, 7]
    assert law.ids[0, [3, 5, 7], 0].tolist() == [1, 2, 0]


def test_a_row_that_the_target_did_not_tell_is_the_committed_token():
    ids, weights = np.full((6, 2), -1, np.int32), np.zeros((6, 2), np.int32)
    ids[0], weights[0] = (9, 4), (DRAFT_PROB_SCALE // 4 * 3, DRAFT_PROB_SCALE // 4)
    ids[1, 0], weights[1, 0] = 7, DRAFT_PROB_SCALE
    lesson = lesson_of(kept_of(num_top=2, top_ids=ids.tobytes(), top_weights=weights.tobytes()), TOKENS_ONLY)
    law = lesson.law(None)
    assert law.probs[0, 3].tolist() == [0.75, 0.25]
    assert [row.tolist() for row in law.probs[0, 4:9]] == [[1.0, 0.0]] * 5
    assert law.ids[0, 3:9, 0].tolist() == [9, 7, 6, 7, 8, 9]


def test_windows_of_a_long_text_hold_more_answer_than_prompt():
    kept = kept_of(12, 8)
    for seed in range(20):
        lesson = lesson_of(kept, TOKENS_ONLY, window=4, seed=seed)
        assert int(lesson.token_ids[0, 0]) >= 8 - 2
        assert lesson.counted.sum() >= 2


def test_samples_are_drawn_by_their_weights():
    one, other = kept_of(8, 2), kept_of(12, 2)
    options = {"rows": 50, "window": 12, "num_positions": 2, "rng": random.Random(0), "device": CPU}
    lesson = draw_lesson([one, other], [0.0, 1.0], TOKENS_ONLY, **options)
    assert lesson.token_ids[:, 11].tolist() == [11] * 50
    lesson = draw_lesson([one, other], [3.0, 1.0], TOKENS_ONLY, **options)
    assert 5 < int((lesson.token_ids[:, 11] == 11).sum()) < 20


@pytest.mark.parametrize(
    ("kept", "reading"),
    [
        (kept_of(3, 3), TOKENS_ONLY),  # no answer
        (kept_of(20, 3), TOKENS_ONLY),  # tokens that the drafter does not have
        (kept_of(10, 3), ATTENDS),  # no states
        (kept_of(10, 3, positions=(1, 2, 3)), Reading(vocab_size=VOCAB_SIZE, state_width=4)),
        (kept_of(10, 8, positions=(1, 2, 3)), ATTENDS),  # states of the prompt alone
        (kept_of(10, 8, positions=(1, 2, 3)), LAST_STATE),
    ],
)
def test_what_teaches_nothing_is_not_drawn(kept, reading):
    options = {"rows": 2, "window": 8, "num_positions": 2, "rng": random.Random(0), "device": CPU}
    assert draw_lesson([kept], [1.0], reading, **options) is None
    assert draw_lesson([], [], reading, **options) is None
