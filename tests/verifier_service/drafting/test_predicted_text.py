from __future__ import annotations

import random

from outrider.verifier_service.drafting.predicted_text import PredictedText

TEXT = tuple(range(10, 40))


def test_an_answer_that_keeps_to_it_is_drafted_all_along():
    predicted = PredictedText(TEXT)
    for num_said in range(len(TEXT) + 1):
        assert predicted.guess(TEXT[:num_said], 4) == TEXT[num_said : num_said + 4]


def test_an_edit_costs_a_few_tokens():
    answer = (*TEXT[:5], 99, *TEXT[6:])
    predicted = PredictedText(TEXT)
    right = [predicted.guess(answer[:at], 1) == answer[at : at + 1] for at in range(len(answer))]
    assert [at for at, is_right in enumerate(right) if not is_right] == [5, 6, 7, 8]


def test_text_that_was_taken_out_or_put_in_is_got_over():
    for answer in ((*TEXT[:5], *TEXT[15:]), (*TEXT[:5], 97, 98, 99, *TEXT[5:])):
        predicted = PredictedText(TEXT)
        right = [predicted.guess(answer[:at], 1) == answer[at : at + 1] for at in range(len(answer))]
        assert all(right[-10:])


def test_what_comes_twice_is_taken_for_the_next_place():
    text = (1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 6)
    predicted = PredictedText(text)
    assert predicted.guess((1, 2, 3, 9), 1) == ()
    assert predicted.guess((1, 2, 3, 9, 1, 2, 3), 1) == (5,)
    assert predicted.guess((1, 2, 3, 9, 1, 2, 3, 7, 1, 2, 3), 1) == (6,)


def test_several_tokens_at_once_are_the_same_as_one_by_one():
    rng = random.Random(1)
    for _ in range(50):
        text = [rng.randrange(4) for _ in range(40)]
        answer = [token if rng.random() < 0.8 else rng.randrange(4) for token in text]
        slow, fast, at = PredictedText(text), PredictedText(text), 0
        while at < len(answer):
            at += rng.randrange(1, 6)
            guesses = [slow.guess(answer[:end], 3) for end in range(at - 5 if at > 5 else 0, at + 1)]
            assert fast.guess(answer[:at], 3) == guesses[-1]


def test_a_prompt_is_no_part_of_the_answer_and_only_what_is_new_is_looked_at():
    class Read(list):
        def __getitem__(self, index):
            positions.update(range(*index.indices(len(self))) if isinstance(index, slice) else [index])
            return super().__getitem__(index)

    prompt, answer = TEXT[:9], (*TEXT[:5], 99, *TEXT[6:])
    alone, predicted, positions = PredictedText(TEXT), PredictedText(TEXT, len(prompt)), set()
    for at in range(len(answer) + 1):
        positions.clear()
        assert predicted.guess(Read([*prompt, *answer[:at]]), 4) == alone.guess(answer[:at], 4)
        assert positions <= set(range(max(len(prompt), len(prompt) + at - 3), len(prompt) + at))


def test_the_longer_it_was_right_the_likelier_it_is():
    predicted = PredictedText(TEXT)
    predicted.guess((), 1)
    assert predicted.chance == 1 / 2
    predicted.guess(TEXT[:8], 1)
    assert predicted.chance == 9 / 10
    predicted.guess((*TEXT[:8], 99), 1)
    assert predicted.chance == 1 / 2


def test_an_empty_prediction_says_nothing():
    assert PredictedText(()).guess((1, 2), 3) == ()
    assert PredictedText((1,)).guess((), 3) == (1,)
