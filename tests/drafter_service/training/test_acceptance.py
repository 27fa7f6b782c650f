"""The figures of hand-made rows, worked out by hand."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from outrider.drafter_service.training.acceptance import measure_acceptance
from outrider.drafter_service.training.corpus_windows import Windows
from outrider.drafter_service.training.teacher import TaughtLesson

# after token i the target says: token i + 1 of 4 surely, but for the last row, which is even between 0 and 1
TARGET = torch.tensor([[0.0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0], [0.5, 0.5, 0, 0]])


@dataclass
class FixedTeacher:
    """Answers every window with `TARGET`."""

    def lesson(self, token_ids: Tensor, counted: Tensor) -> TaughtLesson:
        rows = len(token_ids)
        return TaughtLesson(
            token_ids=token_ids,
            final=TARGET.log().expand(rows, -1, -1),
            likeliest=TARGET.argmax(-1).expand(rows, -1),
            states=torch.zeros(rows, len(TARGET), 0),
            counted=torch.cat([counted[:, 1:], counted[:, -1:]], dim=1),
        )


def student_of(*positions, vocab_ids=None):
    logits = [torch.tensor(rows).log()[None] for rows in positions]
    return SimpleNamespace(
        teacher=FixedTeacher(), position_logits=lambda lesson: logits, vocab_ids=vocab_ids, num_positions=len(logits)
    )


def windows_of(*counted):
    return [Windows(torch.zeros(1, 5, dtype=torch.long), torch.tensor([counted]))]


WINDOWS = windows_of(True, True, True, True, True)


def test_agreement_chains_and_shared_mass_by_hand():
    figures = measure_acceptance(
        student_of(
            # roots 0, 1, 2 against the target's rows 1, 2, 3, then 2, 3, 4
            [[0.0, 0, 0.75, 0.25], [0, 0, 0, 1], [0.4, 0.6, 0, 0]],
            [[0.0, 0, 0.5, 0.5], [1, 0, 0, 0], [0.8, 0.2, 0, 0]],
        ),
        WINDOWS,
    )
    first, second = figures.positions
    assert figures.num_roots == 3
    assert (first.greedy, first.chain) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert first.rejection == pytest.approx((0.75 + 1 + 0.4) / 3)
    # root 0: equal halves, the likeliest is the first of them, 2: wrong; root 2: right, but not its position 0
    assert (second.greedy, second.chain) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert second.rejection == pytest.approx((0.5 + 1 + 0.7) / 3)
    assert figures.greedy_length == pytest.approx(1 + 2 / 3 + 1 / 3)
    assert figures.rejection_length == pytest.approx(1 + (0.75 + 1 + 0.4) / 3 + (0.75 * 0.5 + 1 + 0.4 * 0.7) / 3)


def test_a_reduced_vocabulary_is_read_in_the_targets_ids():
    # draft ids 0, 1 are the target's 3, 0
    rows = [[0.0, 1], [1, 0], [0.1, 0.9]]
    figures = measure_acceptance(student_of(rows, vocab_ids=torch.tensor([3, 0])), WINDOWS)
    (only,) = figures.positions
    assert only.greedy == pytest.approx(2 / 3)  # the target says 2, 3, 0; the draft 0, 3, 0
    assert only.rejection == pytest.approx((0 + 1 + 0.9) / 3)


def test_a_padded_vocabulary_is_cut_to_the_targets():
    rows = [[0.0, 0, 0.5, 0, 0.5], [0, 0, 0, 0.5, 0.5], [0.5, 0, 0, 0, 0.5]]
    (only,) = measure_acceptance(student_of(rows), WINDOWS).positions
    assert (only.greedy, only.rejection) == (1.0, pytest.approx(1.0))


def test_the_figures_of_several_batches_are_pooled_over_roots():
    student = student_of([[0.0, 0, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0]])
    assert measure_acceptance(student, WINDOWS * 2).num_roots == 6
    assert measure_acceptance(student, WINDOWS * 2).positions == measure_acceptance(student, WINDOWS).positions


def test_roots_whose_drafts_reach_into_a_prompt_do_not_count():
    student = student_of(
        [[0.0, 0, 1, 0], [0, 0, 0, 1], [0, 1, 0, 0]],  # right, right, wrong against rows 1, 2, 3
        [[0.0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 0]],
    )
    # root 0 drafts tokens 2 and 3, root 1 tokens 3 and 4, root 2 tokens 4 and 5
    figures = measure_acceptance(student, windows_of(False, False, False, True, True))
    assert figures.num_roots == 2
    assert figures.positions[0].greedy == pytest.approx(1 / 2)
    with pytest.raises(ValueError, match="--held-out: no answer"):
        measure_acceptance(student, windows_of(True, True, True, False, False))
