"""From options to a folder that the loaders read, with figures beside it; wrong options are named."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.drafter_service.heads.dflash import DFlashHead
from outrider.drafter_service.heads.eagle import EagleHead
from outrider.drafter_service.heads.eagle3 import Eagle3Head
from outrider.drafter_service.heads.medusa import MedusaHeads
from outrider.drafter_service.heads.mlp_speculator import MlpSpeculator
from outrider.drafter_service.heads.mtp import MtpHead
from outrider.drafter_service.models.parallel_drafter import parse_mask_token_id
from outrider.drafter_service.service.methods import TRAINED
from outrider.drafter_service.target.tidar_drafter import parse_blocks
from outrider.drafter_service.training.dflash import DFlashShape
from outrider.drafter_service.training.distil import (
    CHECKPOINT_NAME,
    EVAL_NEW_TOKENS,
    distil,
    pick_device,
    recipe_for,
)
from outrider.drafter_service.training.draft_model import DraftModelStudent, DraftShape
from outrider.drafter_service.training.eagle3 import Eagle3Shape
from outrider.drafter_service.training.medusa import MedusaShape
from outrider.drafter_service.training.mlp_speculator import MlpShape
from outrider.drafter_service.training.objectives import Objective
from outrider.drafter_service.training.recipe import Recipe
from outrider.drafter_service.training.served import Rounds
from outrider.drafter_service.training.trainer import Budget, trained_s
from outrider.verifier_service.formats.checkpoint import Checkpoint
from outrider.verifier_service.scheduling.masks import MaskBlocks
from tiny.training import DRAFT_VOCAB_SIZE, VOCAB_SIZE, make_teacher, options_for, write_target, write_text


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    write_target(folder / "target")
    write_text(folder / "text")
    return folder


def run(options, place):
    reports: list = []
    options = replace(options, target=place / "target", text=(place / "text",))
    return distil(options, reports.append), reports


def load_draft_model(place, folder):
    assert AutoTokenizer.from_pretrained(folder).eos_token_id is not None
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.config.vocab_size, model.config.hidden_size) == (VOCAB_SIZE, 32)


def load_medusa(place, folder):
    heads = MedusaHeads.from_folder(folder)
    assert (heads.num_heads, heads.num_layers, heads.vocab_size) == (3, 1, VOCAB_SIZE)
    config = json.loads((folder / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 1)


def load_eagle3(place, folder):
    with Checkpoint(folder) as own:
        assert {"fc.weight", "midlayer.self_attn.q_proj.weight", "d2t", "t2d"} <= set(own.names)
        assert "embed_tokens.weight" not in own
        assert int(own.read("t2d").sum()) == DRAFT_VOCAB_SIZE
    with Checkpoint(place / "target") as target:
        head = Eagle3Head.from_folder(folder, target=target)
    assert head.taps == (1, 2, 3)


def load_mlp_speculator(place, folder):
    speculator = MlpSpeculator.from_folder(folder)
    assert (speculator.n_predict, speculator.tie_weights, speculator.inner_dim) == (3, True, 64)


def load_eagle(place, folder):
    with Checkpoint(folder) as own, Checkpoint(place / "target") as target:
        assert not {"embed_tokens.weight", "lm_head.weight"} & set(own.names)
        EagleHead.from_folder(folder, target=target)


def load_mtp(place, folder):
    with Checkpoint(folder) as own, Checkpoint(place / "target") as target:
        assert {"mtp_layers.0.input_proj.weight", "mtp_layers.0.self_attn.q_proj.weight"} <= set(own.names)
        MtpHead.from_folder(folder, target=target)


def load_parallel_draft(place, folder):
    config = json.loads((folder / "config.json").read_text())
    assert parse_mask_token_id(config, config["vocab_size"]) == VOCAB_SIZE
    assert AutoTokenizer.from_pretrained(folder).eos_token_id is not None
    AutoModelForCausalLM.from_pretrained(folder)


def load_dflash(place, folder):
    with Checkpoint(place / "target") as target:
        head = DFlashHead.from_folder(folder, target=target, num_target_layers=4)
    assert (head.taps, head.config.block_size, len(head.layers)) == ((1, 2, 3), 4, 1)


def load_tidar(place, folder):
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == VOCAB_SIZE, "the mask is a token that is there already"
    blocks = parse_blocks(config, parse_mask_token_id(config, VOCAB_SIZE), length=3, num_blocks=0)
    assert blocks == MaskBlocks(token_id=config["mask_token_id"], length=3)
    assert AutoTokenizer.from_pretrained(folder).eos_token_id is not None
    AutoModelForCausalLM.from_pretrained(folder)


LOADERS = {
    "draft-model": load_draft_model,
    "medusa": load_medusa,
    "mlp-speculator": load_mlp_speculator,
    "eagle": load_eagle,
    "eagle3": load_eagle3,
    "mtp": load_mtp,
    "parallel-draft": load_parallel_draft,
    "dflash": load_dflash,
    "tidar": load_tidar,
}


def test_every_method_is_loaded_below():
    assert LOADERS.keys() == TRAINED.keys()


@pytest.mark.parametrize(("method", "load"), LOADERS.items())
def test_a_run_writes_what_the_loaders_read_and_its_figures(method, load, place, tmp_path):
    distilled, reports = run(options_for(method, tmp_path / "drafter", num_steps=3), place)
    load(place, tmp_path / "drafter")
    figures = json.loads((tmp_path / "drafter" / "acceptance.json").read_text())
    assert figures["method"] == method
    assert figures["num_steps"] == distilled.num_steps == 3
    assert figures["num_tokens"] == 3 * 4 * 16
    assert len(figures["held_out"]["positions"]) == 3
    assert 0 < figures["held_out"]["positions"][0]["rejection"] < 1
    assert [report.step for report in reports] == [1, 2, 3]
    assert figures["served"]["num_committed"] == 2 * EVAL_NEW_TOKENS
    assert 1 <= figures["served"]["mean_acceptance_length"] <= 4
    assert (tmp_path / "drafter.training" / "checkpoint.pt").exists()
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "drafter").iterdir()} == {0o644}


def test_without_prompts_what_training_ends_with_is_kept_unserved(place, tmp_path):
    options = replace(options_for("eagle3", tmp_path / "head", num_steps=2), eval_prompts=0)
    distilled, _ = run(options, place)
    assert distilled.served is None
    assert json.loads((tmp_path / "head" / "acceptance.json").read_text())["served"] is None
    load_eagle3(place, tmp_path / "head")
    assert trained_s(tmp_path / "head.training" / CHECKPOINT_NAME) == pytest.approx(distilled.elapsed_s)
    assert trained_s(tmp_path / "no such") == 0.0


def test_training_ends_when_less_is_served_and_the_best_is_kept(place, tmp_path, monkeypatch):
    figures = iter([2.0, 2.5, 2.4, 2.3, 2.2])
    monkeypatch.setattr(
        "outrider.drafter_service.training.distil.play_greedily",
        lambda *_, **__: Rounds(num_rounds=10, num_committed=round(10 * next(figures))),
    )
    options = replace(options_for("medusa", tmp_path / "drafter", num_steps=50), judge_every_s=0.0)
    kept = []
    copytree = shutil.copytree
    monkeypatch.setattr(shutil, "copytree", lambda *args, **options: kept.append(args) or copytree(*args, **options))
    distilled, reports = run(options, place)
    assert [report.served for report in reports] == [None, 2.0, 2.5, 2.4]
    assert distilled.served.mean_acceptance_length == 2.5
    assert distilled.num_steps == 4
    assert len(kept) == 2, "the third and later ones were worse"


def test_a_resumed_run_adds_steps_and_other_text_is_refused(place, tmp_path):
    options = options_for("medusa", tmp_path / "drafter", num_steps=2)
    run(options, place)
    more = replace(options, resume=True, budget=Budget(num_steps=5))
    assert [report.step for report in run(more, place)[1]] == [3, 4, 5]
    (tmp_path / "other.txt").write_text("something else " * 40)
    with pytest.raises(ValueError, match=r"^text: .* does not go on with the run in"):
        distil(replace(more, target=place / "target", text=(tmp_path / "other.txt",)), lambda report: None)
    with pytest.raises(ValueError, match=r"^shape: MedusaShape\(num_layers=2"):
        run(replace(more, medusa=MedusaShape(num_layers=2)), place)
    with pytest.raises(ValueError, match=r"^objective: tv does not go on with the run in .*, which had ce"):
        run(replace(more, objective=Objective.TV), place)


@pytest.mark.parametrize(
    ("method", "shape"),
    [
        ("mlp-speculator", {"mlp": MlpShape(inner_dim=32)}),
        ("parallel-draft", {"draft": DraftShape(hidden_size=64)}),
        ("dflash", {"dflash": DFlashShape(num_layers=2)}),
    ],
)
def test_a_run_does_not_go_on_with_another_shape(method, shape, place, tmp_path):
    options = options_for(method, tmp_path / "drafter", num_steps=1)
    run(options, place)
    with pytest.raises(ValueError, match=r"^shape: "):
        run(replace(options, resume=True, **shape), place)


def test_a_draft_model_can_go_on_from_another(place, tmp_path):
    run(options_for("draft-model", tmp_path / "first", num_steps=1), place)
    again = replace(options_for("draft-model", tmp_path / "second", num_steps=1), init_from=tmp_path / "first")
    run(replace(again, draft=DraftShape(hidden_size=64)), place)  # the model's own shape counts
    load_draft_model(place, tmp_path / "second")


def test_a_head_can_be_gone_on_with(place, tmp_path):
    run(options_for("eagle3", tmp_path / "first", num_steps=2), place)
    again = replace(options_for("eagle3", tmp_path / "second", num_steps=1), init_from=tmp_path / "first")
    # the head's own vocabulary counts, and its weights are where the run begins
    run(replace(again, eagle3=Eagle3Shape(draft_vocab_size=9), matrix_lr=0.0), place)
    load_eagle3(place, tmp_path / "second")
    with Checkpoint(tmp_path / "first") as first, Checkpoint(tmp_path / "second") as second:
        assert first.names == second.names
        name = "midlayer.mlp.up_proj.weight"
        assert torch.equal(first.read(name), second.read(name))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "eagle9"}, "method must be one of draft-model, tidar, medusa, mlp-speculator, eagle, eagle3"),
        ({"window": 4}, "window: 4 tokens leave no root for drafts of 3"),
        ({"rows": 0}, "rows, num_positions and eval_windows must be positive, eval_prompts 0 or more"),
        ({"eval_prompts": -1}, "eval_prompts 0 or more"),
        ({"device": "tpu"}, "device must be auto, cpu or cuda"),
    ],
)
def test_wrong_options_are_named(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        replace(options_for("medusa", tmp_path), **changes)


def test_a_target_that_is_not_there_is_an_error_that_names_it(tmp_path):
    with pytest.raises((OSError, ValueError), match="target"):
        distil(options_for("medusa", tmp_path / "drafter"), lambda report: None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused():
    assert pick_device("auto") == pick_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="no CUDA device"):
        pick_device("cuda")


def test_a_draft_model_needs_the_targets_vocabulary():
    teacher = make_teacher()
    small = AutoModelForCausalLM.from_config(DraftShape(hidden_size=32).config_for(teacher))
    small.config.vocab_size = VOCAB_SIZE - 1
    with pytest.raises(ValueError, match=f"draft model: {VOCAB_SIZE - 1} tokens, the target has {VOCAB_SIZE}"):
        DraftModelStudent(small, teacher, None)


@pytest.mark.parametrize(("hidden_size", "head_dim"), [(8, 2), (32, 8), (128, 32), (512, 64)])
def test_a_new_draft_model_is_shaped_after_its_target(hidden_size, head_dim):
    config = DraftShape(hidden_size=hidden_size).config_for(make_teacher())
    assert (config.head_dim, config.num_hidden_layers) == (head_dim, 2)
    assert config.max_position_embeddings == 256
    assert config.num_attention_heads * head_dim == hidden_size
    with pytest.raises(ValueError, match="hidden_size must be a multiple of 8"):
        DraftShape(hidden_size=hidden_size + 1).config_for(make_teacher())


def test_wide_targets_get_a_smaller_rate_for_their_embeddings(tmp_path):
    recipe = recipe_for(options_for("medusa", tmp_path), make_teacher())
    assert recipe.vector_lr == Recipe(minutes=1).vector_lr
    assert math.isinf(recipe.minutes)
    teacher = make_teacher()
    teacher.model.config.hidden_size = 1024
    assert recipe_for(options_for("medusa", tmp_path), teacher).vector_lr == pytest.approx(1e-3)


def test_a_model_that_is_gone_on_with_is_trained_more_gently(tmp_path):
    options = options_for("draft-model", tmp_path)
    new, old = (recipe_for(each, make_teacher()) for each in (options, replace(options, init_from=tmp_path)))
    assert old.matrix_lr == pytest.approx(new.matrix_lr / 10)
    assert old.vector_lr == pytest.approx(new.vector_lr / 10)
    half = recipe_for(replace(options, init_from=tmp_path, rate_scale=0.5), make_teacher())
    assert half.matrix_lr == pytest.approx(new.matrix_lr / 2)
    with pytest.raises(ValueError, match="rate_scale must be positive"):
        replace(options, rate_scale=0.0)


def test_rates_fall_from_the_first_step_on(tmp_path):
    recipe = recipe_for(options_for("eagle3", tmp_path), make_teacher())
    after_warm_up = recipe.warm_up_steps
    assert recipe.lr_scale(after_warm_up, 0.25) == pytest.approx(0.75)
    assert recipe.lr_scale(after_warm_up, 0.75) == pytest.approx(0.25)
