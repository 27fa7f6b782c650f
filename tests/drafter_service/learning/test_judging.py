"""Held-out figures by hand."""

import random

import pytest
import torch

from outrider.drafter_service.learning.judging import HeldOut, agreement
from outrider.drafter_service.learning.reservoir import Kept
from outrider.drafter_service.learning.served_lessons import Reading, draw_lesson
from tiny.served import sample

VOCAB_SIZE = 12


def lesson_of(**fields):
    kept = Kept.of(sample(token_ids=range(8), num_prompt_tokens=3, **fields), is_held_out=True)
    reading = Reading(vocab_size=VOCAB_SIZE, state_width=fields.get("state_width", 0))
    return draw_lesson([kept], [1.0], reading, rows=1, window=8, num_positions=2, rng=random.Random(0),
                       device=torch.device("cpu"))  # fmt: skip


def saying(*rows):
    """Logits of which the likeliest tokens are these, per draft position and root."""
    return [torch.nn.functional.one_hot(torch.tensor([row]), VOCAB_SIZE).float() for row in rows]


def test_chains_by_hand():
    # root s drafts tokens s + 2 and s + 3; those before 3 are the prompt's, so roots 1 to 4 count
    right = saying([2, 3, 4, 5, 6, 7], [3, 4, 5, 6, 7, 0])
    assert agreement(right, None, lesson_of()) == (4, 8.0)
    wrong_first = saying([2, 3, 9, 5, 6, 7], [3, 4, 5, 6, 7, 0])
    assert agreement(wrong_first, None, lesson_of()) == (4, 6.0)
    wrong_second = saying([2, 3, 4, 5, 6, 7], [3, 9, 5, 9, 7, 0])
    assert agreement(wrong_second, None, lesson_of()) == (4, 6.0)
    prompt_alone = saying([9, 3, 4, 5, 6, 7], [9, 4, 5, 6, 7, 0])
    assert agreement(prompt_alone, None, lesson_of()) == (4, 8.0)


def test_a_root_without_a_state_is_none():
    lesson = lesson_of(state_positions=(0, 2, 4), state_width=1, states=bytes(6))
    assert agreement(saying([2, 3, 4, 5, 6, 7], [3, 4, 5, 6, 7, 0]), None, lesson) == (2, 4.0)


def test_a_reduced_vocabulary_is_the_targets_ids():
    vocab_ids = torch.arange(VOCAB_SIZE).flip(0)
    rows = saying([9, 8, 7, 6, 5, 4], [8, 7, 6, 5, 4, 0])
    assert agreement(rows, vocab_ids, lesson_of()) == (4, 8.0)


@pytest.mark.parametrize(
    ("chain_length", "loss", "is_worse"),
    [(2.0, 1.0, False), (1.9, 1.04, False), (1.7, 0.5, True), (3.0, 1.1, True), (3.0, float("nan"), True)],
)
def test_worse_is_a_much_shorter_chain_or_a_higher_loss(chain_length, loss, is_worse):
    assert HeldOut(9, chain_length, loss).is_worse_than(HeldOut(9, 2.0, 1.0)) is is_worse
