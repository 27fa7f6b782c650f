"""A pool's learner: off unless asked for, read from YAML, command line and pools, refused where nothing can learn."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from outrider.cluster.config.drafters_config import DraftersConfig
from outrider.cluster.config.learner_options import LearnerOptions
from outrider.cluster.config.machine import fit_drafting
from outrider.cluster.config.placement import LEARNER_CPUS, SHELL_CPUS
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.replicas.app import build
from outrider.drafter_service.learning.messages import LearnerSettings
from outrider.drafter_service.service.speculative_config import Location
from outrider.verifier_service.cache import CACHE_VARIABLE

LOOKUP = {"name": "look", "method": "suffix"}


@pytest.mark.parametrize("options", [{}, {"learner": None}, {"learner": "null"}])
def test_nothing_learns_unless_asked_for(options: dict[str, Any]):
    config = ServiceConfig(**options)
    assert (config.learning, config.drafters[0].learner) == ({}, None)
    assert config.drafter_spec.learn_num_top == 0


@pytest.mark.parametrize("given", [{}, "{}"])
def test_an_empty_object_is_a_learner_with_all_defaults(given: Any):
    (pool,) = ServiceConfig(learner=given).learning.values()
    assert pool.learner == LearnerOptions()
    assert pool.learner.settings == LearnerSettings()


def test_options_reach_the_learner_and_its_drafters(tmp_path: Path):
    given = {"folder": str(tmp_path), "num_steps": 7, "max_bytes": 99, "num_threads": 2, "device": "cpu", "num_top": 4}
    config = ServiceConfig(learner=json.dumps(given), seed=5)
    spec = config.learner_spec_of(config.pools["default"])
    assert (spec.pool, spec.folder, spec.max_bytes) == ("default", str(tmp_path), 99)
    assert (spec.num_threads, spec.device, spec.seed) == (2, "cpu", 5)
    assert spec.settings == LearnerSettings(num_steps=7)
    assert spec.drafter == config.drafter_spec
    assert spec.drafter.learn_num_top == 4
    assert (spec.export_root, spec.weights_root) == (str(tmp_path / "exports"), None)


def test_folders_of_others_lie_below_roots(tmp_path: Path):
    given = {"folder": str(tmp_path), "export_root": "~/exports"}
    config = ServiceConfig(learner=given, weights_root="/weights", rollouts=True)
    spec = config.learner_spec_of(config.pools["default"])
    assert (spec.export_root, spec.weights_root) == (str(Path("~/exports").expanduser()), "/weights")
    assert config.control_rules.weights_root == "/weights"


def test_each_pool_has_a_learner_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    config = ServiceConfig(learner={}, drafter_pools=[{**LOOKUP, "learner": {"sample_share": 0.5}}])
    assert list(config.learning) == ["default", "look"]
    assert config.learning["look"].learner.settings.sample_share == 0.5
    folders = [config.learner_folder(pool) for pool in config.learning.values()]
    assert folders == [str(tmp_path / "learner" / "outrider-embedded" / name) for name in config.learning]
    only_look = ServiceConfig(drafter_pools=[{**LOOKUP, "learner": {}}])
    assert list(only_look.learning) == ["look"], "a further pool's is not the first one's"


def test_a_targets_name_is_one_folder_and_no_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    for target in ("org/some model", "../../etc", "/data/model"):
        folder = Path(LearnerOptions().folder_for(target, "default"))
        assert folder.parent.parent == tmp_path / "learner"
        assert folder.resolve() == folder


def test_other_engines_pools_learn_too(tmp_path: Path):
    config = DraftersConfig(model="m", draft_model="d", learner={"folder": str(tmp_path)})
    assert list(config.learning) == ["default"]
    assert config.num_shells == 1 + 1 + 1, "drafter, learner, directory"
    assert config.num_ranks == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"learner": {"fodler": "x"}}, "learner: unknown option 'fodler'; did you mean 'folder'?"),
        ({"learner": {"num_steps": 0}}, "learner: num_steps must be at least 1"),
        ({"learner": {"sample_share": 1.5}}, "learner: sample_share must be at most 1"),
        ({"learner": {"rate_scale": 0}}, "learner: rate_scale must be positive"),
        ({"learner": {"device": "tpu"}}, "learner: device must be"),
        ({"learner": {"device": "cuda"}}, "learner: num_gpus must be positive with the device cuda"),
        ({"learner": "["}, "learner: Invalid JSON"),
        ({"learner": 5}, "learner: Input should be a valid dictionary"),
        ({"learner": {}, "num_drafters": 0}, "learner: there is no drafter to learn"),
        ({"learner": {}, "model": "some/model"}, "learner: suffix runs in the verifier: only a pool has a learner"),
        (
            {"learner": {}, "speculative_config": {"method": "early_exit", "location": "verifier"}},
            "learner: early_exit runs in the verifier: only a pool has a learner",
        ),
        (
            {"learner": {}, "draft_model": "d", "speculative_config": {"method": "parallel_draft"}},
            "learner: parallel_draft",
        ),
        ({"drafter_pools": [{**LOOKUP, "learner": {"nmu_steps": 1}}]}, "drafter_pools: look: learner: unknown option"),
        ({"drafter_pools": [{**LOOKUP, "learner": 5}]}, "drafter_pools: look: learner must be an object of options"),
        (
            {"learner": {"folder": "/l"}, "drafter_pools": [{**LOOKUP, "learner": {"folder": "/l"}}]},
            "learner: folder: two pools cannot share one",
        ),
        (
            {"learner": {}, "host": "0.0.0.0"},
            "learner: whoever reaches host 0.0.0.0 could change the weights; add --admin",
        ),
        (
            {"learner": {}, "host": "0.0.0.0", "api_key_hashes": ["0" * 64]},
            "learner: whoever reaches host 0.0.0.0 could",
        ),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=re.escape(said)):
        ServiceConfig(**options)


def test_an_admins_key_closes_the_doors():
    assert ServiceConfig(learner={}, host="0.0.0.0", api_key_hashes=[f"{'0' * 64}:admin"]).learning


def test_a_learner_keeps_its_drafters_out_of_the_verifier_on_a_small_machine(tmp_path: Path):
    small = {"num_cores": 2, "devices": tmp_path}
    asked = {"model": "smollm2", "device": "cpu"}
    assert fit_drafting(ServiceConfig(**asked), **small).drafters[0].speculative.location is Location.VERIFIER
    learning = fit_drafting(ServiceConfig(**asked, learner={}), **small)
    assert list(learning.learning) == ["default"]


def test_a_learner_reserves_next_to_nothing_or_the_devices_that_it_is_given():
    config = ServiceConfig(learner={}, drafter_labels={"pool": "drafter"})
    placement = config.learner_placement(config.pools["default"])
    assert placement.serve_options["placement_group_bundles"] == [{"CPU": SHELL_CPUS}, {"CPU": LEARNER_CPUS}]
    assert placement.labels == {"pool": "drafter"}
    config = ServiceConfig(learner={"num_gpus": 0.5})
    bundle = config.learner_placement(config.pools["default"]).serve_options["placement_group_bundles"][1]
    assert bundle == {"CPU": LEARNER_CPUS, "GPU": 0.5}
    assert config.num_shells == ServiceConfig().num_shells + 1
    assert config.num_ranks == ServiceConfig().num_ranks


def test_settings_change_while_it_runs_and_nothing_else_does():
    options = LearnerOptions(num_steps=7)
    assert options.changed_settings({}) == options.settings
    assert options.changed_settings({"min_samples": 3}) == LearnerSettings(num_steps=7, min_samples=3)
    for changes, said in [
        ({"nmu_steps": 1}, "unknown learner setting 'nmu_steps'; did you mean 'num_steps'?"),
        ({"max_bytes": 1}, "max_bytes holds from the learner's start"),
        ({"num_steps": 0}, "num_steps must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=said.partition(";")[0]):
            options.changed_settings(changes)


def test_a_pool_with_a_learner_is_two_deployments():
    pytest.importorskip("ray")
    names = [deployment.name for deployment in deployments(ServiceConfig(learner={}, device="cpu"))]
    assert sorted(names) == ["Drafter", "Gateway", "Learner", "Router", "Verifier"]


def deployments(config: ServiceConfig) -> list[Any]:
    from ray.serve._private.build_app import build_app

    return build_app(build(config), name="a").deployments
