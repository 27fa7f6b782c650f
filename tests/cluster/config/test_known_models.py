"""Short names of models, and what they stand for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outrider.cluster.config.known_models import SMOLLM2_FILE, SMOLLM2_HUB_ID, SMOLLM2_PACKAGE, path_of
from outrider.cluster.config.service_config import ServiceConfig
from outrider.drafter_service import embedded


def test_the_embedded_pair_has_a_name_and_is_the_default():
    named, unnamed = ServiceConfig(model="embedded"), ServiceConfig()
    assert named.target_path == unnamed.target_path == str(embedded.target_path())
    assert named.draft_path == unnamed.draft_path == str(embedded.draft_path())
    assert named.model_name == unnamed.model_name == "outrider-embedded"


def test_any_other_model_is_what_it_was_given_as(tmp_path: Path):
    for model in (str(tmp_path), "owner/name", "model.gguf"):
        assert path_of(model) == model
    assert ServiceConfig(model=str(tmp_path)).draft_path is None


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the package where this environment has it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def test_smollm2_is_the_hubs_where_its_package_is_not_installed(no_package: None):
    assert path_of("smollm2") == SMOLLM2_HUB_ID
    config = ServiceConfig(model="smollm2")
    assert (config.target_path, config.model_name, config.draft_path) == (SMOLLM2_HUB_ID, "smollm2", None)


def test_smollm2_is_the_installed_packages_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / SMOLLM2_PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('it is not to be imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert path_of("smollm2") == SMOLLM2_HUB_ID, "a package without the file"
    (package / SMOLLM2_FILE).touch()
    assert path_of("smollm2") == str(package / SMOLLM2_FILE)
