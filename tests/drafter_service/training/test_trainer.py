"""The loss falls, a resumed run ends where an uninterrupted one does, and a checkpoint of another run is refused."""

import math
from dataclasses import replace

import pytest
import torch

from outrider.drafter_service.service.methods import TRAINED
from outrider.drafter_service.training.recipe import Phase, Progress, Recipe
from outrider.drafter_service.training.trainer import Budget, StudentOptimizers, Trainer
from tiny.training import make_corpus, make_tiny_student

RECIPE = Recipe(minutes=math.inf, warm_up_steps=2, phases=(Phase(until=1.0, rows=4, window=16),))


def trainer_of(method, folder, *, num_steps, **changes):
    trainer = Trainer(
        student=make_tiny_student(method),
        stream=make_corpus().training,
        recipe=RECIPE,
        budget=Budget(num_steps=num_steps),
        checkpoint=folder / "work" / "checkpoint.pt",
        settings={"method": method, "window": "16"},
    )
    return replace(trainer, **changes)


def trained(trainer):
    return {name: p.detach().clone() for name, p in trainer.student.module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("method", TRAINED)
def test_the_loss_falls_on_text_that_is_not_learnt_from(method, tmp_path):
    trainer = trainer_of(method, tmp_path, num_steps=20)
    lesson = trainer.student.teacher.lesson(make_corpus().held_out.windows(16, limit=50).token_ids)
    before = trainer.student.loss(lesson).item()
    assert len(list(trainer.train(resume=False))) == 20
    after = trainer.student.loss(lesson).item()
    assert after < 0.97 * before


@pytest.mark.parametrize("method", TRAINED)
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(method, tmp_path):
    whole = trainer_of(method, tmp_path / "whole", num_steps=6)
    losses = [report.loss for report in whole.train(resume=False)]
    state = torch.get_rng_state()

    every_step = replace(RECIPE, checkpoint_every_s=0.0)
    stopped = trainer_of(method, tmp_path / "parts", num_steps=6, recipe=every_step).train(resume=False)
    parts = [next(stopped).loss for _ in range(4)]  # the fourth step is taken, but not yet in the checkpoint
    stopped.close()
    resumed = trainer_of(method, tmp_path / "parts", num_steps=6)
    torch.manual_seed(999)  # another process has another generator state
    rest = list(resumed.train(resume=True))
    assert [report.step for report in rest] == [4, 5, 6]
    assert torch.equal(torch.get_rng_state(), state)
    assert parts[:3] + [report.loss for report in rest] == losses
    for name, weight in trained(whole).items():
        assert torch.equal(weight, trained(resumed)[name]), name


def test_a_finished_run_resumes_to_nothing(tmp_path):
    first = trainer_of("medusa", tmp_path, num_steps=2)
    assert len(list(first.train(resume=False))) == 2
    again = trainer_of("medusa", tmp_path, num_steps=2)
    assert list(again.train(resume=True)) == []
    assert again.progress.step == 2
    for name, weight in trained(first).items():
        assert torch.equal(weight, trained(again)[name])


def test_resuming_nothing_is_a_new_run(tmp_path):
    assert len(list(trainer_of("medusa", tmp_path, num_steps=1).train(resume=True))) == 1


def test_a_stopped_run_is_not_overwritten_unasked(tmp_path):
    list(trainer_of("medusa", tmp_path, num_steps=1).train(resume=False))
    with pytest.raises(ValueError, match=r"checkpoint\.pt: a run stopped here; resume it"):
        next(trainer_of("medusa", tmp_path, num_steps=1).train(resume=False))


@pytest.mark.parametrize("settings", [{"method": "medusa", "window": "8"}, {"method": "medusa"}])
def test_a_checkpoint_of_other_settings_is_refused_by_name(tmp_path, settings):
    list(trainer_of("medusa", tmp_path, num_steps=1).train(resume=False))
    with pytest.raises(ValueError, match=r"^window: .*, which had 16"):
        next(trainer_of("medusa", tmp_path, num_steps=2, settings=settings).train(resume=True))


def test_what_is_frozen_stays_and_what_is_trained_moves(tmp_path):
    trainer = trainer_of("eagle3", tmp_path, num_steps=3)
    before = {name: p.detach().clone() for name, p in trainer.student.module.named_parameters()}
    list(trainer.train(resume=False))
    same = {name for name, p in trainer.student.module.named_parameters() if torch.equal(p, before[name])}
    assert same == {"embed_tokens.weight"}
    state = torch.load(trainer.checkpoint, weights_only=True)
    assert "embed_tokens.weight" not in state["trained"]


def test_output_embeddings_and_norms_are_the_second_optimizers():
    student = make_tiny_student("eagle3")
    muon, adamw = StudentOptimizers(student.module, RECIPE).optimizers
    names = {p: name for name, p in student.module.named_parameters()}
    of_adamw = {names[p] for group in adamw.param_groups for p in group["params"]}
    assert {"lm_head.weight", "norm.weight", "midlayer.hidden_norm.weight"} <= of_adamw
    of_muon = {names[p] for group in muon.param_groups for p in group["params"]}
    assert {"fc.weight", "midlayer.self_attn.q_proj.weight", "midlayer.mlp.down_proj.weight"} <= of_muon
    assert of_muon | of_adamw == set(names.values()) - {"embed_tokens.weight"}
    assert not of_muon & of_adamw


def test_the_tables_of_a_speculator_are_the_second_optimizers_too():
    student = make_tiny_student("mlp-speculator")
    muon, _ = StudentOptimizers(student.module, RECIPE).optimizers
    names = {p: name for name, p in student.module.named_parameters()}
    assert {names[p] for group in muon.param_groups for p in group["params"]} == {"proj.0.weight", "proj.1.weight"}


def test_a_budget_is_used_up_by_steps_or_minutes_whichever_is_first():
    progress = Progress(step=5, elapsed_s=90.0)
    assert Budget(num_steps=10).share_used(progress) == 0.5
    assert Budget(minutes=2).share_used(progress) == 0.75
    assert Budget(num_steps=10, minutes=2).share_used(progress) == 0.75
    assert Budget(num_steps=5, minutes=2).share_used(progress) == 1.0


def test_a_run_of_minutes_ends_by_the_clock(tmp_path):
    trainer = trainer_of("medusa", tmp_path, num_steps=1, budget=Budget(minutes=0.002))
    reports = list(trainer.train(resume=False))
    assert reports[-1].share_used >= 1.0
    assert all(report.share_used < 1.0 for report in reports[:-1])


@pytest.mark.parametrize(
    ("budget", "message"),
    [({}, "steps or minutes"), ({"num_steps": 0}, "must be positive"), ({"minutes": 0.0}, "must be positive")],
)
def test_a_budget_that_is_none_is_refused(budget, message):
    with pytest.raises(ValueError, match=message):
        Budget(**budget)
