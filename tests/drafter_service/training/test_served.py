"""Rounds played over the target's own text: a perfect drafter, a hopeless one, and one that is right now and then."""

import pytest
import torch

from outrider.drafter_service.training.served import continue_greedily, play_greedily
from outrider.verifier_service.messages.draft import FINAL_TAP, DraftNeeds
from tiny.training import make_teacher

PROMPTS = [[5, 6, 7], [9, 8]]


class ScriptedDrafter:
    """Drafts by the target itself, of which the first `num_right` tokens are left as they are."""

    def __init__(self, teacher, num_right, needs):
        self.teacher, self.num_right, self.needs = teacher, num_right, needs
        self.asks, self.released, self.is_slow = [], [], False

    def draft(self, asks, *, max_num_tokens):
        (ask,) = asks
        self.is_slow = not self.is_slow
        if self.is_slow:  # a drafter may take several calls
            return []
        self.asks.append(ask)
        tokens = list(ask.token_ids)
        for index in range(ask.length):
            likeliest = int(self.teacher.lesson(torch.tensor([tokens])).logits()[0, -1].argmax())
            tokens.append(likeliest if index < self.num_right else (likeliest + 1) % 300)
        return [ask.answer(tuple(tokens[len(ask.token_ids) :]))]

    def release(self, key):
        self.released.append(key)


@pytest.mark.parametrize(("num_right", "num_rounds"), [(0, 24), (1, 12), (3, 6)])
def test_a_round_commits_what_is_right_and_one_more(num_right, num_rounds):
    teacher = make_teacher()
    drafter = ScriptedDrafter(teacher, num_right, DraftNeeds())
    continuations = continue_greedily(teacher, PROMPTS, num_new_tokens=12)
    assert [(len(each.token_ids), each.num_prompt_tokens) for each in continuations] == [(15, 3), (14, 2)]
    rounds = play_greedily(teacher, drafter, continuations, draft_length=3)
    assert (rounds.num_rounds, rounds.num_committed) == (num_rounds, 24)
    assert rounds.mean_acceptance_length == num_right + 1
    assert [ask.states for ask in drafter.asks] == [None] * num_rounds
    assert len(set(drafter.released)) == 2


@pytest.mark.parametrize("last_state_only", [True, False])
def test_the_drafter_is_given_the_states_that_a_verifier_has(last_state_only):
    teacher = make_teacher()
    needs = DraftNeeds(taps=(1, FINAL_TAP), last_state_only=last_state_only)
    drafter = ScriptedDrafter(teacher, 3, needs)
    continuations = continue_greedily(teacher, PROMPTS[:1], num_new_tokens=8)
    play_greedily(teacher, drafter, continuations, draft_length=3)
    for ask in drafter.asks:
        expected = teacher.tapping(needs.taps).lesson(torch.tensor([list(ask.token_ids)])).states[0, :-1]
        assert torch.allclose(ask.states, expected[-1:] if last_state_only else expected, atol=1e-5)
