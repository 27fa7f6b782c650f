"""Short names of models, and what they stand for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outrider.cluster.config.known_models import SMOLLM2, SMOLLM2_FILE, SMOLLM2_HUB_ID, SMOLLM2_PACKAGE, path_of
from outrider.cluster.config.service_config import ServiceConfig
from outrider.drafter_service import embedded, shipped
from outrider.drafter_service.service.speculative_config import Method


def test_the_embedded_pair_has_a_name_and_is_the_default():
    named, unnamed = ServiceConfig(model="embedded"), ServiceConfig()
    assert named.model.target_path == unnamed.model.target_path == str(embedded.target_path())
    assert named.drafter_spec.model.path == unnamed.drafter_spec.model.path == str(embedded.draft_path())
    assert named.model.name == unnamed.model.name == "outrider-embedded"


def test_any_other_model_is_what_it_was_given_as(tmp_path: Path):
    for model in (str(tmp_path), "owner/name", "model.gguf"):
        assert path_of(model) == model
    assert ServiceConfig(model=str(tmp_path)).drafter_spec.model is None


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the package where this environment has it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def test_smollm2_is_the_hubs_where_its_package_is_not_installed(no_package: None):
    assert path_of("smollm2") == SMOLLM2_HUB_ID
    config = ServiceConfig(model="smollm2")
    assert (config.model.target_path, config.model.name) == (SMOLLM2_HUB_ID, "smollm2")
    assert ServiceConfig(model="bigger", draft_model="smollm2").drafter_spec.model.path == SMOLLM2_HUB_ID


@pytest.mark.parametrize("name", [SMOLLM2, SMOLLM2_HUB_ID])
def test_smollm2_comes_with_a_head(name: str):
    config = ServiceConfig(model=name)
    assert config.drafter_spec.model.path == str(shipped.smollm2_drafters()[Method.EAGLE3])
    assert config.speculative.method is Method.EAGLE3
    near = ServiceConfig(model=name, speculative_config={"location": "verifier"})
    assert (near.drafter_spec.model.path, near.speculative.method) == (config.drafter_spec.model.path, Method.EAGLE3)


def test_what_somebody_says_wins_over_what_is_shipped(tmp_path: Path):
    assert ServiceConfig(model=SMOLLM2, draft_model=str(tmp_path)).speculative.method is Method.DRAFT_MODEL
    lookup = ServiceConfig(model=SMOLLM2, speculative_config={"method": "ngram"})
    assert (lookup.speculative.method, lookup.drafter_spec.model) == (Method.NGRAM, None)


def test_smollm2_is_the_installed_packages_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / SMOLLM2_PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('it is not to be imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert path_of("smollm2") == SMOLLM2_HUB_ID, "a package without the file"
    (package / SMOLLM2_FILE).touch()
    assert path_of("smollm2") == str(package / SMOLLM2_FILE)
