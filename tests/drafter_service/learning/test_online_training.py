"""Each method learns from what was served, without a target; its versions are what a drafter takes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.drafter_service.learning.online_training import StudentTraining
from outrider.drafter_service.learning.reservoir import Reservoir
from outrider.drafter_service.learning.students import StudentMaker
from outrider.drafter_service.service.drafters import build_drafter
from outrider.drafter_service.service.methods import METHODS, Method
from outrider.drafter_service.service.own_weights import OwnWeights
from outrider.drafter_service.training import teacher as teachers
from outrider.verifier_service.formats.checkpoint import WeightError
from outrider.verifier_service.model.runner import ModelRunner, ParallelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from outrider.verifier_service.refit.rank_weights import RankWeights
from tiny.served import samples_for, served_samples, spec_of, write_first
from tiny.training import write_target

CPU = torch.device("cpu")
LEARNING = [name for name, method in METHODS.items() if method.learns]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learning")
    write_target(folder / "target")
    return folder


def spec_for(root, method):
    return spec_of(root / "target", write_first(root, root / "target", method), method)


def study_of(spec):
    return StudentTraining(StudentMaker(spec, CPU), device=CPU, rows=4, window=24)


def filled(spec, count=40):
    reservoir = Reservoir(1 << 24)
    for sample in samples_for(spec, count=count):
        reservoir.add(sample)
    reservoir.check_integrity()
    return reservoir


def trained(training, reservoir, num_steps, rate_scale=5.0):
    training.begin(None)
    kept = reservoir.training()
    return [training.step(kept, rate_scale=rate_scale, is_weighted=False) for _ in range(num_steps)]


@pytest.mark.parametrize("method", LEARNING, ids=str)
def test_it_learns_what_was_served_without_a_target(root, tmp_path, method, monkeypatch):
    spec = spec_for(root, method)
    reservoir = filled(spec)

    def load(*_args, **_options):
        raise AssertionError("a target was loaded")

    monkeypatch.setattr(teachers.Teacher, "__init__", load)
    training = study_of(spec)
    losses = trained(training, reservoir, 60)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    training.save(tmp_path / "v1")
    ours, first = training.judge(tmp_path / "v1", None, reservoir.held_out())
    assert ours.num_roots == first.num_roots > 50
    assert ours.chain_length > first.chain_length + 0.2
    assert not ours.is_worse_than(first)
    assert first.is_worse_than(ours)


@pytest.mark.parametrize("method", LEARNING, ids=str)
def test_a_served_drafter_takes_what_is_written(root, tmp_path, method):
    spec = spec_for(root, method)
    training = study_of(spec)
    trained(training, filled(spec, count=10), 1)
    training.save(tmp_path / "v1")
    training.take(tmp_path / "v1", tmp_path / "taken")
    share = ModelRunner(spec.model, TensorParallelGroup.single()) if spec.loads_model else None
    weights = OwnWeights(spec.speculative, None if share is None else RankWeights(share).change)
    build_drafter(spec, runner=None if share is None else ParallelRunner(share), weights=weights)
    weights.change(tmp_path / "v1")
    weights.change(tmp_path / "taken")
    weights.change(Path(spec.model.path))
    first = {file.name for file in Path(spec.model.path).iterdir()}
    for written in (tmp_path / "v1", tmp_path / "taken"):
        assert {file.name for file in written.iterdir()} == first


def edited(folder, to, edit):
    shutil.copytree(folder, to)
    (file,) = to.glob("*.safetensors")
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, {"format": "pt"})
    return to


def scaled(tensors):
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = tensor * 0.2


def shuffled(tensors):
    for name, tensor in tensors.items():
        if name in ("lm_head.weight", "model.embed_tokens.weight"):
            tensors[name] = tensor.roll(1, dims=0)


@pytest.mark.parametrize("method", [Method.EAGLE3, Method.DRAFT_MODEL], ids=str)
@pytest.mark.parametrize("poison", [scaled, shuffled])
def test_poisoned_weights_are_worse_on_held_out_text(root, tmp_path, method, poison):
    spec = spec_for(root, method)
    reservoir, training = filled(spec), study_of(spec)
    trained(training, reservoir, 30)
    training.save(tmp_path / "good")
    poisoned = edited(tmp_path / "good", tmp_path / "bad", poison)
    bad, good = training.judge(poisoned, tmp_path / "good", reservoir.held_out())
    assert bad.is_worse_than(good)
    assert not good.is_worse_than(good)


def test_a_head_of_another_layers_states_is_worse_on_held_out_text(root, tmp_path):
    spec = spec_for(root, Method.MEDUSA)
    reservoir, training = filled(spec), study_of(spec)
    trained(training, reservoir, 30)
    training.save(tmp_path / "good")
    of_another_layer = Reservoir(1 << 24)
    for sample in served_samples(root / "target", (1,), count=40, asks_alone=True):
        of_another_layer.add(sample)
    trained(training, of_another_layer, 30)
    training.save(tmp_path / "bad")
    bad, good = training.judge(tmp_path / "bad", tmp_path / "good", reservoir.held_out())
    assert bad.is_worse_than(good)


def test_what_does_not_fit_is_refused_by_name(root, tmp_path):
    training = study_of(spec_for(root, Method.EAGLE3))
    with pytest.raises(WeightError, match="there is no folder"):
        training.take(tmp_path / "nowhere", tmp_path / "taken")
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightError, match=r"config\.json"):
        training.take(tmp_path / "empty", tmp_path / "from empty")
    first = write_first(root, root / "target", Method.EAGLE3)
    narrow = edited(first, tmp_path / "narrow", lambda t: t.update({"fc.weight": t["fc.weight"][:, 1:].contiguous()}))
    with pytest.raises(WeightError, match=r"fc\.weight"):
        training.take(narrow, tmp_path / "from narrow")
    none = edited(first, tmp_path / "none", lambda t: t["fc.weight"].fill_(torch.nan))
    with pytest.raises(WeightError, match=r"'fc\.weight' has numbers that are not finite"):
        training.take(none, tmp_path / "from none")


def test_nothing_comes_along_but_what_was_checked(root, tmp_path):
    first = write_first(root, root / "target", Method.EAGLE3)
    training, given = study_of(spec_for(root, Method.EAGLE3)), tmp_path / "given"
    shutil.copytree(first, given)
    (given / "sitecustomize.py").write_text("import os")
    (given / "deeper").mkdir()
    (given / "tokenizer.json").symlink_to("/etc/passwd")
    training.take(given, tmp_path / "taken")
    assert {path.name for path in (tmp_path / "taken").iterdir()} == {path.name for path in first.iterdir()}
    (file,) = given.glob("*.safetensors")
    assert (tmp_path / "taken" / file.name).read_bytes() == file.read_bytes()
    elsewhere = file.rename(tmp_path / "elsewhere")
    file.symlink_to(elsewhere)
    with pytest.raises(ValueError, match=f"{file.name} is a link"):
        training.take(given, tmp_path / "by link")


@pytest.mark.parametrize("name", ["../first/model.safetensors", "/etc/passwd", "deeper/model.safetensors", ""])
def test_an_index_names_files_of_its_own_folder_alone(root, tmp_path, name):
    given = shutil.copytree(write_first(root, root / "target", Method.EAGLE3), tmp_path / "given")
    (given / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": name}}))
    with pytest.raises(WeightError, match=r"model\.safetensors\.index\.json names"):
        study_of(spec_for(root, Method.EAGLE3)).take(given, tmp_path / "taken")


def test_a_draft_model_of_another_shape_is_refused_by_a_tensors_name(root, tmp_path):
    training = study_of(spec_for(root, Method.DRAFT_MODEL))
    with pytest.raises(WeightError, match="the served model's is"):
        training.take(root / "target", tmp_path / "taken")


def test_a_loss_that_is_no_number_is_an_error_before_the_step(root, tmp_path):
    spec = spec_for(root, Method.MEDUSA)
    training, reservoir = study_of(spec), filled(spec, count=10)
    training.begin(None)
    parameter = next(training._begun().student.module.parameters())
    with torch.no_grad():
        parameter.fill_(float("nan"))
    with pytest.raises(ArithmeticError, match="loss is nan"):
        training.step(reservoir.training(), rate_scale=1.0, is_weighted=False)
    with pytest.raises(ArithmeticError, match="a weight is no number"):
        training.save(tmp_path / "v1")
    assert not (tmp_path / "v1").exists()


def test_samples_of_no_use_teach_nothing(root):
    spec = spec_for(root, Method.EAGLE3)
    training = study_of(spec)
    training.begin(None)
    reservoir = Reservoir(1 << 20)
    for sample in samples_for(spec_of(root / "target", None, Method.SUFFIX), count=3):
        reservoir.add(sample)  # without states
    assert training.step(reservoir.training(), rate_scale=1.0, is_weighted=False) is None
