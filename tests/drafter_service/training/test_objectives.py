"""The three losses by hand on three tokens, over whole laws and laws of a few tokens, and in every kind of student."""

import math
from dataclasses import replace

import pytest
import torch

from outrider.cluster.cli.train import OBJECTIVES
from outrider.drafter_service.service.methods import TRAINED
from outrider.drafter_service.training.laws import DenseLaw, SparseLaw
from outrider.drafter_service.training.objectives import Objective, draft_loss
from outrider.drafter_service.training.recipe import Recipe
from outrider.drafter_service.training.student import num_roots
from outrider.drafter_service.training.trainer import Budget, Trainer
from tiny.training import make_corpus, make_tiny_student, options_for

# one root: row 0 is of the last committed token, rows 1 to 3 are of the three draft positions
TARGET = ((0.2, 0.3, 0.5), (0.5, 0.25, 0.25), (0.1, 0.6, 0.3), (0.3, 0.3, 0.4))
DRAFT = ((0.25, 0.25, 0.5), (0.4, 0.4, 0.2), (0.6, 0.2, 0.2))
SHARED = (0.25 + 0.25 + 0.25, 0.1 + 0.4 + 0.2, 0.3 + 0.2 + 0.2)  # 0.75, 0.7, 0.7


def kl(target, draft):
    return sum(p * math.log(p / q) for p, q in zip(target, draft, strict=True) if p)


KL = tuple(kl(target, draft) for target, draft in zip(TARGET[1:], DRAFT, strict=True))
BY_HAND = {
    Objective.CE: (KL[0] + 0.8 * KL[1] + 0.64 * KL[2]) / 2.44,
    Objective.TV: (0.25 + 0.8 * 0.3 + 0.64 * 0.3) / 2.44,
    Objective.STREAK: (KL[0] + 0.75 * KL[1] + 0.75 * 0.7 * KL[2]) / 3,
}


def dense_law(rows=TARGET, counted=True):
    probs = torch.tensor(rows)[None]
    return DenseLaw.of(probs, torch.tensor(counted).expand(probs.shape[:2]))


def sparse_law(rows=TARGET):
    """Return the same law of named tokens, each row's in another order, and a place without a token."""
    ids = torch.tensor([[2, 0, 1, -1], [1, 2, 0, -1], [0, 1, 2, -1], [1, 0, 2, -1]])[None]
    probs = torch.tensor(rows)[None].gather(-1, ids.clamp_min(0)).masked_fill(ids < 0, 0.0)
    return SparseLaw.of(ids, probs, torch.ones(1, 4, dtype=torch.bool), None)


def logits_of(drafts=DRAFT):
    return [torch.tensor([[draft]]).log().requires_grad_() for draft in drafts]


def slow_streak(rows, law, *, shift=0, is_detached=True):
    """The streak loss, written down again; with a shift a position is weighted by its own acceptance, too."""
    compared = [law.beside(logits, 1 + position) for position, logits in enumerate(rows)]
    accepted = [each.shared_mass().detach() if is_detached else each.shared_mass() for each in compared]
    reached = [math.prod(accepted[: position + shift], start=torch.ones(())) for position in range(len(rows))]
    return sum((weight * each.divergence()).mean() for weight, each in zip(reached, compared, strict=True)) / len(rows)


def test_the_command_knows_every_objective():
    assert tuple(Objective) == OBJECTIVES


@pytest.mark.parametrize("law", [dense_law(), sparse_law()], ids=["dense", "sparse"])
@pytest.mark.parametrize("objective", Objective)
def test_each_loss_is_what_it_is_by_hand(objective, law):
    assert [law.beside(rows, 1 + at).shared_mass().item() for at, rows in enumerate(logits_of())] == pytest.approx(
        SHARED
    )
    assert draft_loss(logits_of(), law, objective).item() == pytest.approx(BY_HAND[objective], abs=1e-6)
    right = [torch.tensor([[row]]).log() for row in TARGET[1:]]
    assert draft_loss(right, law, objective).item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("law", [dense_law(), sparse_law()], ids=["dense", "sparse"])
def test_survival_weighs_and_is_not_learned(law):
    """The gradient of a cross-entropy is draft - target; that of a position is scaled by what reaches it, no more."""
    rows = logits_of()
    gradients = torch.autograd.grad(draft_loss(rows, law, Objective.STREAK), rows)
    for gradient, target, draft, reached in zip(gradients, TARGET[1:], DRAFT, (1.0, 0.75, 0.75 * 0.7), strict=True):
        expected = [reached * (q - p) / 3 for p, q in zip(target, draft, strict=True)]
        assert gradient.flatten().tolist() == pytest.approx(expected, abs=1e-6)


def test_the_gradient_of_total_variation_by_hand():
    """A token below the target's share wins what it gains; one above it wins nothing."""
    (rows,) = logits_of(DRAFT[:1])
    (gradient,) = torch.autograd.grad(draft_loss([rows], dense_law(), Objective.TV), rows)
    won = [0.25, 0.25 / 2, 0.0]  # d(shared mass) / d(log probability); where both are equal, half of it
    expected = [-(own - q * sum(won)) for own, q in zip(won, DRAFT[0], strict=True)]
    assert gradient.flatten().tolist() == pytest.approx(expected, abs=1e-6)


def test_a_streak_that_learns_its_survival_or_weighs_itself_is_another_loss():
    """Planted defects: each differs from what is right by far more than rounding."""
    rows = logits_of()
    ours = draft_loss(rows, dense_law(), Objective.STREAK)
    right = slow_streak(rows, dense_law())
    shifted, learned = slow_streak(rows, dense_law(), shift=1), slow_streak(rows, dense_law(), is_detached=False)
    assert ours.item() == pytest.approx(right.item(), abs=1e-6)
    assert abs(shifted.item() - ours.item()) > 0.01
    assert learned.item() == pytest.approx(ours.item(), abs=1e-6)  # the value alone does not show it
    gradient, same, other = (torch.autograd.grad(loss, rows)[0] for loss in (ours, right, learned))
    assert torch.allclose(gradient, same, atol=1e-6)
    assert (gradient - other).abs().max() > 0.01


def test_of_a_committed_token_alone_survival_is_the_drafts_probability_of_it():
    """SpecDiff-2's own formula: -sum of q_1 .. q_(j-1) * log q_j, of the tokens that the verifier said."""
    said = torch.tensor([[[0], [0], [1], [2]]])
    law = SparseLaw.of(said, torch.ones(1, 4, 1), torch.ones(1, 4, dtype=torch.bool), None)
    loss = draft_loss(logits_of(), law, Objective.STREAK).item()
    first, second, third = DRAFT[0][0], DRAFT[1][1], DRAFT[2][2]
    assert loss == pytest.approx(-(math.log(first) + first * math.log(second) + first * second * math.log(third)) / 3)


def test_no_draft_gets_past_a_row_that_does_not_count():
    law = dense_law(counted=[[True, True, False, True]])
    rows = logits_of()
    assert draft_loss(rows, law, Objective.STREAK).item() == pytest.approx(KL[0] / 3, abs=1e-6)
    assert draft_loss(rows, law, Objective.CE).item() == pytest.approx((KL[0] + 0.64 * KL[2]) / 2.44, abs=1e-6)


def test_a_root_that_goes_deeper_has_its_own_survival():
    """Two roots; the second alone has a second position."""
    law = dense_law((TARGET[0], TARGET[2], TARGET[1], TARGET[2]))
    first = torch.tensor([[DRAFT[1], DRAFT[0]]]).log()  # of both roots: shared masses 0.7 and 0.75
    second = torch.tensor([[DRAFT[1]]]).log()
    loss = draft_loss([first, second], law, Objective.STREAK, deep=torch.tensor([1]))
    assert loss.item() == pytest.approx(((KL[0] + KL[1]) / 2 + 0.75 * KL[1]) / 2, abs=1e-6)


@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize("method", [method for method in TRAINED if method != "draft-model"])
def test_every_student_of_several_positions_lowers_what_it_is_told_to(method, objective):
    student = make_tiny_student(method)
    lesson = student.teacher.lesson(make_corpus().training.batch(0, rows=2, window=12, seed=0).token_ids)
    torch.manual_seed(4)
    loss = student.loss(lesson, objective)
    rows = student.position_logits(lesson)
    torch.manual_seed(4)
    count = num_roots(lesson, student.num_positions)
    if method == "tidar":  # its own next token is the first of its positions
        rows = student._guess(lesson, range(num_roots(lesson, student.num_positions + 1)))
    deep = torch.randperm(count)[: count // 4].sort().values if method in ("eagle", "eagle3", "mtp") else None
    if deep is not None:
        rows = [rows[0], *(part[:, deep] for part in rows[1:])]
    expected = draft_loss(rows, lesson.law(student.vocab_ids), objective, deep=deep)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    loss.backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in student.module.parameters())


def test_a_draft_model_learns_rows_and_its_total_variation(tmp_path):
    student = make_tiny_student("draft-model")
    lesson = student.teacher.lesson(make_corpus().training.batch(0, rows=2, window=12, seed=0).token_ids)
    logits = student.position_logits(lesson)[0][:, :, : student.teacher.vocab_size]
    shared = torch.minimum(logits.softmax(-1), lesson.logits()[:, 1 : 1 + logits.shape[1]].softmax(-1)).sum(-1)
    ours = lesson.law(None).beside(logits, 1).shared_mass()
    assert torch.allclose(ours, shared, atol=1e-6)
    assert 0 < student.loss(lesson, Objective.TV).item() < 1
    for options in (options_for("draft-model", tmp_path), replace(options_for("medusa", tmp_path), num_positions=1)):
        with pytest.raises(ValueError, match=rf"^objective: streak .* this {options.method} learns one position"):
            replace(options, objective=Objective.STREAK)


@pytest.mark.parametrize("objective", Objective)
def test_a_run_lowers_the_objective_it_was_given(objective, tmp_path):
    trainer = Trainer(
        student=make_tiny_student("medusa"),
        stream=make_corpus().training,
        recipe=replace(Recipe(minutes=math.inf), warm_up_steps=2),
        budget=Budget(num_steps=1),
        checkpoint=tmp_path / "checkpoint.pt",
        settings={},
        objective=objective,
    )
    phase = trainer.recipe.phase(0.0)
    windows = trainer.stream.batch(0, rows=phase.rows, window=phase.window, seed=0)
    expected = trainer.student.loss(trainer.student.teacher.lesson(windows.token_ids), objective).item()
    (report,) = trainer.train(resume=False)
    assert report.loss == pytest.approx(expected, rel=0.02)  # a run may multiply in bfloat16
